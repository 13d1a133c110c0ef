// Linear layer for a few rows: activations of any of the dtypes, weights of any of the dtypes, float32 arithmetic.
#include "gemv.h"
#include "table.h"
#include <stdlib.h>

namespace ATB_ISA {

constexpr int64_t BLOCK_ROWS = 16;

template <class A, class B> struct Same {
  static constexpr bool value = false;
};
template <class A> struct Same<A, A> {
  static constexpr bool value = true;
};

template <class T> static void read_row(const T *x, float *out, int64_t k) {
  int64_t i = 0;
  for (; i + W <= k; i += W) store(out + i, load(x + i));
  for (; i < k; ++i) out[i] = to_float(x[i]);
}

template <class T> static void write_row(const float *x, T *out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i));
  if (i < n) store_part(out + i, load_part(x + i, n - i), n - i);
}

// The bias as float32 (n floats behind `space`), null without one.
static const float *read_bias(const atb_linear_args *a, float *space) {
  if (!a->bias) return nullptr;
  if (a->bias_dtype == ATB_BF16)
    read_row((const bf16 *)a->bias, space, a->n);
  else if (a->bias_dtype == ATB_F16)
    read_row((const f16 *)a->bias, space, a->n);
  else
    return (const float *)a->bias;
  return space;
}

template <class T, class WT> static void run(const atb_linear_args *a) {
  const int64_t stride = padded(a->k);
  const int64_t block = min64(BLOCK_ROWS, a->rows);
  float *rows = (float *)malloc((size_t)(2 * block * stride + (block + 1) * a->n + 1) * sizeof(float));
  float *plain = rows + block * stride, *result = plain + block * stride;
  const float *bias = read_bias(a, result + block * a->n);
  for (int64_t first = 0; first < a->rows; first += block) {
    const int64_t count = min64(block, a->rows - first);
    for (int64_t r = 0; r < count; ++r) {
      read_row((const T *)a->x + (first + r) * a->x_stride, plain + r * stride, a->k);
      arrange<WT>(plain + r * stride, rows + r * stride, a->k);
    }
    T *out = (T *)a->out + first * a->out_stride;
    constexpr bool direct = Same<T, float>::value;
    const int used = a->n * a->k < 16384 ? 1 : (int)min64(a->threads, a->n);
    on_threads(used, [&](int thread, int threads) {
      const Range mine = share(a->n, thread, threads);
      gemv(rows, count, stride, (const WT *)a->weight, a->k, a->weight_stride, mine.begin, mine.end, bias,
           direct ? (float *)(void *)out : result, direct ? a->out_stride : a->n);
      if (!direct)
        for (int64_t r = 0; r < count; ++r)
          write_row(result + r * a->n + mine.begin, out + r * a->out_stride + mine.begin, mine.end - mine.begin);
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
