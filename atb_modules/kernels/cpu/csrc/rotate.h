// Rotation of one head's channels, shared by the rotary, append and decode-layer kernels.
#pragma once
#include "stream.h"

namespace ATB_ISA {

// Rotates the first 2 * half channels of x into out (which may be x itself) and copies the rest.
template <bool STREAM, class T, class O>
ATB_INLINE void rotate_head(const T *x, O *out, const float *cos, const float *sin, int64_t half,
                            int64_t head_dim, bool interleaved) {
  int64_t i = 0;
  if (!interleaved) {
    for (; i + W <= half; i += W) {
      const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
      put<STREAM>(out + i, a * c - b * s);
      put<STREAM>(out + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
      const float a = to_float(x[i]), b = to_float(x[half + i]);
      from_float(out + i, a * cos[i] - b * sin[i]);
      from_float(out + half + i, b * cos[i] + a * sin[i]);
    }
  } else {
    for (; i < half; ++i) {
      const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
      from_float(out + 2 * i, a * cos[i] - b * sin[i]);
      from_float(out + 2 * i + 1, b * cos[i] + a * sin[i]);
    }
  }
  if ((const void *)x == (const void *)out) return;
  for (i = 2 * half; i + W <= head_dim; i += W) put<STREAM>(out + i, load(x + i));
  if (i < head_dim) store_part(out + i, load_part(x + i, head_dim - i), head_dim - i);
}

} // namespace ATB_ISA
