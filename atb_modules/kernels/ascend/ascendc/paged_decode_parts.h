// Which keys a core of the paged decode works on, and the merge of sequences that were split in parts.
#pragma once
#include "softmax_rows.h"
#include "tiling/paged_decode.h"

namespace atb {

struct PagedArguments {
  GM_ADDR q;
  GM_ADDR k_pages;
  GM_ADDR v_pages;
  GM_ADDR block_table;
  GM_ADDR kv_lengths;
  GM_ADDR out;
  GM_ADDR lse;
  GM_ADDR work;
};

// A tile of keys: `count` from `start` on, of one sequence, one head of keys and one of its `parts`.
struct PagedTile {
  bool live, first, last;
  uint32_t batch, head, part, parts, start, count;
};

// The keys that a sequence's token sees, and in how many parts they are taken.
struct PagedSpan {
  uint32_t begin, end, parts;
};
__aicore__ inline PagedSpan SpanOf(const PagedDecodeTiling &t, const GlobalTensor<int32_t> &lengths,
                                   uint32_t batch) {
  const uint32_t end = static_cast<uint32_t>(lengths.GetValue(batch));
  const uint32_t seen = t.left < 0 ? end : Least(end, uint64_t(t.left) + 1);
  const uint32_t parts = (seen + t.part_keys - 1) / t.part_keys;
  return {end - seen, end, parts > 0 ? parts : 1};
}

// The tiles of this core, one after the other. Parts are dealt out in turn, the first of all sequences before
// the second ones, so that cores share the work of sequences of unequal lengths.
class PagedCursor {
public:
  __aicore__ inline explicit PagedCursor(const PagedDecodeTiling &tiling) : t_(tiling) {}
  __aicore__ inline void Start(GM_ADDR lengths) {
    lengths_.SetGlobalBuffer((__gm__ int32_t *)lengths, t_.batch);
    unit_ = GetBlockIdx();
  }
  __aicore__ inline PagedTile Next() {
    const uint64_t units = uint64_t(t_.parts) * t_.batch * t_.kv_heads;
    for (; !inside_; unit_ += GetBlockNum()) {
      if (unit_ >= units) return {};
      head_ = static_cast<uint32_t>(unit_ % t_.kv_heads);
      batch_ = static_cast<uint32_t>(unit_ / t_.kv_heads % t_.batch);
      part_ = static_cast<uint32_t>(unit_ / t_.kv_heads / t_.batch);
      span_ = SpanOf(t_, lengths_, batch_);
      if (part_ >= span_.parts) continue;
      at_ = span_.begin + part_ * t_.part_keys;
      end_ = Least(span_.end, uint64_t(at_) + t_.part_keys);
      inside_ = first_ = true;
    }
    const uint32_t count = Least(t_.tile, end_ - at_);
    const PagedTile tile{true, first_, at_ + count >= end_, batch_, head_, part_, span_.parts, at_, count};
    at_ += count;
    first_ = false;
    inside_ = !tile.last;
    return tile;
  }

private:
  PagedDecodeTiling t_;
  GlobalTensor<int32_t> lengths_;
  PagedSpan span_{};
  uint64_t unit_ = 0;
  uint32_t batch_ = 0, head_ = 0, part_ = 0, at_ = 0, end_ = 0;
  bool inside_ = false, first_ = false;
};

// The results of a group of heads: rows of the output, and the log-sum-exps, a block of 32 bytes each, to
// places that lie a batch apart.
template <typename T>
__aicore__ inline void StoreHeads(const GlobalTensor<T> &result, const GlobalTensor<float> &lses,
                                  const LocalTensor<T> &out, const LocalTensor<float> &lse,
                                  const PagedDecodeTiling &t, uint32_t batch, uint32_t kv_head) {
  const uint64_t head = uint64_t(kv_head) * t.group;
  DataCopy(result[(uint64_t(batch) * t.heads + head) * t.value_dim], out, t.group * t.value_dim);
  const uint32_t apart = (t.batch - 1) * sizeof(float);
  DataCopyPad(lses[head * t.batch + batch], lse,
              DataCopyExtParams{static_cast<uint16_t>(t.group), sizeof(float), 0, apart, 0});
}

// The second phase: out = sum_i exp(lse_i - lse) out_i over the parts of a sequence, two of them in flight.
template <typename T> class PagedMerge {
public:
  __aicore__ inline PagedMerge(TPipe *pipe, const PagedDecodeTiling &tiling) : t_(tiling) {
    const uint32_t rows = t_.group * (t_.value_dim + 8) * sizeof(float), stats = (t_.group + 7) / 8 * 8 * 32;
    pipe->InitBuffer(in_, 2, rows);
    pipe->InitBuffer(out_, 1, rows);
    pipe->InitBuffer(total_, t_.group * t_.value_dim * sizeof(float));
    TBuf<TPosition::VECCALC> *const buffers[] = {&most_, &sum_, &next_, &old_, &new_};
    for (auto *buffer : buffers) pipe->InitBuffer(*buffer, stats);
  }

  __aicore__ inline void Process(const PagedArguments &a) {
    lengths_.SetGlobalBuffer((__gm__ int32_t *)a.kv_lengths, t_.batch);
    result_.SetGlobalBuffer((__gm__ T *)a.out, uint64_t(t_.batch) * t_.heads * t_.value_dim);
    lse_.SetGlobalBuffer((__gm__ float *)a.lse, uint64_t(t_.batch) * t_.heads);
    work_.SetGlobalBuffer((__gm__ float *)a.work,
                          uint64_t(t_.parts) * t_.batch * t_.heads * (t_.value_dim + 8));
    for (uint64_t unit = GetBlockIdx(); unit < uint64_t(t_.batch) * t_.kv_heads; unit += GetBlockNum()) {
      const uint32_t batch = static_cast<uint32_t>(unit / t_.kv_heads);
      const uint32_t head = static_cast<uint32_t>(unit % t_.kv_heads);
      const uint32_t parts = SpanOf(t_, lengths_, batch).parts;
      if (parts > 1) Merge(batch, head, parts);
    }
  }

private:
  __aicore__ inline void Load(uint32_t part, uint32_t batch, uint32_t head) {
    LocalTensor<float> rows = in_.AllocTensor<float>();
    const uint64_t row = (uint64_t(part) * t_.batch + batch) * t_.heads + uint64_t(head) * t_.group;
    DataCopy(rows, work_[row * (t_.value_dim + 8)], t_.group * (t_.value_dim + 8));
    in_.EnQue(rows);
  }

  __aicore__ inline void Merge(uint32_t batch, uint32_t head, uint32_t parts) {
    const uint32_t lanes = t_.group * 8, width = t_.value_dim, g = t_.group;
    LocalTensor<float> most = most_.Get<float>(), sum = sum_.Get<float>(), total = total_.Get<float>();
    LocalTensor<float> next = next_.Get<float>(), old = old_.Get<float>(), weight = new_.Get<float>();
    Duplicate(most, -1.0e37f, lanes);
    Duplicate(sum, 0.0f, lanes);
    Duplicate(total, 0.0f, g * width);
    PipeBarrier<PIPE_V>();
    const uint8_t row = static_cast<uint8_t>(width / 8 + 1), narrow = static_cast<uint8_t>(width / 8);
    const uint8_t rows = static_cast<uint8_t>(g);
    Load(0, batch, head);
    for (uint32_t part = 0; part < parts; ++part) {
      if (part + 1 < parts) Load(part + 1, batch, head);
      LocalTensor<float> in = in_.DeQue<float>();
      LocalTensor<float> lse = in[width]; // eight equal values of each row
      Max(next, most, lse, 8, rows, BinaryRepeatParams(1, 1, 1, 1, 1, row));
      PipeBarrier<PIPE_V>();
      Sub(old, most, next, lanes);
      Sub(weight, lse, next, 8, rows, BinaryRepeatParams(1, 1, 1, 1, row, 1));
      PipeBarrier<PIPE_V>();
      Exp(old, old, lanes);
      Exp(weight, weight, lanes);
      Muls(most, next, 1.0f, lanes);
      PipeBarrier<PIPE_V>();
      Mul(sum, sum, old, lanes);
      TimesRows(total, old, g, width, width);
      TimesRows(in, weight, g, width, width + 8);
      PipeBarrier<PIPE_V>();
      Add(sum, sum, weight, lanes);
      for (uint32_t start = 0; start < width; start += 64)
        Add(total[start], total[start], in[start], Least(64, width - start), rows,
            BinaryRepeatParams(1, 1, 1, narrow, narrow, row));
      PipeBarrier<PIPE_V>();
      in_.FreeTensor(in);
    }
    Store(batch, head);
  }

  __aicore__ inline void Store(uint32_t batch, uint32_t head) {
    const uint32_t lanes = t_.group * 8;
    LocalTensor<float> most = most_.Get<float>(), sum = sum_.Get<float>(), total = total_.Get<float>();
    LocalTensor<float> inverse = old_.Get<float>(), ones = new_.Get<float>();
    Duplicate(ones, 1.0f, lanes);
    PipeBarrier<PIPE_V>();
    Div(inverse, ones, sum, lanes);
    LocalTensor<float> out = out_.AllocTensor<float>();
    LocalTensor<float> lse = out[t_.group * t_.value_dim];
    Ln(lse, sum, lanes);
    PipeBarrier<PIPE_V>();
    Add(lse, lse, most, lanes);
    TimesRows(total, inverse, t_.group, t_.value_dim, t_.value_dim);
    PipeBarrier<PIPE_V>();
    Narrow(out.ReinterpretCast<T>(), total, t_.group * t_.value_dim);
    out_.EnQue(out);
    out = out_.DeQue<float>();
    StoreHeads(result_, lse_, out.ReinterpretCast<T>(), lse, t_, batch, head);
    out_.FreeTensor(out);
  }

  PagedDecodeTiling t_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> total_, most_, sum_, next_, old_, new_;
  GlobalTensor<int32_t> lengths_;
  GlobalTensor<T> result_;
  GlobalTensor<float> lse_, work_;
};

} // namespace atb
