// What flash_block.h does to a tile of scores before the softmax.
#include "flash_block.h"

namespace ATB_ISA {

ATB_INLINE float mask_at(const Block &b, int lane, int64_t key) {
  const int64_t at = key * b.mask_key_stride;
  switch (b.mask_dtype) {
  case ATB_F32: return ((const float *)b.mask[lane])[at];
  case ATB_BF16: return to_float(((const bf16 *)b.mask[lane])[at]);
  case ATB_F16: return to_float(((const f16 *)b.mask[lane])[at]);
  default: return ((const uint8_t *)b.mask[lane])[at] ? 0.0f : -INF;
  }
}

void adjust_scores(const Block &b, float *score, int64_t begin, int64_t n, float softcap, bool ranged) {
  const int vectors = b.vectors();
  if (softcap > 0.0f)
    for (int64_t j = 0; j < n; ++j)
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * LANES + v * W;
        store(s, softcap * tanh(load(s) / softcap));
      }
  if (b.has_slopes)
    for (int64_t j = 0; j < n; ++j)
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * LANES + v * W;
        vi distance = load_raw<vi>(b.position + v * W) - (int32_t)(begin + j);
        distance = distance < 0 ? -distance : distance;
        store(s, load(s) - load(b.slope + v * W) * __builtin_convertvector(distance, vf));
      }
  if (b.mask_dtype >= 0 && b.mask_shared) {
    for (int64_t j = 0; j < n; ++j) {
      const float m = mask_at(b, 0, begin + j);
      if (m == 0.0f) continue;
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * LANES + v * W;
        store(s, m == -INF ? set1(-INF) : load(s) + m);
      }
    }
  } else if (b.mask_dtype >= 0) {
    for (int lane = 0; lane < b.count; ++lane)
      for (int64_t j = 0; j < n; ++j) {
        const float m = mask_at(b, lane, begin + j);
        float *s = score + j * LANES + lane;
        *s = m == -INF ? -INF : *s + m;
      }
  }
  if (ranged)
    for (int64_t j = 0; j < n; ++j) {
      const vi key = (vi){} + (int32_t)(begin + j);
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * LANES + v * W;
        const vi seen = (key >= load_raw<vi>(b.low + v * W)) & (key < load_raw<vi>(b.high + v * W));
        store(s, seen ? load(s) : set1(-INF));
      }
    }
}

void fold_sums(const Scratch &s, int vectors, int64_t head_dim, const float *m, float *l, float *total_m,
               float *total_l) {
  for (int v = 0; v < vectors; ++v) {
    const vf top = load(m + v * W);
    const vf factor = exp(load(total_m + v * W) - (top == set1(-INF) ? (vf){} : top));
    store(total_m + v * W, top);
    store(total_l + v * W, load(total_l + v * W) * factor + load(l + v * W));
    store(l + v * W, (vf){});
    for (int64_t d = 0; d < head_dim; ++d) {
      float *total = s.total + d * LANES + v * W, *out = s.out + d * LANES + v * W;
      store(total, load(total) * factor + load(out));
      store(out, (vf){});
    }
  }
}

} // namespace ATB_ISA
