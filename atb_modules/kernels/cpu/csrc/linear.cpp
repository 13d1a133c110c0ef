// Linear layer for a few rows: activations of any of the dtypes, weights of any of the dtypes, float32
// arithmetic.
#include "convert.h"
#include "gemv.h"
#include "table.h"
#include <stdlib.h>

namespace ATB_ISA {

constexpr int64_t BLOCK_ROWS = 16;

// The bias as float32 (n floats at `space` where it must be converted), null without one.
static const float *read_bias(const atb_linear_args *a, float *space) {
  if (!a->bias || a->bias_dtype == ATB_F32) return (const float *)a->bias;
  read_floats(a->bias, a->bias_dtype, a->n, space);
  return space;
}

void linear(const atb_linear_args *a) {
  const int64_t stride = padded(a->k), block = min64(BLOCK_ROWS, a->rows), size = element_size(a->dtype);
  float *rows = (float *)malloc((size_t)(2 * block * stride + (block + 1) * a->n + 1) * sizeof(float));
  float *plain = rows + block * stride, *result = plain + block * stride;
  const float *bias = read_bias(a, result + block * a->n);
  const bool direct = a->dtype == ATB_F32;
  for (int64_t first = 0; first < a->rows; first += block) {
    const int64_t count = min64(block, a->rows - first);
    for (int64_t r = 0; r < count; ++r) {
      const char *x = (const char *)a->x + (first + r) * a->x_stride * size;
      read_floats(x, a->dtype, a->k, plain + r * stride);
      arrange(plain + r * stride, rows + r * stride, a->k, a->weight_dtype);
    }
    char *out = (char *)a->out + first * a->out_stride * size;
    const int used = a->n * a->k < 16384 ? 1 : (int)min64(a->threads, a->n);
    on_threads(used, [&](int thread, int threads) {
      const Range mine = share(a->n, thread, threads);
      gemv(rows, count, stride, a->weight, a->weight_dtype, a->k, a->weight_stride, mine.begin, mine.end,
           bias, direct ? (float *)out : result, direct ? a->out_stride : a->n);
      if (direct) return;
      for (int64_t r = 0; r < count; ++r)
        write_floats(result + r * a->n + mine.begin, mine.end - mine.begin,
                     out + (r * a->out_stride + mine.begin) * size, a->dtype);
    });
  }
  free(rows);
}

} // namespace ATB_ISA
