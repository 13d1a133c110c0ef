// The vector side of flash attention: online softmax over tiles of scores, and the sum of the products.
#pragma once
#include "flash_attention_steps.h"
#include "softmax_rows.h"

namespace atb {

template <typename T> class FlashRows {
public:
  __aicore__ inline FlashRows(TPipe *pipe, const FlashAttentionTiling &tiling)
      : t_(tiling), block_(static_cast<uint32_t>(GetBlockIdx() / 2)), steps_(tiling, block_),
        half_(tiling.half) {
    const uint32_t tile = kFlashRows * t_.tile_keys;
    pipe->InitBuffer(in_scores_, 2, tile * sizeof(float));
    pipe->InitBuffer(out_weights_, 2, tile * sizeof(T));
    pipe->InitBuffer(in_products_, 2, kFlashRows * t_.value_dim * sizeof(float));
    pipe->InitBuffer(out_, 1, kFlashRows * t_.value_dim * sizeof(T));
    pipe->InitBuffer(out_lse_, 1, half_ * sizeof(float));
    if constexpr (kTurns) {
      const uint32_t values = kFlashRows * t_.value_dim;
      pipe->InitBuffer(in_values_, 2, values * sizeof(float));
      pipe->InitBuffer(out_values_, 1, values * sizeof(float));
      pipe->InitBuffer(offsets_, values * sizeof(int32_t));
      for (uint32_t d = 0; d < t_.value_dim; ++d)
        ArithProgression<int32_t>(offsets_.Get<int32_t>()[d * kFlashRows], int32_t(d * sizeof(float)),
                                  int32_t(t_.value_dim * sizeof(float)), int32_t(kFlashRows));
    }
    pipe->InitBuffer(total_, half_ * t_.value_dim * sizeof(float));
    pipe->InitBuffer(most_, half_ * sizeof(float));
    pipe->InitBuffer(sum_, half_ * sizeof(float));
    pipe->InitBuffer(old_[0], half_ * sizeof(float));
    pipe->InitBuffer(old_[1], half_ * sizeof(float));
    pipe->InitBuffer(pairs_, kFlashRows * 64 * sizeof(float));
    pipe->InitBuffer(spread_, kFlashRows * 32);
    pipe->InitBuffer(here_, kFlashRows * sizeof(float));
    pipe->InitBuffer(next_, kFlashRows * sizeof(float));
    pipe->InitBuffer(ones_, kFlashRows * sizeof(float));
    pipe->InitBuffer(places_, t_.tile_keys * sizeof(float));
    pipe->InitBuffer(visible_, 32);
    if (t_.softcap > 0.0f) {
      pipe->InitBuffer(a_, tile * sizeof(float));
      pipe->InitBuffer(b_, tile * sizeof(float));
      pipe->InitBuffer(c_, tile * sizeof(float));
      pipe->InitBuffer(near_, tile / 8);
    }
    CreateVecIndex(places_.Get<float>(), 0.0f, t_.tile_keys);
    Duplicate(ones_.Get<float>(), 1.0f, kFlashRows);
    Duplicate(next_.Get<float>(), 0.0f, kFlashRows);
    Duplicate(old_[0].Get<float>(), 0.0f, half_);
    Duplicate(old_[1].Get<float>(), 0.0f, half_);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void Process(GM_ADDR v, GM_ADDR out, GM_ADDR lse, GM_ADDR work) {
    v_.SetGlobalBuffer((__gm__ T *)v, uint64_t(t_.batch) * t_.kv_heads * t_.kv_len * t_.value_dim);
    const uint64_t rows = uint64_t(t_.batch) * t_.heads * t_.q_len;
    result_.SetGlobalBuffer((__gm__ T *)out, rows * t_.value_dim);
    lse_.SetGlobalBuffer((__gm__ float *)lse, rows);
    slots_.Init(t_, work, block_);
    uint32_t turn = 0;
    bool waits = false; // the products of the turn before are not accumulated yet
    for (FlashStep step = steps_.Next(); step.live; step = steps_.Next()) {
      if (step.first) {
        if (waits) Accumulate(turn - 1);
        if (turn_begun_) Finish();
        waits = false;
        Begin(step);
      }
      if (step.keys == 0) continue;
      Softmax(step, turn);
      if (waits) Accumulate(turn - 1);
      waits = true;
      ++turn;
    }
    if (waits) Accumulate(turn - 1);
    if (turn_begun_) Finish();
  }

private:
  using Buffer = TBuf<TPosition::VECCALC>;

  // A new tile of queries; `mine_` of its rows from `from_` on are this core's.
  __aicore__ inline void Begin(const FlashStep &step) {
    const uint32_t half = ((step.rows + 1) / 2 + 7) / 8 * 8;
    const bool second = GetSubBlockIdx() == 1;
    from_ = second ? half : 0;
    mine_ = second ? (step.rows > half ? step.rows - half : 0) : Least(half, step.rows);
    row_ = uint64_t(step.head) * t_.q_len + step.row + from_;
    turn_begun_ = true;
    Duplicate(most_.Get<float>(), kFloor, half_);
    Duplicate(sum_.Get<float>(), 0.0f, half_);
    Duplicate(total_.Get<float>(), 0.0f, half_ * t_.value_dim);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void LoadScores(uint32_t at, uint32_t turn) {
    LocalTensor<float> scores = in_scores_.AllocTensor<float>();
    const uint32_t rows = Least(kFlashRows, mine_ - at);
    DataCopy(scores, slots_.scores[turn % 2 * slots_.score_size + (from_ + at) * t_.tile_keys],
             rows * t_.tile_keys);
    in_scores_.EnQue(scores);
  }
  __aicore__ inline void Softmax(const FlashStep &step, uint32_t turn) {
    AwaitCube<PIPE_MTE2>(kScoresReady);
    if (mine_ > 0) LoadScores(0, turn);
    for (uint32_t at = 0; at < mine_; at += kFlashRows) {
      if (at + kFlashRows < mine_) LoadScores(at + kFlashRows, turn);
      const uint32_t rows = Least(kFlashRows, mine_ - at), count = rows * t_.tile_keys;
      LocalTensor<float> scores = in_scores_.DeQue<float>();
      Muls(scores, scores, t_.softcap > 0.0f ? t_.scale / t_.softcap : t_.scale, count);
      PipeBarrier<PIPE_V>();
      if (t_.softcap > 0.0f)
        Cap(scores, a_.Get<float>(), b_.Get<float>(), c_.Get<float>(), near_.Get<uint8_t>(), count,
            t_.softcap);
      for (uint32_t r = 0; r < rows; ++r) Hide(scores[r * t_.tile_keys], step, from_ + at + r);
      Weigh(scores, at, rows, turn);
      LocalTensor<T> weights = out_weights_.template AllocTensor<T>();
      Narrow(weights, scores, count);
      in_scores_.FreeTensor(scores);
      out_weights_.EnQue(weights);
      weights = out_weights_.template DeQue<T>();
      DataCopy(slots_.weights[turn % 2 * slots_.score_size + (from_ + at) * t_.tile_keys], weights, count);
      out_weights_.FreeTensor(weights);
    }
    if constexpr (kTurns) Turn(step, turn);
    TellCube<PIPE_MTE3>(kWeightsReady);
  }

  // The values of the tile, 16 keys at a time, with the channels as rows; the two cores take turns. Rows
  // behind the last key become 0.
  __aicore__ inline void LoadValues(const FlashStep &step, uint32_t key) {
    LocalTensor<float> values = in_values_.AllocTensor<float>();
    DataCopy(values, v_[(uint64_t(step.kv_head) * t_.kv_len + step.key + key) * t_.value_dim],
             Least(kFlashRows, step.keys - key) * t_.value_dim);
    in_values_.EnQue(values);
  }
  __aicore__ inline void Turn(const FlashStep &step, uint32_t turn) {
    const uint32_t first = static_cast<uint32_t>(GetSubBlockIdx()) * kFlashRows, width = t_.value_dim;
    const DataCopyParams rows{static_cast<uint16_t>(width), kFlashRows / 8, 0,
                              static_cast<uint16_t>((t_.tile_keys - kFlashRows) / 8)};
    if (first < step.keys) LoadValues(step, first);
    for (uint32_t key = first; key < step.keys; key += 2 * kFlashRows) {
      if (key + 2 * kFlashRows < step.keys) LoadValues(step, key + 2 * kFlashRows);
      LocalTensor<float> values = in_values_.DeQue<float>(), turned = out_values_.AllocTensor<float>();
      const uint32_t count = Least(kFlashRows, step.keys - key);
      if (count < kFlashRows) Duplicate(values[count * width], 0.0f, (kFlashRows - count) * width);
      PipeBarrier<PIPE_V>();
      Gather(turned, values, offsets_.Get<uint32_t>(), 0, kFlashRows * width);
      in_values_.FreeTensor(values);
      out_values_.EnQue(turned);
      turned = out_values_.DeQue<float>();
      DataCopy(slots_.values[turn % 2 * slots_.value_size + key], turned, rows);
      out_values_.FreeTensor(turned);
    }
  }

  // The scores of keys that the query does not see become very small.
  __aicore__ inline void Hide(const LocalTensor<float> &scores, const FlashStep &step, uint32_t row) {
    const FlashSpan span = SpanOf(t_, int64_t(step.row) + row);
    const int64_t begin = span.begin - step.key, end = span.end - step.key;
    if (begin > 0) HideWhere(scores, CMPMODE::GE, begin);
    if (end < int64_t(t_.tile_keys)) HideWhere(scores, CMPMODE::LT, end);
  }
  __aicore__ inline void HideWhere(const LocalTensor<float> &scores, CMPMODE visible, int64_t limit) {
    LocalTensor<uint8_t> bits = visible_.Get<uint8_t>();
    CompareScalar(bits, places_.Get<float>(), static_cast<float>(limit), visible, t_.tile_keys);
    PipeBarrier<PIPE_V>();
    Select(scores, bits, scores, kHidden, SELMODE::VSEL_TENSOR_SCALAR_MODE, t_.tile_keys);
    PipeBarrier<PIPE_V>();
  }

  // pairs (rows, 64) = the two halves of each row, joined; rows of 64 are themselves.
  template <bool kMax>
  __aicore__ inline LocalTensor<float> Halves(const LocalTensor<float> &scores, uint32_t rows) {
    if (t_.tile_keys == 64) return scores;
    LocalTensor<float> pairs = pairs_.Get<float>();
    const BinaryRepeatParams repeat(1, 1, 1, 8, 16, 16);
    if constexpr (kMax)
      Max(pairs, scores, scores[64], 64, static_cast<uint8_t>(rows), repeat);
    else
      Add(pairs, scores, scores[64], 64, static_cast<uint8_t>(rows), repeat);
    PipeBarrier<PIPE_V>();
    return pairs;
  }
  // scores = exp(scores - most); most and sum are brought up to date, old is what the sum so far shrinks by.
  __aicore__ inline void Weigh(const LocalTensor<float> &scores, uint32_t at, uint32_t rows, uint32_t turn) {
    LocalTensor<float> most = most_.Get<float>()[at], sum = sum_.Get<float>()[at];
    LocalTensor<float> old = old_[turn % 2].Get<float>()[at], here = here_.Get<float>();
    LocalTensor<float> next = next_.Get<float>(), spread = spread_.Get<float>();
    const uint8_t step = static_cast<uint8_t>(t_.tile_keys / 8);
    WholeReduceMax(here, Halves<true>(scores, rows), 64, rows, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
    Max(next, most, here, rows);
    PipeBarrier<PIPE_V>();
    Sub(old, most, next, rows);
    Brcb(spread, next, static_cast<uint8_t>((rows + 7) / 8), BrcbRepeatParams{1, 8});
    PipeBarrier<PIPE_V>();
    Exp(old, old, rows);
    Muls(most, next, 1.0f, rows);
    for (uint32_t start = 0; start < t_.tile_keys; start += 64)
      Sub(scores[start], scores[start], spread, 64, static_cast<uint8_t>(rows),
          BinaryRepeatParams(1, 1, 0, step, step, 1));
    PipeBarrier<PIPE_V>();
    Exp(scores, scores, rows * t_.tile_keys);
    Mul(sum, sum, old, rows);
    PipeBarrier<PIPE_V>();
    WholeReduceSum(here, Halves<false>(scores, rows), 64, rows, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    Add(sum, sum, here, rows);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void LoadProducts(uint32_t at, uint32_t turn) {
    LocalTensor<float> products = in_products_.AllocTensor<float>();
    const uint32_t rows = Least(kFlashRows, mine_ - at);
    DataCopy(products, slots_.products[turn % 2 * slots_.product_size + (from_ + at) * t_.value_dim],
             rows * t_.value_dim);
    in_products_.EnQue(products);
  }
  // total = total * old + products
  __aicore__ inline void Accumulate(uint32_t turn) {
    AwaitCube<PIPE_MTE2>(kProductsReady);
    if (mine_ > 0) LoadProducts(0, turn);
    LocalTensor<float> spread = spread_.Get<float>();
    for (uint32_t at = 0; at < mine_; at += kFlashRows) {
      if (at + kFlashRows < mine_) LoadProducts(at + kFlashRows, turn);
      const uint32_t rows = Least(kFlashRows, mine_ - at);
      LocalTensor<float> total = total_.Get<float>()[at * t_.value_dim];
      Brcb(spread, old_[turn % 2].Get<float>()[at], static_cast<uint8_t>((rows + 7) / 8),
           BrcbRepeatParams{1, 8});
      PipeBarrier<PIPE_V>();
      TimesRows(total, spread, rows, t_.value_dim, t_.value_dim);
      LocalTensor<float> products = in_products_.DeQue<float>();
      PipeBarrier<PIPE_V>();
      Add(total, total, products, rows * t_.value_dim);
      PipeBarrier<PIPE_V>();
      in_products_.FreeTensor(products);
    }
  }

  // out = total / sum and lse = most + ln(sum); 0 and -inf where no key was seen.
  __aicore__ inline void Finish() {
    turn_begun_ = false;
    if (mine_ == 0) return;
    LocalTensor<float> sum = sum_.Get<float>(), spread = spread_.Get<float>(), next = next_.Get<float>();
    LocalTensor<float> lse = out_lse_.AllocTensor<float>();
    Ln(lse, sum, mine_);
    PipeBarrier<PIPE_V>();
    Add(lse, lse, most_.Get<float>(), mine_);
    out_lse_.EnQue(lse);
    lse = out_lse_.DeQue<float>();
    DataCopyPad(lse_[row_], lse, DataCopyExtParams{1, uint32_t(mine_ * sizeof(float)), 0, 0, 0});
    out_lse_.FreeTensor(lse);
    for (uint32_t at = 0; at < mine_; at += kFlashRows) {
      const uint32_t rows = Least(kFlashRows, mine_ - at);
      LocalTensor<float> total = total_.Get<float>()[at * t_.value_dim];
      Maxs(next, sum[at], 1.0e-30f, rows);
      PipeBarrier<PIPE_V>();
      Div(next, ones_.Get<float>(), next, rows);
      PipeBarrier<PIPE_V>();
      Brcb(spread, next, static_cast<uint8_t>((rows + 7) / 8), BrcbRepeatParams{1, 8});
      PipeBarrier<PIPE_V>();
      TimesRows(total, spread, rows, t_.value_dim, t_.value_dim);
      PipeBarrier<PIPE_V>();
      LocalTensor<T> out = out_.template AllocTensor<T>();
      Narrow(out, total, rows * t_.value_dim);
      out_.EnQue(out);
      out = out_.template DeQue<T>();
      DataCopy(result_[(row_ + at) * t_.value_dim], out, rows * t_.value_dim);
      out_.FreeTensor(out);
    }
  }

  static constexpr bool kTurns = sizeof(T) == 4;
  // Scores of hidden keys lie so far below the least maximum that their weight is 0.
  static constexpr float kHidden = -1.0e30f, kFloor = -1.0e20f;
  FlashAttentionTiling t_;
  uint32_t block_;
  FlashSteps steps_;
  uint32_t half_, from_ = 0, mine_ = 0;
  uint64_t row_ = 0;
  bool turn_begun_ = false;
  FlashSlots<T> slots_;
  TQue<TPosition::VECIN, 2> in_scores_, in_products_, in_values_;
  TQue<TPosition::VECOUT, 2> out_weights_;
  TQue<TPosition::VECOUT, 1> out_, out_lse_, out_values_;
  Buffer total_, most_, sum_, old_[2], pairs_, spread_, here_, next_, ones_, places_, visible_, offsets_, a_,
      b_, c_, near_;
  GlobalTensor<T> v_, result_;
  GlobalTensor<float> lse_;
};

} // namespace atb
