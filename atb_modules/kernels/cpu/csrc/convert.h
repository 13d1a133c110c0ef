// Rows of any dtype (int8: its codes) to float32 and back, for the places where a kernel's speed does not
// hang on it.
#pragma once
#include "simd.h"

namespace ATB_ISA {

ATB_INLINE int64_t element_size(int dtype) {
  return dtype == 0 ? 4 : (dtype == 3 ? 1 : 2);
}

void read_floats(const void *x, int dtype, int64_t n, float *out);
void write_floats(const float *x, int64_t n, void *out, int dtype);

} // namespace ATB_ISA
