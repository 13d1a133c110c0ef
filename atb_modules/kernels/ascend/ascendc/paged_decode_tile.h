// The arithmetic of one tile of keys in the paged decode: scores of a group of query heads, online softmax,
// weighted sum of values, all in float on the vector unit.
//
// Every score is a product over the channels, 64 at a time, and a sum over a repeat; every weight is spread
// over a block of 32 bytes and multiplied into a row of values, and the rows are summed as a tree.
#pragma once
#include "paged_decode_parts.h"
#include "softmax_rows.h"

namespace atb {

template <typename T> class PagedTileMath {
public:
  __aicore__ inline PagedTileMath(TPipe *pipe, const PagedDecodeTiling &tiling)
      : t_(tiling), stats_((tiling.group + 7) / 8 * 8) {
    const uint32_t most = t_.head_dim > t_.value_dim ? t_.head_dim : t_.value_dim;
    if constexpr (sizeof(T) == 2) pipe->InitBuffer(wide_, t_.tile * most * sizeof(float));
    pipe->InitBuffer(products_, t_.tile * (t_.value_dim > 64 ? t_.value_dim : 64) * sizeof(float));
    pipe->InitBuffer(query_, t_.group * t_.head_dim * sizeof(float));
    pipe->InitBuffer(total_, t_.group * t_.value_dim * sizeof(float));
    pipe->InitBuffer(scores_, t_.group * 64 * sizeof(float));
    pipe->InitBuffer(weight_, 64 * 32);
    pipe->InitBuffer(mask_, t_.group * 8);
    pipe->InitBuffer(spread_, stats_ * 32);
    pipe->InitBuffer(spread_old_, stats_ * 32);
    if (t_.softcap > 0.0f) {
      pipe->InitBuffer(a_, t_.group * 64 * sizeof(float));
      pipe->InitBuffer(b_, t_.group * 64 * sizeof(float));
      pipe->InitBuffer(c_, t_.group * 64 * sizeof(float));
    }
    // lanes that no instruction fills are read by those that work on whole blocks
    Buffer *const stats[] = {&most_, &sum_, &next_, &old_, &here_};
    for (Buffer *buffer : stats) {
      pipe->InitBuffer(*buffer, stats_ * sizeof(float));
      LocalTensor<float> zeros = buffer->template Get<float>();
      Duplicate(zeros, 0.0f, stats_);
    }
    Duplicate(scores_.Get<float>(), 0.0f, t_.group * 64);
    PipeBarrier<PIPE_V>();
  }

  // A new part: its queries, scaled, and no key seen.
  __aicore__ inline void Begin(const LocalTensor<T> &q) {
    LocalTensor<float> query = query_.Get<float>();
    Widen(query, q, t_.group * t_.head_dim);
    Muls(query, query, t_.softcap > 0.0f ? t_.scale / t_.softcap : t_.scale, t_.group * t_.head_dim);
    Duplicate(most_.Get<float>(), -1.0e37f, t_.group);
    Duplicate(sum_.Get<float>(), 0.0f, t_.group);
    Duplicate(total_.Get<float>(), 0.0f, t_.group * t_.value_dim);
    PipeBarrier<PIPE_V>();
  }

  // scores (group, 64) = the first `count` keys with every query of the group
  __aicore__ inline void Scores(const LocalTensor<T> &k, uint32_t count) {
    const LocalTensor<float> keys = InFloat(k, count * t_.head_dim), query = query_.Get<float>();
    LocalTensor<float> products = products_.Get<float>(), scores = scores_.Get<float>();
    const uint8_t row = static_cast<uint8_t>(t_.head_dim / 8), rows = static_cast<uint8_t>(count);
    const BinaryRepeatParams repeat(1, 1, 1, 8, row, 0);
    for (uint32_t g = 0; g < t_.group; ++g) {
      const uint32_t base = g * t_.head_dim;
      Mul(products, keys, query[base], Least(64, t_.head_dim), rows, repeat);
      PipeBarrier<PIPE_V>();
      for (uint32_t start = 64; start < t_.head_dim; start += 64) {
        MulAddDst(products, keys[start], query[base + start], Least(64, t_.head_dim - start), rows, repeat);
        PipeBarrier<PIPE_V>();
      }
      WholeReduceSum(scores[g * 64], products, static_cast<int32_t>(Least(64, t_.head_dim)), count, 1, 1, 8);
    }
    PipeBarrier<PIPE_V>();
    if (t_.softcap > 0.0f)
      Cap(scores, a_.Get<float>(), b_.Get<float>(), c_.Get<float>(), mask_.Get<uint8_t>(), t_.group * 64,
          t_.softcap);
  }

  // scores become exp(scores - most); most, sum and total are brought to the new maximum.
  __aicore__ inline void Softmax(uint32_t count) {
    LocalTensor<float> scores = scores_.Get<float>(), most = most_.Get<float>(), sum = sum_.Get<float>();
    LocalTensor<float> next = next_.Get<float>(), old = old_.Get<float>(), here = here_.Get<float>();
    LocalTensor<float> spread = spread_.Get<float>(), spread_old = spread_old_.Get<float>();
    const uint32_t g = t_.group;
    const uint8_t rows = static_cast<uint8_t>(g), groups = static_cast<uint8_t>(stats_ / 8);
    WholeReduceMax(here, scores, count, g, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
    Max(next, most, here, g);
    PipeBarrier<PIPE_V>();
    Sub(old, most, next, g);
    Brcb(spread, next, groups, BrcbRepeatParams{1, 8});
    PipeBarrier<PIPE_V>();
    Exp(old, old, g);
    Muls(most, next, 1.0f, g);
    Sub(scores, scores, spread, count, rows, BinaryRepeatParams(1, 1, 0, 8, 8, 1));
    PipeBarrier<PIPE_V>();
    Exp(scores, scores, count, rows, UnaryRepeatParams(1, 1, 8, 8));
    Brcb(spread_old, old, groups, BrcbRepeatParams{1, 8});
    Mul(sum, sum, old, g);
    PipeBarrier<PIPE_V>();
    WholeReduceSum(here, scores, count, g, 1, 1, 8);
    TimesRows(total_.Get<float>(), spread_old, g, t_.value_dim, t_.value_dim);
    PipeBarrier<PIPE_V>();
    Add(sum, sum, here, g);
    PipeBarrier<PIPE_V>();
  }

  // total (group, value_dim) += scores v
  __aicore__ inline void Values(const LocalTensor<T> &v, uint32_t count) {
    const LocalTensor<float> values = InFloat(v, count * t_.value_dim), scores = scores_.Get<float>();
    LocalTensor<float> products = products_.Get<float>(), weight = weight_.Get<float>();
    LocalTensor<float> total = total_.Get<float>();
    const uint32_t width = t_.value_dim;
    const uint8_t row = static_cast<uint8_t>(width / 8), rows = static_cast<uint8_t>(count);
    for (uint32_t g = 0; g < t_.group; ++g) {
      Brcb(weight, scores[g * 64], static_cast<uint8_t>((count + 7) / 8), BrcbRepeatParams{1, 8});
      PipeBarrier<PIPE_V>();
      for (uint32_t start = 0; start < width; start += 64)
        Mul(products[start], values[start], weight, Least(64, width - start), rows,
            BinaryRepeatParams(1, 1, 0, row, row, 1));
      PipeBarrier<PIPE_V>();
      for (uint32_t left = count; left > 1;) {
        uint32_t keep = 1;
        while (keep * 2 < left) keep *= 2;
        Add(products, products, products[keep * width], (left - keep) * width);
        PipeBarrier<PIPE_V>();
        left = keep;
      }
      Add(total[g * width], total[g * width], products, width);
    }
    PipeBarrier<PIPE_V>();
  }

  // The end of a part: rows of total / sum, `step` floats apart.
  __aicore__ inline void Finish(const LocalTensor<float> &out, uint32_t step) {
    Divide();
    const uint8_t from = static_cast<uint8_t>(t_.value_dim / 8), to = static_cast<uint8_t>(step / 8);
    for (uint32_t start = 0; start < t_.value_dim; start += 64)
      Muls(out[start], total_.Get<float>()[start], 1.0f, Least(64, t_.value_dim - start),
           static_cast<uint8_t>(t_.group), UnaryRepeatParams(1, 1, to, from));
  }
  __aicore__ inline void FinishNarrow(const LocalTensor<T> &out) {
    Divide();
    Narrow(out, total_.Get<float>(), t_.group * t_.value_dim);
  }
  // The log-sum-exps, each in a block of 32 bytes, `apart` blocks apart.
  __aicore__ inline void FinishLse(const LocalTensor<float> &to, uint32_t apart) {
    LocalTensor<float> lse = here_.Get<float>(), spread = spread_.Get<float>();
    Ln(lse, sum_.Get<float>(), t_.group);
    PipeBarrier<PIPE_V>();
    Add(lse, lse, most_.Get<float>(), t_.group);
    PipeBarrier<PIPE_V>();
    Brcb(spread, lse, static_cast<uint8_t>(stats_ / 8), BrcbRepeatParams{1, 8});
    PipeBarrier<PIPE_V>();
    Muls(to, spread, 1.0f, 8, static_cast<uint8_t>(t_.group),
         UnaryRepeatParams(1, 1, static_cast<uint8_t>(apart), 1));
  }

private:
  using Buffer = TBuf<TPosition::VECCALC>;

  __aicore__ inline LocalTensor<float> InFloat(const LocalTensor<T> &x, uint32_t count) {
    if constexpr (sizeof(T) == 4) {
      return x;
    } else {
      LocalTensor<float> wide = wide_.template Get<float>();
      Widen(wide, x, count);
      return wide;
    }
  }
  // total /= sum; where no key was seen, 0 stays 0.
  __aicore__ inline void Divide() {
    LocalTensor<float> inverse = next_.Get<float>(), ones = old_.Get<float>(), spread = spread_.Get<float>();
    Maxs(inverse, sum_.Get<float>(), 1.0e-30f, t_.group);
    Duplicate(ones, 1.0f, t_.group);
    PipeBarrier<PIPE_V>();
    Div(inverse, ones, inverse, t_.group);
    PipeBarrier<PIPE_V>();
    Brcb(spread, inverse, static_cast<uint8_t>(stats_ / 8), BrcbRepeatParams{1, 8});
    PipeBarrier<PIPE_V>();
    TimesRows(total_.Get<float>(), spread, t_.group, t_.value_dim, t_.value_dim);
    PipeBarrier<PIPE_V>();
  }

  PagedDecodeTiling t_;
  uint32_t stats_;
  Buffer wide_, products_, query_, total_, scores_, weight_, mask_;
  Buffer most_, sum_, next_, old_, here_, spread_, spread_old_, a_, b_, c_;
};

} // namespace atb
