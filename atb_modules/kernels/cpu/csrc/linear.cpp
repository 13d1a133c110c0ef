// Linear layer for a few rows: activations of any of the dtypes, weights of any of the dtypes, float32 arithmetic.
#include "gemv.h"
#include "table.h"
#include <stdlib.h>

namespace ATB_ISA {

constexpr int64_t BLOCK_ROWS = 16;

template <class T> static void read_row(const T *x, float *out, int64_t k) {
  int64_t i = 0;
  for (; i + W <= k; i += W) store(out + i, load(x + i));
  for (; i < k; ++i) out[i] = to_float(x[i]);
}

static float bias_at(const atb_linear_args *a, int64_t n) {
  if (!a->bias) return 0.0f;
  if (a->bias_dtype == ATB_BF16) return to_float(((const bf16 *)a->bias)[n]);
  if (a->bias_dtype == ATB_F16) return to_float(((const f16 *)a->bias)[n]);
  return ((const float *)a->bias)[n];
}

template <class T, class WT> static void run(const atb_linear_args *a) {
  const int64_t stride = padded(a->k);
  float *rows = (float *)malloc((size_t)(2 * BLOCK_ROWS * stride + 1) * sizeof(float));
  float *plain = rows + BLOCK_ROWS * stride;
  for (int64_t first = 0; first < a->rows; first += BLOCK_ROWS) {
    const int64_t count = min64(BLOCK_ROWS, a->rows - first);
    for (int64_t r = 0; r < count; ++r) {
      read_row((const T *)a->x + (first + r) * a->x_stride, plain + r * stride, a->k);
      arrange<WT>(plain + r * stride, rows + r * stride, a->k);
    }
    const int used = a->n * a->k < 16384 ? 1 : (int)min64(a->threads, a->n);
    on_threads(used, [&](int thread, int threads) {
      const Range mine = share(a->n, thread, threads);
      gemv(rows, count, stride, (const WT *)a->weight, a->k, a->weight_stride, mine.begin, mine.end,
           [&](int64_t r, int64_t n, float value) {
             from_float((T *)a->out + (first + r) * a->out_stride + n, value + bias_at(a, n));
           });
    });
  }
  free(rows);
}

template <class T> static void run_weight(const atb_linear_args *a) {
  if (a->weight_dtype == ATB_BF16)
    run<T, bf16>(a);
  else if (a->weight_dtype == ATB_F16)
    run<T, f16>(a);
  else
    run<T, float>(a);
}

void linear(const atb_linear_args *a) {
  if (a->dtype == ATB_BF16)
    run_weight<bf16>(a);
  else if (a->dtype == ATB_F16)
    run_weight<f16>(a);
  else
    run_weight<float>(a);
}

} // namespace ATB_ISA
