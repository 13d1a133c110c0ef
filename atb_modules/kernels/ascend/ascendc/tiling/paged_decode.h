// How attention of one query token a sequence over a paged cache is laid out. See paged_decode.cpp.
#pragma once
#include "soc.h"

struct PagedDecodeTiling {
  uint32_t blocks;
  uint32_t batch, heads, kv_heads, group; // group: query heads that share a head of keys and values
  uint32_t head_dim, value_dim;
  uint32_t page_size, pages, max_blocks; // max_blocks: pages of a row of the block table
  uint32_t q_step;                       // elements between sequences of q; heads are dense
  uint32_t tile;                         // keys that are computed together
  uint32_t parts, part_keys;             // a long sequence is split in parts of as many keys
  int32_t left;                          // keys to the left that the token sees besides itself; < 0: all
  float scale, softcap;                  // softcap 0: none
};

// A call. The emulation's caller has the same fields, in this order.
struct PagedDecodeShape {
  int64_t batch, heads, kv_heads;
  int64_t head_dim, value_dim;
  int64_t page_size, pages, max_blocks; // max_blocks: pages of a row of the block table
  int64_t q_step;                       // elements between sequences of q; heads are dense
  int64_t max_length;                   // no sequence is longer; the parts are dealt out by it
  int64_t left;                         // keys to the left that the token sees besides itself; < 0: all
};

// Bytes of the unified buffer in the first phase (over keys) and in the second (merging the parts).
inline int64_t PagedDecodeBytes(const PagedDecodeTiling &t, int32_t dtype) {
  const int64_t e = AtbElement(dtype), g = t.group, stats = AtbRoundUp(g, 8);
  const int64_t most = AtbMax(t.head_dim, t.value_dim);
  const int64_t keys = 2ll * t.tile * (int64_t{t.head_dim} + t.value_dim) * e;
  const int64_t wide = dtype == ATB_FLOAT ? 0 : t.tile * most * 4;
  const int64_t products = t.tile * AtbMax(t.value_dim, 64) * 4;
  const int64_t queries = 2 * g * t.head_dim * e + g * t.head_dim * 4;
  const int64_t results = g * t.value_dim * 4 + g * (int64_t{t.value_dim} + 8) * 4;
  const int64_t scores = (t.softcap > 0.0f ? 4 : 1) * g * 64 * 4 + AtbRoundUp(8 * g, 32) + 64 * 32;
  return keys + wide + products + queries + results + scores + 5 * stats * 4 + 2 * stats * 32;
}
inline int64_t PagedMergeBytes(const PagedDecodeTiling &t) {
  const int64_t g = t.group, stats = AtbRoundUp(g, 8) * 32, row = int64_t{t.value_dim} + 8;
  return 2 * g * row * 4 + 2 * g * row * 4 + 5 * stats;
}
// Bytes of global memory that the parts are kept in between the phases.
inline int64_t PagedDecodeWorkspace(const PagedDecodeTiling &t) {
  return t.parts == 1 ? 0 : 4ll * t.parts * t.batch * t.heads * (int64_t{t.value_dim} + 8);
}

inline const char *TilePagedDecode(const AtbSoc &soc, int32_t dtype, const PagedDecodeShape &shape,
                                   float scale, float softcap, PagedDecodeTiling *out) {
  if (const char *reason = AtbCheckRows(soc, dtype, shape.batch, shape.head_dim)) return reason;
  if (!soc.pads) return "this SoC copies multiples of 32 bytes, and the log-sum-exps of a row are none";
  if (shape.kv_heads < 1 || shape.heads < shape.kv_heads || shape.heads % shape.kv_heads != 0 ||
      shape.heads > 4096)
    return "the query heads are a multiple of the heads of keys, at most 4096";
  if (shape.head_dim % 16 != 0 || shape.value_dim % 16 != 0 || shape.value_dim < 16 || shape.head_dim > 256 ||
      shape.value_dim > 256)
    return "the head sizes are multiples of 16, at most 256";
  if (shape.page_size < 1 || shape.page_size > 65535) return "a page holds 1 to 65535 tokens";
  if (shape.pages < 1 || shape.pages > 0x7fffffffll) return "the number of pages is 1 to 2^31 - 1";
  if (shape.max_blocks < 1 || shape.max_blocks * shape.page_size > 0x7fffffffll ||
      shape.max_length > shape.max_blocks * shape.page_size)
    return "the block table has a page for every token of a sequence, less than 2^31 tokens";
  if (shape.batch > 65535 || shape.q_step < shape.heads * shape.head_dim || shape.q_step > 0x7fffffffll)
    return "at most 65535 sequences, whose heads of q are dense";
  if (!(softcap >= 0.0f)) return "softcap is positive, or 0 for none";
  PagedDecodeTiling t{};
  t.batch = static_cast<uint32_t>(shape.batch);
  t.heads = static_cast<uint32_t>(shape.heads);
  t.kv_heads = static_cast<uint32_t>(shape.kv_heads);
  t.group = t.heads / t.kv_heads;
  if (t.group > 128) return "at most 128 query heads share a head of keys";
  t.head_dim = static_cast<uint32_t>(shape.head_dim);
  t.value_dim = static_cast<uint32_t>(shape.value_dim);
  t.page_size = static_cast<uint32_t>(shape.page_size);
  t.pages = static_cast<uint32_t>(shape.pages);
  t.max_blocks = static_cast<uint32_t>(shape.max_blocks);
  t.q_step = static_cast<uint32_t>(shape.q_step);
  t.left = shape.left < 0 || shape.left >= 0x7fffffffll ? -1 : static_cast<int32_t>(shape.left);
  t.scale = scale;
  t.softcap = softcap;
  const int64_t room = soc.ub - (softcap > 0.0f ? kAtbSelectBytes : 0);
  for (t.tile = 64; t.tile > 8 && PagedDecodeBytes(t, dtype) > room;) t.tile -= 8;
  if (PagedDecodeBytes(t, dtype) > room || PagedMergeBytes(t) > soc.ub)
    return "the query heads that share a head of keys do not fit the unified buffer";
  // Sequences are split where there are fewer than cores. A part has eight tiles or more, and as many keys
  // that what is written of it and read again is at most a thirty-second of them.
  const int64_t seen = t.left < 0 ? shape.max_length : AtbMin(shape.max_length, t.left + 1ll);
  const int64_t rows = shape.batch * shape.kv_heads;
  const int64_t kept = 8ll * t.group * (shape.value_dim + 8);
  const int64_t key = (shape.head_dim + shape.value_dim) * AtbElement(dtype);
  const int64_t least = AtbMax(8ll * t.tile, (32 * kept + key - 1) / key);
  const int64_t wanted = AtbMin((soc.vector_cores + rows - 1) / rows, AtbMax(seen / least, 1));
  t.part_keys = static_cast<uint32_t>(AtbRoundUp(AtbMax((seen + wanted - 1) / wanted, 1), t.tile));
  t.parts = static_cast<uint32_t>(AtbMax((seen + t.part_keys - 1) / t.part_keys, 1));
  t.blocks = static_cast<uint32_t>(AtbMin(rows * t.parts, soc.vector_cores));
  *out = t;
  return nullptr;
}
