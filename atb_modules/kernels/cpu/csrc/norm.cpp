// RMSNorm and LayerNorm over rows, alone or fused with the residual sum.
#include "stream.h"
#include "table.h"
#include "threads.h"
#include <stdlib.h>

namespace ATB_ISA {

// weight + offset in float32; null when there is nothing to apply.
template <class WT> static float *prepare(const atb_norm_args *a, const WT *weight, bool offset) {
  if (!weight) return nullptr;
  float *prepared = (float *)malloc((a->width + W) * sizeof(float));
  for (int64_t i = 0; i < a->width; i += W) {
    const int64_t n = min64(W, a->width - i);
    vf w = n == W ? load(weight + i) : load_part(weight + i, n);
    if (offset) w = w + a->weight_offset;
    store(prepared + i, w);
  }
  return prepared;
}

static float *prepare_any(const atb_norm_args *a, const void *weight, bool offset) {
  if (a->weight_dtype == ATB_BF16) return prepare(a, (const bf16 *)weight, offset);
  if (a->weight_dtype == ATB_F16) return prepare(a, (const f16 *)weight, offset);
  return prepare(a, (const float *)weight, offset);
}

// Calls body(offset, count) for whole vectors, then for the tail.
template <class Body> ATB_INLINE void sweep(int64_t width, const Body &body) {
  int64_t i = 0;
  for (; i + W <= width; i += W) body(i, (int64_t)W);
  if (i < width) body(i, width - i);
}

template <class T> ATB_INLINE vf get(const T *p, int64_t n) {
  return n == W ? load(p) : load_part(p, n);
}
template <bool STREAM, class T> ATB_INLINE void put(T *p, vf v, int64_t n) {
  if (n == W)
    put<STREAM>(p, v);
  else
    store_part(p, v, n);
}

template <class T> static float row_sum(const T *x, int64_t width) {
  vf s0 = {}, s1 = {}, s2 = {}, s3 = {};
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
    s0 += load(x + i);
    s1 += load(x + i + W);
    s2 += load(x + i + 2 * W);
    s3 += load(x + i + 3 * W);
  }
  for (; i < width; i += W) s0 += get(x + i, min64(W, width - i));
  return sum((s0 + s1) + (s2 + s3));
}

// Sum of (x - mean)^2; the missing lanes of the tail must not count (mean is not 0 in LayerNorm).
template <class T> static float row_squares(const T *x, int64_t width, float mean) {
  vf s0 = {}, s1 = {}, s2 = {}, s3 = {};
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
    const vf a = load(x + i) - mean, b = load(x + i + W) - mean;
    const vf c = load(x + i + 2 * W) - mean, d = load(x + i + 3 * W) - mean;
    s0 += a * a;
    s1 += b * b;
    s2 += c * c;
    s3 += d * d;
  }
  for (; i + W <= width; i += W) {
    const vf a = load(x + i) - mean;
    s0 += a * a;
  }
  float tail = 0.0f;
  for (; i < width; ++i) {
    const float a = to_float(x[i]) - mean;
    tail += a * a;
  }
  return sum((s0 + s1) + (s2 + s3)) + tail;
}

template <bool STREAM, class T>
ATB_INLINE void normalise_row(const atb_norm_args *a, const T *x, T *out, const float *weight,
                              const float *bias) {
  const float mean = a->layer_norm ? row_sum(x, a->width) / a->width : 0.0f;
  const float inverse = 1.0f / __builtin_sqrtf(row_squares(x, a->width, mean) / a->width + a->eps);
  const bool cast_first = a->cast_first;
  sweep(a->width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    vf y = (get(x + i, n) - mean) * inverse;
    if (cast_first) y = round_to<T>(y);
    if (weight) y = y * load(weight + i);
    if (bias) y = y + load(bias + i);
    put<STREAM>(out + i, y, n);
  });
}

// Streamed sums are kept in `row` too: they are read once more, to be normalised.
template <bool STREAM, class T>
static void run_rows(const atb_norm_args *a, Range rows, const float *weight, const float *bias, T *row) {
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const T *x = (const T *)a->x + r * a->x_stride;
    if (a->residual) {
      const T *residual = (const T *)a->residual + r * a->residual_stride;
      T *total = (T *)a->sum + r * a->width, *kept = STREAM ? row : total;
      sweep(a->width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const vf v = get(x + i, n) + get(residual + i, n);
        put<false>(kept + i, v, n);
        if (STREAM) put<true>(total + i, v, n);
      });
      x = kept;
    }
    normalise_row<STREAM>(a, x, (T *)a->out + r * a->width, weight, bias);
  }
  if (STREAM) stream_fence();
}

template <class T> static void run(const atb_norm_args *a) {
  float *weight = prepare_any(a, a->weight, true), *bias = prepare_any(a, a->bias, false);
  const int64_t total = a->rows * a->width;
  const int threads = total < SHARED_WORK ? 1 : (int)min64(a->threads, a->rows);
  const bool stream =
      may_stream((const T *)a->out, total, a->width, a->x) &&
      (!a->residual || (may_stream((const T *)a->sum, total, a->width, a->x) && a->sum != a->residual));
  T *kept = stream && a->residual ? (T *)malloc(threads * a->width * sizeof(T)) : nullptr;
  on_threads(threads, [&](int thread, int count) {
    const Range mine = share(a->rows, thread, count);
    if (stream)
      run_rows<true>(a, mine, weight, bias, kept ? kept + thread * a->width : nullptr);
    else
      run_rows<false>(a, mine, weight, bias, (T *)nullptr);
  });
  free(kept);
  free(weight);
  free(bias);
}

void norm(const atb_norm_args *a) {
  if (a->dtype == ATB_BF16)
    run<bf16>(a);
  else if (a->dtype == ATB_F16)
    run<f16>(a);
  else
    run<float>(a);
}

} // namespace ATB_ISA
