// The steps of flash attention in the order in which cube and vector cores take them, and where the slots
// lie.
#pragma once
#include "cross_core.h"
#include "rows.h"
#include "tiling/flash_attention.h"

namespace atb {

// Flags between the cores of a block: scores, weights, and products with the values are there.
constexpr uint16_t kScoresReady = 0, kWeightsReady = 1, kProductsReady = 2;

// A tile of queries (`rows` from `row` on, of one head of one batch) with a tile of keys; no keys at all
// where none of the queries sees one.
struct FlashStep {
  bool live, first, last;
  uint32_t head, kv_head; // over the batch
  uint32_t row, rows, key, keys;
};

// Keys begin to end - 1 that a query sees.
struct FlashSpan {
  int64_t begin, end;
};
__aicore__ inline FlashSpan SpanOf(const FlashAttentionTiling &t, int64_t query) {
  const int64_t at = query + int64_t(t.kv_len) - t.q_len;
  int64_t begin = t.left < 0 ? 0 : at - t.left, end = t.right < 0 ? int64_t(t.kv_len) : at + t.right + 1;
  if (begin < 0) begin = 0;
  if (end > int64_t(t.kv_len)) end = t.kv_len;
  return {begin, end};
}

class FlashSteps {
public:
  __aicore__ inline FlashSteps(const FlashAttentionTiling &tiling, uint32_t block)
      : t_(tiling), unit_(block) {}

  __aicore__ inline FlashStep Next() {
    const uint32_t tiles = (t_.q_len + t_.tile_rows - 1) / t_.tile_rows;
    bool first = false;
    if (!inside_) {
      if (unit_ >= uint64_t(t_.batch) * t_.heads * tiles) return {};
      head_ = static_cast<uint32_t>(unit_ / tiles);
      row_ = static_cast<uint32_t>(unit_ % tiles) * t_.tile_rows;
      rows_ = Least(t_.tile_rows, t_.q_len - row_);
      unit_ += t_.blocks;
      at_ = SpanOf(t_, row_).begin;
      end_ = SpanOf(t_, int64_t(row_) + rows_ - 1).end;
      first = inside_ = true;
    }
    const uint32_t batch = head_ / t_.heads, group = t_.heads / t_.kv_heads;
    const uint32_t keys = at_ < end_ ? Least(t_.tile_keys, end_ - at_) : 0;
    inside_ = at_ + keys < end_;
    const uint32_t key = keys == 0 ? 0 : static_cast<uint32_t>(at_);
    at_ += keys;
    return {true, first, !inside_, head_, batch * t_.kv_heads + head_ % t_.heads / group,
            row_, rows_, key,      keys};
  }
  __aicore__ inline FlashStep NextWithKeys() {
    FlashStep step = Next();
    while (step.live && step.keys == 0) step = Next();
    return step;
  }

private:
  FlashAttentionTiling t_;
  uint64_t unit_;
  uint32_t head_ = 0, row_ = 0, rows_ = 0;
  int64_t at_ = 0, end_ = 0;
  bool inside_ = false;
};

// The workspace of a block.
template <typename T> struct FlashSlots {
  GlobalTensor<float> scores, products, values; // values: in float32 alone, turned (value_dim, tile_keys)
  GlobalTensor<T> weights;
  uint32_t score_size, product_size, value_size;
  __aicore__ inline void Init(const FlashAttentionTiling &t, GM_ADDR work, uint32_t block) {
    score_size = t.tile_rows * t.tile_keys;
    product_size = t.tile_rows * t.value_dim;
    value_size = t.value_dim * t.tile_keys;
    GM_ADDR base = work + uint64_t(block) * t.block_bytes;
    scores.SetGlobalBuffer((__gm__ float *)base, 2ull * score_size);
    weights.SetGlobalBuffer((__gm__ T *)(base + t.weights_at), 2ull * score_size);
    products.SetGlobalBuffer((__gm__ float *)(base + t.products_at), 2ull * product_size);
    if constexpr (sizeof(T) == 4)
      values.SetGlobalBuffer((__gm__ float *)(base + t.values_at), 2ull * value_size);
  }
};

} // namespace atb
