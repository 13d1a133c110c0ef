// The cube side of flash attention: queries times keys, weights times values.
#pragma once
#include "cube_tiles.h"
#include "flash_attention_steps.h"

namespace atb {

template <typename T> class FlashCube {
public:
  __aicore__ inline FlashCube(TPipe *pipe, const FlashAttentionTiling &tiling)
      : t_(tiling), steps_(tiling, static_cast<uint32_t>(GetBlockIdx())) {
    pipe->InitBuffer(in_q_, 2, t_.tile_rows * t_.head_dim * sizeof(T));
    pipe->InitBuffer(in_weights_, 1, t_.tile_rows * t_.tile_keys * sizeof(T));
    pipe->InitBuffer(in_k_, 2, t_.tile_keys * t_.head_dim * sizeof(T));
    pipe->InitBuffer(in_v_, 2, t_.tile_keys * t_.value_dim * sizeof(T));
    pipe->InitBuffer(left_, 2, t_.tile_rows * kPiece * sizeof(T));
    pipe->InitBuffer(right_, 2, (kTurned ? kColumns : t_.tile_keys) * kPiece * sizeof(T));
    pipe->InitBuffer(sums_, 2, t_.tile_rows * kColumns * sizeof(float));
  }

  __aicore__ inline void Process(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR work) {
    const uint64_t places = uint64_t(t_.batch) * t_.kv_heads * t_.kv_len;
    q_.SetGlobalBuffer((__gm__ T *)q, uint64_t(t_.batch) * t_.heads * t_.q_len * t_.head_dim);
    k_.SetGlobalBuffer((__gm__ T *)k, places * t_.head_dim);
    v_.SetGlobalBuffer((__gm__ T *)v, places * t_.value_dim);
    slots_.Init(t_, work, static_cast<uint32_t>(GetBlockIdx()));
    FlashStep now = steps_.NextWithKeys();
    LoadKeys(now);
    FlashStep next = steps_.NextWithKeys();
    LoadKeys(next);
    if (now.live) Scores(now, 0);
    for (uint32_t turn = 0; now.live; ++turn) {
      // What needs no other core is loaded before this pipe waits for the weights.
      if constexpr (!kTurned) LoadValues(now);
      const FlashStep after = next.live ? steps_.NextWithKeys() : FlashStep{};
      LoadKeys(after);
      if (next.live) Scores(next, turn + 1);
      Values(now, turn);
      now = next;
      next = after;
    }
  }

private:
  // What is summed over in one product, and its columns.
  static constexpr uint32_t kPiece = 256 / sizeof(T), kColumns = 128;
  // The cube core transposes 16-bit elements alone: in float32 the vector cores turn the values for it.
  static constexpr bool kTurned = sizeof(T) == 4;

  __aicore__ inline void LoadKeys(const FlashStep &step) {
    if (!step.live) return;
    if (step.first) {
      LocalTensor<T> q = in_q_.template AllocTensor<T>();
      LoadFractals(q, q_[(uint64_t(step.head) * t_.q_len + step.row) * t_.head_dim], step.rows, t_.head_dim,
                   t_.head_dim);
      in_q_.EnQue(q);
    }
    LocalTensor<T> k = in_k_.template AllocTensor<T>();
    LoadFractals(k, k_[(uint64_t(step.kv_head) * t_.kv_len + step.key) * t_.head_dim], step.keys, t_.head_dim,
                 t_.head_dim, t_.tile_keys);
    in_k_.EnQue(k);
  }
  __aicore__ inline void LoadValues(const FlashStep &step) {
    LocalTensor<T> v = in_v_.template AllocTensor<T>();
    LoadFractals(v, v_[(uint64_t(step.kv_head) * t_.kv_len + step.key) * t_.value_dim], step.keys,
                 t_.value_dim, t_.value_dim, t_.tile_keys);
    in_v_.EnQue(v);
  }

  // A product whose operands are in L0 buffers that were filled just now.
  __aicore__ inline void MultiplyNow(LocalTensor<T> a, LocalTensor<T> b, const LocalTensor<float> &sums,
                                     uint32_t rows, uint32_t columns, uint32_t k, bool first) {
    left_.EnQue(a);
    right_.EnQue(b);
    a = left_.template DeQue<T>();
    b = right_.template DeQue<T>();
    Multiply(sums, a, b, rows, columns, k, first);
    left_.FreeTensor(a);
    right_.FreeTensor(b);
  }
  __aicore__ inline void Store(const GlobalTensor<float> &to, LocalTensor<float> &sums, uint32_t rows,
                               uint32_t columns, uint32_t step) {
    sums_.EnQue(sums);
    sums = sums_.template DeQue<float>();
    StoreSums(to, sums, rows, columns, step);
    sums_.FreeTensor(sums);
  }

  __aicore__ inline void Scores(const FlashStep &step, uint32_t turn) {
    if (step.first) queries_ = in_q_.template DeQue<T>();
    LocalTensor<T> keys = in_k_.template DeQue<T>();
    LocalTensor<float> sums = sums_.template AllocTensor<float>();
    for (uint32_t at = 0; at < t_.head_dim; at += kPiece) {
      const uint32_t k = Least(kPiece, t_.head_dim - at);
      LocalTensor<T> a = left_.template AllocTensor<T>(), b = right_.template AllocTensor<T>();
      LoadLeft(a, queries_, step.rows, at, k);
      LoadRight(b, keys, t_.tile_keys, at, k);
      MultiplyNow(a, b, sums, step.rows, t_.tile_keys, k, at == 0);
    }
    in_k_.FreeTensor(keys);
    if (step.last) in_q_.FreeTensor(queries_);
    Store(slots_.scores[turn % 2 * slots_.score_size], sums, step.rows, t_.tile_keys, t_.tile_keys);
    TellVectors<PIPE_FIX>(kScoresReady);
  }

  __aicore__ inline void LoadTurned(uint32_t keys, uint32_t turn) {
    LocalTensor<T> v = in_v_.template AllocTensor<T>();
    LoadFractals(v, slots_.values[turn % 2 * slots_.value_size], t_.value_dim, keys, t_.tile_keys);
    in_v_.EnQue(v);
  }

  __aicore__ inline void Values(const FlashStep &step, uint32_t turn) {
    const uint32_t keys = kTurned ? Fractals(step.keys) * 16 : t_.tile_keys;
    AwaitVectors<PIPE_MTE2>(kWeightsReady);
    LocalTensor<T> weights = in_weights_.template AllocTensor<T>();
    LoadFractals(weights, slots_.weights[turn % 2 * slots_.score_size], step.rows, t_.tile_keys,
                 t_.tile_keys);
    in_weights_.EnQue(weights);
    weights = in_weights_.template DeQue<T>();
    if constexpr (kTurned) LoadTurned(keys, turn);
    LocalTensor<T> values = in_v_.template DeQue<T>();
    for (uint32_t column = 0; column < t_.value_dim; column += kColumns) {
      const uint32_t columns = Least(kColumns, t_.value_dim - column);
      LocalTensor<float> sums = sums_.template AllocTensor<float>();
      LocalTensor<T> a = left_.template AllocTensor<T>(), b = right_.template AllocTensor<T>();
      LoadLeft(a, weights, step.rows, 0, keys);
      if constexpr (kTurned)
        LoadRightLines(b, values, t_.value_dim, column, columns, keys);
      else
        LoadRightTransposed(b, values, t_.tile_keys, column, columns);
      MultiplyNow(a, b, sums, step.rows, columns, keys, true);
      Store(slots_.products[turn % 2 * slots_.product_size + column], sums, step.rows, columns, t_.value_dim);
    }
    in_weights_.FreeTensor(weights);
    in_v_.FreeTensor(values);
    TellVectors<PIPE_FIX>(kProductsReady);
  }

  FlashAttentionTiling t_;
  FlashSteps steps_;
  FlashSlots<T> slots_;
  TQue<TPosition::A1, 2> in_q_;
  TQue<TPosition::A1, 1> in_weights_; // all four make seven events from MTE2 to MTE1, of eight
  TQue<TPosition::B1, 2> in_k_, in_v_;
  TQue<TPosition::A2, 2> left_;
  TQue<TPosition::B2, 2> right_;
  TQue<TPosition::CO1, 2> sums_;
  LocalTensor<T> queries_;
  GlobalTensor<T> q_, k_, v_;
};

} // namespace atb
