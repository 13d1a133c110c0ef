// The inner loops of gemv.h, compiled once for each weight dtype.
#include "gemv.h"
#include "atb_cpu.h"

namespace ATB_ISA {

void arrange(const float *x, float *out, int64_t k, int weight_dtype) {
  int64_t i = 0;
  if (weight_dtype == ATB_BF16)
    for (; i + 2 * W <= k; i += 2 * W)
      for (int j = 0; j < W; ++j) {
        out[i + j] = x[i + 2 * j];
        out[i + W + j] = x[i + 2 * j + 1];
      }
  memcpy(out + i, x + i, (k - i) * sizeof(float));
}

struct Pair {
  vf first, second;
};
ATB_INLINE Pair load_pair(const float *p) {
  return {load(p), load(p + W)};
}
ATB_INLINE Pair load_pair(const f16 *p) {
  return {load(p), load(p + W)};
}
ATB_INLINE Pair load_pair(const bf16 *p) {
  const vu both = load_raw<vu>(p);
  return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
}

// Rows of a weight follow each other in memory: what is asked for ahead is the next row's, and the hardware's
// own prefetcher, which stops at every page, is not waited for.
constexpr size_t AHEAD = 8192;

// out[r * stride] = dot(x + r * x_stride, weight) for ROWS rows of activations and one row of weights.
template <int ROWS, class WT>
ATB_INLINE void dot_rows(const float *x, int64_t x_stride, const WT *weight, int64_t k, float *out) {
  constexpr int SETS = ROWS == 1 ? 4 : (ROWS == 2 ? 2 : 1);
  vf even[SETS][ROWS] = {}, odd[SETS][ROWS] = {};
  int64_t i = 0;
  for (; i + 2 * W * SETS <= k; i += 2 * W * SETS) {
#pragma GCC unroll 8
    for (size_t line = 0; line < 2 * W * SETS * sizeof(WT); line += 64)
      __builtin_prefetch((const char *)(weight + i) + AHEAD + line);
#pragma GCC unroll 4
    for (int s = 0; s < SETS; ++s) {
      const Pair w = load_pair(weight + i + 2 * W * s);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        even[s][r] += w.first * load(x + r * x_stride + i + 2 * W * s);
        odd[s][r] += w.second * load(x + r * x_stride + i + 2 * W * s + W);
      }
    }
  }
  for (; i + 2 * W <= k; i += 2 * W) {
    const Pair w = load_pair(weight + i);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      even[0][r] += w.first * load(x + r * x_stride + i);
      odd[0][r] += w.second * load(x + r * x_stride + i + W);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    vf total = even[0][r] + odd[0][r];
    for (int s = 1; s < SETS; ++s) total += even[s][r] + odd[s][r];
    out[r] = sum(total);
  }
  for (; i < k; ++i) {
    const float w = to_float(weight[i]);
    for (int r = 0; r < ROWS; ++r) out[r] += w * x[r * x_stride + i];
  }
}

// Four rows of activations against COLUMNS rows of weights: what is loaded is used COLUMNS or four times.
template <int COLUMNS, class WT>
ATB_INLINE void dot_tile(const float *x, int64_t x_stride, const WT *weight, int64_t weight_stride, int64_t k,
                         float dots[][4]) {
  vf acc[COLUMNS][4] = {};
  int64_t i = 0;
  for (; i + 2 * W <= k; i += 2 * W) {
    Pair w[COLUMNS];
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; ++c) w[c] = load_pair(weight + c * weight_stride + i);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const vf first = load(x + r * x_stride + i), second = load(x + r * x_stride + i + W);
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; ++c) acc[c][r] = acc[c][r] + w[c].first * first + w[c].second * second;
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) dots[c][r] = sum(acc[c][r]);
  for (; i < k; ++i)
    for (int c = 0; c < COLUMNS; ++c)
      for (int r = 0; r < 4; ++r) dots[c][r] += to_float(weight[c * weight_stride + i]) * x[r * x_stride + i];
}

template <class WT>
static void products(const float *x, int64_t rows, int64_t x_stride, const WT *weight, int64_t k,
                     int64_t weight_stride, int64_t begin, int64_t end, const float *bias, float *out,
                     int64_t out_stride) {
  constexpr int COLUMNS = W == 16 ? 4 : 2;
  int64_t n = begin;
  for (; rows >= 4 && n + COLUMNS <= end; n += COLUMNS) {
    const WT *w = weight + n * weight_stride;
    float dots[COLUMNS][4];
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      dot_tile<COLUMNS>(x + r * x_stride, x_stride, w, weight_stride, k, dots);
      for (int c = 0; c < COLUMNS; ++c)
        for (int j = 0; j < 4; ++j)
          out[(r + j) * out_stride + n + c] = dots[c][j] + (bias ? bias[n + c] : 0.0f);
    }
    for (; r < rows; ++r) // the weights are in the first-level cache by now
      for (int c = 0; c < COLUMNS; ++c) {
        dot_rows<1>(x + r * x_stride, x_stride, w + c * weight_stride, k, dots[c]);
        out[r * out_stride + n + c] = dots[c][0] + (bias ? bias[n + c] : 0.0f);
      }
  }
  for (; n < end; ++n) {
    const WT *w = weight + n * weight_stride;
    const float shift = bias ? bias[n] : 0.0f;
    float dots[4];
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      dot_rows<4>(x + r * x_stride, x_stride, w, k, dots);
      for (int j = 0; j < 4; ++j) out[(r + j) * out_stride + n] = dots[j] + shift;
    }
    if (rows - r >= 2) {
      dot_rows<2>(x + r * x_stride, x_stride, w, k, dots);
      for (int j = 0; j < 2; ++j) out[(r + j) * out_stride + n] = dots[j] + shift;
      r += 2;
    }
    if (r < rows) {
      dot_rows<1>(x + r * x_stride, x_stride, w, k, dots);
      out[r * out_stride + n] = dots[0] + shift;
    }
  }
}

void gemv(const float *x, int64_t rows, int64_t x_stride, const void *weight, int weight_dtype, int64_t k,
          int64_t weight_stride, int64_t begin, int64_t end, const float *bias, float *out,
          int64_t out_stride) {
  if (weight_dtype == ATB_BF16)
    products(x, rows, x_stride, (const bf16 *)weight, k, weight_stride, begin, end, bias, out, out_stride);
  else if (weight_dtype == ATB_F16)
    products(x, rows, x_stride, (const f16 *)weight, k, weight_stride, begin, end, bias, out, out_stride);
  else
    products(x, rows, x_stride, (const float *)weight, k, weight_stride, begin, end, bias, out, out_stride);
}

} // namespace ATB_ISA
