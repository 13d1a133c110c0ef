// The append to int8 pages; see atb_append_args.
#pragma once
#include "atb_cpu.h"
#include "simd.h"

namespace ATB_ISA {

// Floats of memory that each thread needs.
int64_t codes_space(const atb_append_args *a);

// One thread's share of the heads; each head's tokens are written in order.
void append_codes(const atb_append_args *a, int thread, int count, float *space);

} // namespace ATB_ISA
