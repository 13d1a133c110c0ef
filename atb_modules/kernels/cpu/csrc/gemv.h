// Products of a few activation rows with a weight matrix: every weight is read from memory once.
#pragma once
#include "threads.h"

namespace ATB_ISA {

ATB_INLINE int64_t padded(int64_t k) {
  return (k + 2 * W - 1) / (2 * W) * (2 * W);
}

// Copies x (k floats) to out in the order that weights of a dtype want, so that a block of 2W weights is
// multiplied without shuffling: bfloat16 weights are loaded as 32-bit pairs, whose even members are the low
// halves shifted up and whose odd members are the high halves. The tail behind the whole blocks stays plain,
// as do the other dtypes.
void arrange(const float *x, float *out, int64_t k, int weight_dtype);

// out[r * out_stride + n] = x[r] . weight[n] + bias[n] for the rows of x and the columns [begin, end) of
// weight (n, k); bias optional. x is arranged.
void gemv(const float *x, int64_t rows, int64_t x_stride, const void *weight, int weight_dtype, int64_t k,
          int64_t weight_stride, int64_t begin, int64_t end, const float *bias, float *out,
          int64_t out_stride);

} // namespace ATB_ISA
