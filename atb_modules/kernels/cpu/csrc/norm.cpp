// RMSNorm and LayerNorm over rows, alone or fused with the residual sum (and dropout), or modulated.
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

struct Scale {
  float mean, inverse;
};

template <class T> ATB_INLINE Scale scale_of(const atb_norm_args *a, const T *x) {
  const float mean = a->layer_norm ? row_sum(x, a->width) / a->width : 0.0f;
  return {mean, 1.0f / __builtin_sqrtf(row_squares(x, a->width, mean) / a->width + a->eps)};
}

// What is applied to every row. WEIGHT and BIAS are fixed when compiling, so that every road rounds alike:
// the compiler fuses the product and the sum on all of them.
template <bool WEIGHT, bool BIAS> struct Affine {
  const float *weight, *bias;
  bool cast_first;

  const Affine &of(int64_t) const { return *this; }

  template <class T>
  inline __attribute__((always_inline)) vf normalised(const T *x, int64_t i, int64_t n, Scale scale) const {
    vf y = (get(x + i, n) - scale.mean) * scale.inverse;
    if (cast_first) y = round_to<T>(y);
    if (WEIGHT) y = y * load(weight + i);
    if (BIAS) y = y + load(bias + i);
    return y;
  }
};

// The same followed by `* (1 + scale) + shift`, whose rows change with the rows of x.
template <class T, class A> struct Modulated {
  A affine;
  const T *scale, *shift;
  int64_t scale_stride, shift_stride, group;

  Modulated of(int64_t row) const {
    const int64_t g = row / group;
    return {affine, scale + g * scale_stride, shift + g * shift_stride, 0, 0, group};
  }
  inline __attribute__((always_inline)) vf normalised(const T *x, int64_t i, int64_t n, Scale s) const {
    return affine.normalised(x, i, n, s) * (get(scale + i, n) + 1.0f) + get(shift + i, n);
  }
};

// n bytes of 0 or 1 as floats.
ATB_INLINE vf get_bytes(const uint8_t *p, int64_t n) {
  typedef uint8_t vb __attribute__((vector_size(W)));
  uint8_t part[W] = {};
  if (n < W) memcpy(part, p, n);
  return __builtin_convertvector(load_raw<vb>(n < W ? part : p), vf);
}

// Elements i to i + n of row r of the sum.
template <class T>
ATB_INLINE vf summed(const atb_norm_args *a, const T *x, const T *residual, int64_t r, int64_t i, int64_t n) {
  if (!a->keep) return get(x + i, n) + get(residual + i, n);
  return get(x + i, n) * (get_bytes(a->keep + r * a->width + i, n) * a->keep_scale) + get(residual + i, n);
}

template <class T, class A> static void norm_rows(const atb_norm_args *a, Range rows, const A affine) {
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const T *x = (const T *)a->x + r * a->x_stride;
    T *out = (T *)a->out + r * a->width;
    if (a->residual) {
      const T *residual = (const T *)a->residual + r * a->residual_stride;
      T *total = (T *)a->sum + r * a->width;
      sweep(a->width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        put<false>(total + i, summed(a, x, residual, r, i, n), n);
      });
      x = total;
    }
    const Scale scale = scale_of(a, x);
    const A mine = affine.of(r);
    sweep(a->width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      put<false>(out + i, mine.normalised(x, i, n, scale), n);
    });
  }
}

// The same past the caches; the next row is fetched while this one is written.
template <class T, class A> static void stream_rows(const atb_norm_args *a, Range rows, const A affine) {
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const T *x = (const T *)a->x + r * a->x_stride, *next = r + 1 < rows.end ? x + a->x_stride : x;
    T *out = (T *)a->out + r * a->width;
    const Scale scale = scale_of(a, x);
    const A mine = affine.of(r);
    sweep(a->width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      __builtin_prefetch(next + i, 0, 2);
      put<true>(out + i, mine.normalised(x, i, n, scale), n);
    });
  }
  stream_fence();
}

// Sums and their norms past the caches: one row is read and summed while the row before it is normalised from
// its copy in `kept` (two rows), so that reading and writing never wait for each other.
template <class T, class A>
static void stream_sums(const atb_norm_args *a, Range rows, const A affine, T *kept) {
  Scale scale = {};
  for (int64_t r = rows.begin; r <= rows.end; ++r) {
    const bool reads = r<rows.end, writes = r> rows.begin;
    T *mine = kept + (r & 1) * a->width, *before = kept + (~r & 1) * a->width;
    const T *x = (const T *)a->x + r * a->x_stride,
            *residual = (const T *)a->residual + r * a->residual_stride;
    T *total = (T *)a->sum + r * a->width, *out = (T *)a->out + (r - 1) * a->width;
    const A last = affine.of(writes ? r - 1 : r);
    sweep(a->width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      if (reads) {
        const vf v = summed(a, x, residual, r, i, n);
        put<false>(mine + i, v, n);
        put<true>(total + i, v, n);
      }
      if (writes) put<true>(out + i, last.normalised(before, i, n, scale), n);
    });
    if (reads) scale = scale_of(a, mine);
  }
  stream_fence();
}

template <class T, class A> static void run(const atb_norm_args *a, const A affine) {
  const int64_t total = a->rows * a->width;
  const int threads = total < SHARED_WORK ? 1 : (int)min64(a->threads, a->rows);
  const bool sums = a->residual,
             stream =
                 may_stream((const T *)a->out, total, a->width, a->x) &&
                 (!sums || (may_stream((const T *)a->sum, total, a->width, a->x) && a->sum != a->residual));
  T *kept = stream && sums ? (T *)malloc(2 * threads * a->width * sizeof(T)) : nullptr;
  on_threads(threads, [&](int thread, int count) {
    const Range mine = share(a->rows, thread, count);
    if (stream && sums)
      stream_sums(a, mine, affine, kept + 2 * thread * a->width);
    else if (stream)
      stream_rows<T>(a, mine, affine);
    else
      norm_rows<T>(a, mine, affine);
  });
  free(kept);
}

template <class T, class A> static void run_modulated(const atb_norm_args *a, const A affine) {
  if (a->scale)
    run<T>(a, Modulated<T, A>{affine, (const T *)a->scale, (const T *)a->shift, a->scale_stride,
                              a->shift_stride, a->group});
  else
    run<T>(a, affine);
}

template <class T> static void run_affine(const atb_norm_args *a) {
  float *weight = prepare_any(a, a->weight, true), *bias = prepare_any(a, a->bias, false);
  const bool cast_first = a->cast_first;
  if (weight && bias)
    run_modulated<T>(a, Affine<true, true>{weight, bias, cast_first});
  else if (weight)
    run_modulated<T>(a, Affine<true, false>{weight, bias, cast_first});
  else if (bias)
    run_modulated<T>(a, Affine<false, true>{weight, bias, cast_first});
  else
    run_modulated<T>(a, Affine<false, false>{weight, bias, cast_first});
  free(weight);
  free(bias);
}

void norm(const atb_norm_args *a) {
  if (a->dtype == ATB_BF16)
    run_affine<bf16>(a);
  else if (a->dtype == ATB_F16)
    run_affine<f16>(a);
  else
    run_affine<float>(a);
}

} // namespace ATB_ISA
