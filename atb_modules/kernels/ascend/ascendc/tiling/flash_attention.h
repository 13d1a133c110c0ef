// How attention over dense keys is laid out on cube and vector cores. See flash_attention.cpp.
#pragma once
#include "cube.h"

struct FlashAttentionTiling {
  uint32_t blocks;
  uint32_t batch, heads, kv_heads;
  uint32_t q_len, kv_len, head_dim, value_dim;
  uint32_t tile_rows, tile_keys; // of the scores that are computed together
  int32_t left, right;           // keys beside its own position that a query sees; < 0: all
  float scale, softcap;          // softcap 0: none
  uint32_t half;                 // most rows of a tile for one of the two vector cores
  // bytes of the workspace: from a block to the next, and from its scores to its weights, its products and,
  // in float32, its turned values
  uint32_t block_bytes, weights_at, products_at, values_at;
};

constexpr uint32_t kFlashRows = 16; // rows that a vector core holds at once

// Rows of a tile for the first of the two vector cores, whole blocks of statistics; the second takes the
// others.
inline int64_t FlashHalf(int64_t rows) {
  return ((rows + 1) / 2 + 7) / 8 * 8;
}
inline int64_t FlashUb(const FlashAttentionTiling &t, int32_t dtype) {
  const int64_t e = AtbElement(dtype), rows = kFlashRows, half = FlashHalf(t.tile_rows);
  const int64_t scores = rows * t.tile_keys * 4, values = rows * t.value_dim;
  const int64_t queues = 2 * scores + 2 * rows * t.tile_keys * e + 2 * values * 4 + values * e;
  const int64_t state = half * t.value_dim * 4 + 5 * AtbRoundUp(half * 4, 32);
  const int64_t turned = dtype == ATB_FLOAT ? 4 * values * 4 : 0;
  const int64_t small = rows * 64 * 4 + rows * 32 + 3 * rows * 4 + t.tile_keys * 4ll + 32;
  return queues + state + small + turned + (t.softcap > 0.0f ? 3 * scores + rows * t.tile_keys / 8 : 0);
}
inline int64_t FlashL1(const FlashAttentionTiling &t, int32_t dtype) {
  const int64_t keys = 2ll * t.tile_keys * (int64_t{t.head_dim} + t.value_dim);
  return AtbElement(dtype) * (keys + t.tile_rows * (2ll * t.head_dim + t.tile_keys));
}
inline int64_t FlashL0a(const FlashAttentionTiling &t) {
  return 2ll * t.tile_rows * 256;
}
inline int64_t FlashL0b(const FlashAttentionTiling &t, int32_t dtype) {
  return 2ll * (dtype == ATB_FLOAT ? 128 : t.tile_keys) * 256;
}
inline int64_t FlashL0c(const FlashAttentionTiling &t) {
  return 2ll * t.tile_rows * 128 * 4;
}
// Bytes of global memory of a block: two slots each of scores, of weights, of products with the values and,
// in float32, of turned values.
inline int64_t FlashScoreBytes(const FlashAttentionTiling &t) {
  return 2ll * t.tile_rows * t.tile_keys * 4;
}
inline int64_t FlashWeightBytes(const FlashAttentionTiling &t, int32_t dtype) {
  return 2ll * t.tile_rows * t.tile_keys * AtbElement(dtype);
}
inline int64_t FlashProductBytes(const FlashAttentionTiling &t) {
  return 2ll * t.tile_rows * t.value_dim * 4;
}
inline int64_t FlashBlockBytes(const FlashAttentionTiling &t, int32_t dtype) {
  const int64_t turned = dtype == ATB_FLOAT ? 2ll * t.tile_keys * t.value_dim * 4 : 0;
  return FlashScoreBytes(t) + FlashWeightBytes(t, dtype) + FlashProductBytes(t) + turned;
}
inline int64_t FlashWorkspace(const FlashAttentionTiling &t, int32_t dtype) {
  return t.blocks * FlashBlockBytes(t, dtype);
}

inline const char *TileFlashAttention(const AtbSoc &soc, const AtbCube &cube, int32_t dtype, int64_t batch,
                                      int64_t heads, int64_t kv_heads, int64_t q_len, int64_t kv_len,
                                      int64_t head_dim, int64_t value_dim, int64_t left, int64_t right,
                                      float scale, float softcap, FlashAttentionTiling *out) {
  if (const char *reason = AtbCheckCube(cube)) return reason;
  if (const char *reason = AtbCheckRows(soc, dtype, batch, head_dim)) return reason;
  if (kv_heads < 1 || heads < kv_heads || heads % kv_heads != 0)
    return "the query heads are a multiple of the heads of keys";
  if (head_dim % 16 != 0 || value_dim % 16 != 0 || value_dim < 16 || head_dim > 256 || value_dim > 256)
    return "the head sizes are multiples of 16, at most 256";
  if (q_len < 1 || kv_len < 0 || q_len > 0x3fffffffll || kv_len > 0x3fffffffll)
    return "the lengths are 1 to 2^30 - 1 queries and 0 to 2^30 - 1 keys";
  if (batch * heads > 0x7fffffffll) return "batch * heads is less than 2^31";
  if (!(softcap >= 0.0f)) return "softcap is positive, or 0 for none";
  FlashAttentionTiling t{};
  t.batch = static_cast<uint32_t>(batch);
  t.heads = static_cast<uint32_t>(heads);
  t.kv_heads = static_cast<uint32_t>(kv_heads);
  t.q_len = static_cast<uint32_t>(q_len);
  t.kv_len = static_cast<uint32_t>(kv_len);
  t.head_dim = static_cast<uint32_t>(head_dim);
  t.value_dim = static_cast<uint32_t>(value_dim);
  t.left = left < 0 || left > 0x3fffffffll ? -1 : static_cast<int32_t>(left);
  t.right = right < 0 || right > 0x3fffffffll ? -1 : static_cast<int32_t>(right);
  t.scale = scale;
  t.softcap = softcap;
  t.tile_keys = kv_len > 64 && dtype != ATB_FLOAT ? 128 : 64;
  t.tile_rows = 128;
  // fewer rows together where there are few, where cores would have none, and where the memories are full
  const auto units = [&] { return batch * heads * ((q_len + t.tile_rows - 1) / t.tile_rows); };
  const auto fits = [&] {
    return FlashUb(t, dtype) + kAtbSelectBytes <= soc.ub && FlashL1(t, dtype) <= cube.l1 &&
           FlashL0a(t) <= cube.l0a && FlashL0b(t, dtype) <= cube.l0b && FlashL0c(t) <= cube.l0c;
  };
  while (t.tile_rows > 16 && (t.tile_rows >= 2 * q_len || units() < soc.cube_cores || !fits()))
    t.tile_rows /= 2;
  if (!fits()) return "a tile of scores does not fit the memories of the cores";
  t.blocks = static_cast<uint32_t>(AtbMin(units(), soc.cube_cores));
  t.half = static_cast<uint32_t>(FlashHalf(t.tile_rows));
  t.block_bytes = static_cast<uint32_t>(FlashBlockBytes(t, dtype));
  t.weights_at = static_cast<uint32_t>(FlashScoreBytes(t));
  t.products_at = static_cast<uint32_t>(FlashScoreBytes(t) + FlashWeightBytes(t, dtype));
  t.values_at = t.products_at + static_cast<uint32_t>(FlashProductBytes(t));
  *out = t;
  return nullptr;
}
