// The flash attention of one block: see flash_block.h.
#include "flash_block.h"

namespace ATB_ISA {

// Tiles whose sums are held apart before they join the totals: one long chain of additions over 65,536 keys
// would round a thousand times, two levels round sixty.
constexpr int64_t SUM_TILES = 32;

ATB_INLINE float mask_at(const Block &b, int lane, int64_t key) {
  const int64_t at = key * b.mask_key_stride;
  switch (b.mask_dtype) {
  case ATB_F32:
    return ((const float *)b.mask[lane])[at];
  case ATB_BF16:
    return to_float(((const bf16 *)b.mask[lane])[at]);
  case ATB_F16:
    return to_float(((const f16 *)b.mask[lane])[at]);
  default:
    return ((const uint8_t *)b.mask[lane])[at] ? 0.0f : -INF;
  }
}

void cap_scores(float *score, int64_t n, int vectors, float softcap) {
  for (int64_t j = 0; j < n; ++j)
    for (int v = 0; v < vectors; ++v) {
      float *s = score + j * STRIDE + v * W;
      store(s, softcap * tanh(load(s) / softcap));
    }
}

void adjust_scores(const Block &b, const Tile &tile, float *score) {
  const int vectors = b.vectors();
  const int64_t begin = tile.at, n = tile.n;
  if (b.has_slopes)
    for (int64_t j = 0; j < n; ++j)
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * STRIDE + v * W;
        vi distance = load_raw<vi>(b.position + v * W) - (int32_t)(begin + j);
        distance = distance < 0 ? -distance : distance;
        store(s, load(s) - load(b.slope + v * W) * __builtin_convertvector(distance, vf));
      }
  if (b.mask_dtype >= 0 && b.mask_shared) {
    for (int64_t j = 0; j < n; ++j) {
      const float m = mask_at(b, 0, begin + j);
      if (m == 0.0f) continue;
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * STRIDE + v * W;
        store(s, m == -INF ? set1(-INF) : load(s) + m);
      }
    }
  } else if (b.mask_dtype >= 0) {
    for (int lane = 0; lane < b.count; ++lane)
      for (int64_t j = 0; j < n; ++j) {
        const float m = mask_at(b, lane, begin + j);
        float *s = score + j * STRIDE + lane;
        *s = m == -INF ? -INF : *s + m;
      }
  }
  if (!tile.ranged) return;
  for (int v = 0; v < vectors; ++v) {
    const vi low = load_raw<vi>(b.low + v * W), high = load_raw<vi>(b.high + v * W), none = {};
    const vi far_low = b.has_far ? load_raw<vi>(b.far_low + v * W) : none;
    const vi far_high = b.has_far ? load_raw<vi>(b.far_high + v * W) : none;
    const vi alive = tile.partly_live ? load_raw<vi>(tile.alive + v * W) : none - 1;
    for (int64_t j = 0; j < n; ++j) {
      const vi key = none + (int32_t)(begin + j);
      const vi seen = (((key >= low) & (key < high)) | ((key >= far_low) & (key < far_high))) & alive;
      float *s = score + j * STRIDE + v * W;
      store(s, seen ? load(s) : set1(-INF));
    }
  }
}

Tiles::Tiles(const Block &block) : b(block), at(0) {
  near_.begin = far_.begin = INT64_MAX;
  all_near.end = all_far.end = INT64_MAX;
  for (int i = 0; i < b.count; ++i) {
    if (b.low[i] < b.high[i]) {
      near_.begin = min64(near_.begin, b.low[i]);
      near_.end = max64(near_.end, b.high[i]);
    }
    all_near.begin = max64(all_near.begin, b.low[i]);
    all_near.end = min64(all_near.end, b.high[i]);
    if (!b.has_far) continue;
    if (b.far_low[i] < b.far_high[i]) {
      far_.begin = min64(far_.begin, b.far_low[i]);
      far_.end = max64(far_.end, b.far_high[i]);
    }
    all_far.begin = max64(all_far.begin, b.far_low[i]);
    all_far.end = min64(all_far.end, b.far_high[i]);
  }
  if (!b.has_far) all_far.end = 0;
  at = min64(near_.begin, far_.begin);
}

// Marks the lanes for which this block of keys is live; false where there is none.
bool Tiles::mark_live(Tile &tile, int64_t key_block) const {
  bool any = false, all = true;
  for (int i = 0; i < b.vectors() * W; ++i) {
    const bool alive = i < b.count && b.live[i][key_block];
    tile.alive[i] = alive ? -1 : 0;
    any |= alive;
    all &= alive || i >= b.count;
  }
  tile.partly_live = !all;
  return any;
}

bool Tiles::next(Tile &tile) {
  for (;;) {
    // at: the next key that some lane may see
    const bool in_far = at >= far_.begin && at < far_.end, in_near = at >= near_.begin && at < near_.end;
    if (!in_far && !in_near) {
      const int64_t start =
          min64(far_.begin > at ? far_.begin : INT64_MAX, near_.begin > at ? near_.begin : INT64_MAX);
      if (start == INT64_MAX || (start == far_.begin ? far_.end : near_.end) <= start) return false;
      at = start;
      continue;
    }
    int64_t end = max64(in_far ? far_.end : 0, in_near ? near_.end : 0);
    tile.partly_live = false;
    if (b.block_size > 0) {
      const int64_t key_block = at / b.block_size, block_end = (key_block + 1) * b.block_size;
      if (!mark_live(tile, key_block)) {
        at = block_end;
        continue;
      }
      end = min64(end, block_end);
    }
    tile.at = at;
    tile.n = min64(KEYS, end - at);
    const int64_t last = at + tile.n;
    const bool full =
        (at >= all_near.begin && last <= all_near.end) || (at >= all_far.begin && last <= all_far.end);
    tile.ranged = tile.partly_live || !full;
    at = last;
    return true;
  }
}

void fill_unused_lanes(Block &b, float *q, int64_t head_dim) {
  for (int i = b.count; i < b.vectors() * W; ++i) {
    b.low[i] = b.low[0];
    b.high[i] = b.high[0];
    b.far_low[i] = b.far_low[0];
    b.far_high[i] = b.far_high[0];
    b.position[i] = b.position[0];
    b.slope[i] = b.slope[0];
    for (int64_t d = 0; d < head_dim; ++d) q[d * STRIDE + i] = 0.0f;
  }
}

// Adds what the last tiles left in out and l to the totals and starts anew; m goes on.
static void fold_sums(const Scratch &s, int vectors, int64_t head_dim, const float *m, float *l,
                      float *total_m, float *total_l) {
  for (int v = 0; v < vectors; ++v) {
    const vf top = load(m + v * W);
    const vf factor = exp(load(total_m + v * W) - (top == set1(-INF) ? (vf){} : top));
    store(total_m + v * W, top);
    store(total_l + v * W, load(total_l + v * W) * factor + load(l + v * W));
    store(l + v * W, (vf){});
    for (int64_t d = 0; d < head_dim; ++d) {
      float *total = s.total + d * STRIDE + v * W, *out = s.out + d * STRIDE + v * W;
      store(total, load(total) * factor + load(out));
      store(out, (vf){});
    }
  }
}

void set_query(Scratch &s, int lane, const void *q, int dtype, int64_t head_dim, float scale) {
  read_floats(q, dtype, head_dim, s.k); // no key has been read yet
  for (int64_t d = 0; d < head_dim; ++d) s.q[d * STRIDE + lane] = s.k[d] * scale;
}

static void finish_block(const Block &b, const Scratch &s, const float *m, const float *l, int64_t head_dim) {
  for (int lane = 0; lane < b.count; ++lane) {
    float top = m[lane], total = l[lane], factor = 1.0f;
    if (b.has_sinks) {
      const float sink = b.sink[lane], with_sink = top > sink ? top : sink;
      factor = exp(set1(top - with_sink))[0];
      total = total * factor + exp(set1(sink - with_sink))[0];
      top = with_sink;
    }
    const bool any = total > 0.0f || total != total;
    const float scale = any ? factor / total : 0.0f;
    float *row = s.k; // the last keys are used up
    for (int64_t d = 0; d < head_dim; ++d) row[d] = s.total[d * STRIDE + lane] * scale;
    write_floats(row, head_dim, b.out[lane], b.dtype);
    if (b.lse[lane]) *b.lse[lane] = any ? top + __builtin_logf(total) : -INF;
  }
}

void flash_block(Block &b, Scratch &s, int64_t head_dim, float softcap, const KeyRows &keys) {
  const int vectors = b.vectors();
  fill_unused_lanes(b, s.q, head_dim);
  alignas(64) float m[LANES], l[LANES], alpha[LANES], total_m[LANES], total_l[LANES];
  for (int i = 0; i < LANES; ++i) {
    m[i] = total_m[i] = -INF;
    l[i] = total_l[i] = 0.0f;
  }
  memset(s.total, 0, head_dim * STRIDE * sizeof(float));
  memset(s.out, 0, head_dim * STRIDE * sizeof(float));
  const float *k[KEYS], *v[KEYS];
  const bool adjusted = b.has_slopes || b.mask_dtype >= 0;
  Tile tile;
  int64_t count = 0;
  for (Tiles tiles(b); tiles.next(tile);) {
    keys.read(tile.at, tile.n, head_dim, s.k, s.v, k, v);
    scores_of(k, tile.n, s.q, head_dim, vectors, s.score);
    if (softcap > 0.0f) cap_scores(s.score, tile.n, vectors, softcap);
    if (tile.ranged || adjusted) adjust_scores(b, tile, s.score);
    soften_tile(s.score, tile.n, vectors, m, l, alpha);
    values_of(v, tile.n, s.score, head_dim, vectors, alpha, s.out);
    if (++count % SUM_TILES == 0) fold_sums(s, vectors, head_dim, m, l, total_m, total_l);
  }
  fold_sums(s, vectors, head_dim, m, l, total_m, total_l);
  finish_block(b, s, m, total_l, head_dim);
}

} // namespace ATB_ISA
