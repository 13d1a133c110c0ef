// Flash attention of one block of queries that share their keys: online softmax over tiles of keys.
#pragma once
#include "atb_cpu.h"
#include "convert.h"
#include "flash_tile.h"

namespace ATB_ISA {

// A block: up to LANES queries of one kv head group. Lane i sees the keys [low[i], high[i]).
struct Block {
  int count = 0;
  int32_t low[LANES], high[LANES], position[LANES];
  float slope[LANES], sink[LANES];
  const void *mask[LANES];
  void *out[LANES];
  float *lse[LANES];

  bool has_slopes = false, has_sinks = false;
  int dtype = 0;       // of out
  int mask_dtype = -1; // -1: no mask; 3: bool; else added
  int64_t mask_key_stride = 0;
  bool mask_shared = false; // all lanes have the same mask row

  int vectors() const { return (count + W - 1) / W; }
};

// Memory of one thread, in floats.
struct Scratch {
  float *q, *out, *total, *score, *k, *v;
  static int64_t size(int64_t head_dim) {
    return 3 * head_dim * STRIDE + KEYS * STRIDE + 2 * KEYS * head_dim + 64;
  }
  Scratch(float *base, int64_t head_dim) {
    q = base;
    out = q + head_dim * STRIDE;
    total = out + head_dim * STRIDE;
    score = total + head_dim * STRIDE;
    k = score + KEYS * STRIDE;
    v = k + KEYS * head_dim;
  }
};

// Where the keys and values of one kv head lie: rows by strides, or pages through a row of a block table.
struct KeyRows {
  const char *k, *v;
  int64_t k_stride, v_stride; // bytes from one key to the next
  int dtype;
  const int32_t *table; // null: no pages
  int64_t page_size, page_stride;

  const char *at(const char *base, int64_t stride, int64_t key) const {
    if (!table) return base + key * stride;
    return base + table[key / page_size] * page_stride + key % page_size * stride;
  }
};

// Writes the scaled query of one lane into its column.
void set_query(Scratch &s, int lane, const void *q, int dtype, int64_t head_dim, float scale);

// The whole block; its queries have been set.
void flash_block(Block &b, Scratch &s, int64_t head_dim, float softcap, const KeyRows &keys);

} // namespace ATB_ISA
