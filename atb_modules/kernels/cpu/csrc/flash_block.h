// Flash attention of one block of queries that share their keys: online softmax over tiles of keys.
#pragma once
#include "atb_cpu.h"
#include "convert.h"
#include "flash_tile.h"

namespace ATB_ISA {

// A block: up to LANES queries of one kv head group. Lane i sees the keys [low[i], high[i]) and, where
// has_far, those of [far_low[i], far_high[i]) before them (global tokens, a prefix); with block_size > 0 only
// in blocks of keys that are live for it.
struct Block {
  int count = 0;
  int32_t low[LANES], high[LANES], far_low[LANES], far_high[LANES], position[LANES];
  bool has_far = false;
  int64_t block_size = 0;
  const uint8_t *live[LANES]; // a byte a block of keys
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
  const float *k_scales = nullptr, *v_scales = nullptr; // of int8 pages, this head of page 0
  int64_t scale_stride = 0;                             // from one page to the next

  const char *at(const char *base, int64_t stride, int64_t key) const {
    if (!table) return base + key * stride;
    return base + table[key / page_size] * page_stride + key % page_size * stride;
  }
  // Pointers to n keys and values as float32, read where they are or through the spaces (KEYS, head_dim).
  void read(int64_t first, int64_t n, int64_t head_dim, float *k_space, float *v_space, const float **k_rows,
            const float **v_rows) const {
    for (int64_t j = 0; j < n; ++j) {
      const char *key = at(k, k_stride, first + j), *value = at(v, v_stride, first + j);
      if (dtype == ATB_F32) {
        k_rows[j] = (const float *)key;
        v_rows[j] = (const float *)value;
        continue;
      }
      read_floats(key, dtype, head_dim, k_space + j * head_dim);
      read_floats(value, dtype, head_dim, v_space + j * head_dim);
      if (dtype == ATB_I8) {
        const int64_t scale = table[(first + j) / page_size] * scale_stride;
        for (int64_t d = 0; d < head_dim; ++d) k_space[j * head_dim + d] *= k_scales[scale];
        for (int64_t d = 0; d < head_dim; ++d) v_space[j * head_dim + d] *= v_scales[scale];
      }
      k_rows[j] = k_space + j * head_dim;
      v_rows[j] = v_space + j * head_dim;
    }
  }
};

// A run of at most KEYS keys that some lane of a block sees.
struct Tile {
  int64_t at, n;
  bool ranged;          // whether some lane does not see all of them
  bool partly_live;     // whether that is (also) because its block of keys is dead
  int32_t alive[LANES]; // all bits or none, where partly_live
};

// Walks the tiles of a block in the order of the keys.
class Tiles {
public:
  explicit Tiles(const Block &b);
  bool next(Tile &tile);

private:
  struct Span {
    int64_t begin = 0, end = 0;
  };
  const Block &b;
  Span near_, far_, all_near, all_far; // what some lane sees, what all lanes see
  int64_t at;
  bool mark_live(Tile &tile, int64_t key_block) const;
};

// Lanes up to the end of the last vector repeat lane 0, with a zero query.
void fill_unused_lanes(Block &b, float *q, int64_t head_dim);

// Softcap alone, and everything else between the product and the softmax: ALiBi, mask, what each lane sees.
void cap_scores(float *score, int64_t n, int vectors, float softcap);
void adjust_scores(const Block &b, const Tile &tile, float *score);

// Writes the scaled query of one lane into its column.
void set_query(Scratch &s, int lane, const void *q, int dtype, int64_t head_dim, float scale);

// The whole block; its queries have been set.
void flash_block(Block &b, Scratch &s, int64_t head_dim, float softcap, const KeyRows &keys);

} // namespace ATB_ISA
