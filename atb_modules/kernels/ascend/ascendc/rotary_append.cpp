// Rotary embedding of q in place, and of k on its way into the pages; v goes to the pages as it is.
//
// A unit of work is a group of heads of q, k or v of one token. All channels are rotated by one formula,
// out = x * c + swapped(x) * s, where swapped exchanges the two channels of a pair (a Gather with offsets
// that are the same for every token) and c and s are the token's cosines and signed sines, spread to the
// channels of a head; channels behind the rotated ones have c = 1 and s = 0. A token with slot -1 is rotated
// in q and written nowhere.
#include "tiling/rotary_append.h"
#include "rows.h"

namespace {
using namespace AscendC;
constexpr uint32_t kSlots = 64; // slots that are fetched together

template <typename T> class RotaryAppend {
public:
  __aicore__ inline RotaryAppend(TPipe *pipe, const RotaryAppendTiling &tiling) : pipe_(pipe), t_(tiling) {
    const uint32_t heads = t_.group * t_.step;
    pipe->InitBuffer(in_, 2, heads * sizeof(T));
    pipe->InitBuffer(out_, 2, heads * sizeof(T));
    pipe->InitBuffer(values_, 2, t_.group * t_.value_step * sizeof(T));
    pipe->InitBuffer(in_cos_, 2, t_.pairs * sizeof(float));
    pipe->InitBuffer(in_sin_, 2, t_.pairs * sizeof(float));
    pipe->InitBuffer(x_, heads * sizeof(float));
    pipe->InitBuffer(swapped_, heads * sizeof(float));
    pipe->InitBuffer(offsets_, heads * sizeof(uint32_t));
    pipe->InitBuffer(spread_, t_.step * sizeof(uint32_t));
    pipe->InitBuffer(sign_, t_.step * sizeof(float));
    pipe->InitBuffer(c_, t_.step * sizeof(float));
    pipe->InitBuffer(s_, t_.step * sizeof(float));
    pipe->InitBuffer(slots_, kSlots * t_.slot_words * sizeof(int32_t));
  }

  __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR cos, GM_ADDR sin, GM_ADDR k_pages,
                              GM_ADDR v_pages, GM_ADDR slots) {
    q_.SetGlobalBuffer((__gm__ T *)q, uint64_t(t_.tokens - 1) * t_.q_step + t_.heads * t_.head_dim);
    k_.SetGlobalBuffer((__gm__ T *)k, uint64_t(t_.tokens - 1) * t_.k_step + t_.kv_heads * t_.head_dim);
    v_.SetGlobalBuffer((__gm__ T *)v, uint64_t(t_.tokens - 1) * t_.v_step + t_.kv_heads * t_.value_dim);
    cos_.SetGlobalBuffer((__gm__ float *)cos, uint64_t(t_.tokens) * t_.pairs);
    sin_.SetGlobalBuffer((__gm__ float *)sin, uint64_t(t_.tokens) * t_.pairs);
    const uint64_t places = uint64_t(t_.pages) * t_.kv_heads * t_.page_size;
    k_pages_.SetGlobalBuffer((__gm__ T *)k_pages, places * t_.head_dim);
    v_pages_.SetGlobalBuffer((__gm__ T *)v_pages, places * t_.value_dim);
    slot_words_.SetGlobalBuffer((__gm__ int32_t *)slots, uint64_t(t_.tokens) * t_.slot_words);
    BuildTables();
  }

  __aicore__ inline void Process() {
    q_groups_ = (t_.heads + t_.group - 1) / t_.group;
    kv_groups_ = (t_.kv_heads + t_.group - 1) / t_.group;
    const atb::Share share = atb::ShareOf(uint64_t(t_.tokens) * (q_groups_ + 2 * kv_groups_));
    Unit now = Next(share.begin, share.end);
    Load(now);
    while (now.kind != kNone) {
      const Unit next = Next(now.index + 1, share.end);
      Load(next);
      Compute(now);
      now = next;
    }
  }

private:
  enum Kind : uint32_t { kQuery, kKey, kValue, kNone };
  struct Unit {
    Kind kind;
    uint64_t index, token;
    uint32_t head, heads;
    int32_t slot;
    bool tables; // whether its token's tables come with it
  };

  // The unit `index` or the first one behind it that has something to do.
  __aicore__ inline Unit Next(uint64_t index, uint64_t end) {
    const uint32_t each = q_groups_ + 2 * kv_groups_;
    for (; index < end; ++index) {
      const uint64_t token = index / each;
      uint32_t group = static_cast<uint32_t>(index % each);
      Kind kind = kQuery;
      if (group >= q_groups_) {
        group -= q_groups_;
        kind = group < kv_groups_ ? kKey : kValue;
        if (kind == kValue) group -= kv_groups_;
      }
      const int32_t slot = kind == kQuery ? 0 : SlotOf(token);
      if (slot < 0) continue;
      const uint32_t head = group * t_.group, all = kind == kQuery ? t_.heads : t_.kv_heads;
      const bool tables = kind != kValue && token != loaded_;
      if (tables) loaded_ = token;
      return {kind, index, token, head, atb::Least(t_.group, all - head), slot, tables};
    }
    return {kNone, end, 0, 0, 0, 0, false};
  }
  __aicore__ inline int32_t SlotOf(uint64_t token) {
    LocalTensor<int32_t> slots = slots_.Get<int32_t>();
    if (token < first_slot_ || token >= first_slot_ + kSlots) {
      const TEventID free = pipe_->FetchEventID(HardEvent::S_MTE2);
      SetFlag<HardEvent::S_MTE2>(free);
      WaitFlag<HardEvent::S_MTE2>(free);
      PipeBarrier<PIPE_MTE2>();
      first_slot_ = token;
      const uint32_t count = atb::Least(kSlots, t_.tokens - token) * t_.slot_words;
      atb::LoadRows(slots, slot_words_[token * t_.slot_words], 1, count);
      const TEventID there = pipe_->FetchEventID(HardEvent::MTE2_S);
      SetFlag<HardEvent::MTE2_S>(there);
      WaitFlag<HardEvent::MTE2_S>(there);
    }
    return slots.GetValue(static_cast<uint32_t>(token - first_slot_) * t_.slot_words);
  }

  // Offsets of the partner of each channel of a group, of the channel's entry in the tables, and the signs of
  // its sine.
  __aicore__ inline void BuildTables() {
    LocalTensor<int32_t> offsets = offsets_.Get<int32_t>(), spread = spread_.Get<int32_t>();
    LocalTensor<float> sign = sign_.Get<float>(), c = c_.Get<float>(), s = s_.Get<float>();
    Duplicate(c, 1.0f, t_.step);
    Duplicate(s, 0.0f, t_.step);
    const uint32_t rotated = 2 * t_.pairs;
    for (uint32_t i = 0; i < t_.step; ++i) {
      const bool second = t_.interleaved ? i % 2 == 1 : i >= t_.pairs;
      const uint32_t apart = t_.interleaved ? 1 : t_.pairs;
      const uint32_t partner = i >= rotated ? i : second ? i - apart : i + apart;
      const uint32_t pair = i >= rotated ? 0 : t_.interleaved ? i / 2 : second ? i - t_.pairs : i;
      offsets.SetValue(i, static_cast<int32_t>(partner * sizeof(float)));
      spread.SetValue(i, static_cast<int32_t>(pair * sizeof(float)));
      sign.SetValue(i, second ? 1.0f : -1.0f);
    }
    atb::VectorWaitsForScalar(pipe_);
    for (uint32_t head = 1; head < t_.group; ++head)
      Adds(offsets[head * t_.step], offsets, static_cast<int32_t>(head * t_.step * sizeof(float)), t_.step);
    PipeBarrier<PIPE_V>();
  }

  template <typename Queue>
  __aicore__ inline void LoadHeads(Queue &queue, const GlobalTensor<T> &from, uint32_t heads, uint32_t dim,
                                   uint32_t step) {
    LocalTensor<T> to = queue.template AllocTensor<T>();
    DataCopyPad(to, from, DataCopyExtParams{uint16_t(heads), uint32_t(dim * sizeof(T)), 0, 0, 0},
                atb::ZerosBehind<T>(step - dim));
    queue.EnQue(to);
  }
  __aicore__ inline void Load(const Unit &unit) {
    if (unit.tables) {
      LocalTensor<float> cos = in_cos_.AllocTensor<float>(), sin = in_sin_.AllocTensor<float>();
      atb::LoadRows(cos, cos_[unit.token * t_.pairs], 1, t_.pairs);
      atb::LoadRows(sin, sin_[unit.token * t_.pairs], 1, t_.pairs);
      in_cos_.EnQue(cos);
      in_sin_.EnQue(sin);
    }
    if (unit.kind == kQuery)
      LoadHeads(in_, q_[unit.token * t_.q_step + unit.head * t_.head_dim], unit.heads, t_.head_dim, t_.step);
    else if (unit.kind == kKey)
      LoadHeads(in_, k_[unit.token * t_.k_step + unit.head * t_.head_dim], unit.heads, t_.head_dim, t_.step);
    else if (unit.kind == kValue)
      LoadHeads(values_, v_[unit.token * t_.v_step + unit.head * t_.value_dim], unit.heads, t_.value_dim,
                t_.value_step);
  }

  // c and s of the token, spread over the rotated channels.
  __aicore__ inline void SpreadTables() {
    LocalTensor<float> cos = in_cos_.DeQue<float>(), sin = in_sin_.DeQue<float>();
    LocalTensor<uint32_t> spread = spread_.Get<uint32_t>();
    LocalTensor<float> c = c_.Get<float>(), s = s_.Get<float>();
    const uint32_t rotated = 2 * t_.pairs;
    Gather(c, cos, spread, 0, rotated);
    Gather(s, sin, spread, 0, rotated);
    PipeBarrier<PIPE_V>();
    Mul(s, s, sign_.Get<float>(), rotated);
    PipeBarrier<PIPE_V>();
    in_cos_.FreeTensor(cos);
    in_sin_.FreeTensor(sin);
  }
  // Every head of x times one row of a table: 64 channels of all heads an instruction.
  __aicore__ inline void Times(const LocalTensor<float> &x, const LocalTensor<float> &table, uint32_t heads) {
    const uint8_t apart = static_cast<uint8_t>(t_.step / 8);
    for (uint32_t start = 0; start < t_.step; start += 64)
      Mul(x[start], x[start], table[start], atb::Least(64, t_.step - start), static_cast<uint8_t>(heads),
          BinaryRepeatParams(1, 1, 1, apart, apart, 0));
  }
  __aicore__ inline void Compute(const Unit &unit) {
    if (unit.kind == kValue) {
      LocalTensor<T> values = values_.template DeQue<T>();
      StoreHeads(v_pages_, values, unit, t_.value_dim);
      values_.FreeTensor(values);
      return;
    }
    if (unit.tables) SpreadTables();
    const uint32_t n = unit.heads * t_.step;
    LocalTensor<float> x = x_.Get<float>(), swapped = swapped_.Get<float>();
    LocalTensor<T> narrow = in_.template DeQue<T>();
    atb::Widen(x, narrow, n);
    in_.FreeTensor(narrow);
    Gather(swapped, x, offsets_.Get<uint32_t>(), 0, n);
    PipeBarrier<PIPE_V>();
    Times(x, c_.Get<float>(), unit.heads);
    Times(swapped, s_.Get<float>(), unit.heads);
    PipeBarrier<PIPE_V>();
    Add(x, x, swapped, n);
    PipeBarrier<PIPE_V>();
    narrow = out_.template AllocTensor<T>();
    atb::Narrow(narrow, x, n);
    out_.EnQue(narrow);
    narrow = out_.template DeQue<T>();
    if (unit.kind == kQuery)
      DataCopyPad(q_[unit.token * t_.q_step + unit.head * t_.head_dim], narrow,
                  DataCopyExtParams{uint16_t(unit.heads), uint32_t(t_.head_dim * sizeof(T)), 0, 0, 0});
    else
      StoreHeads(k_pages_, narrow, unit, t_.head_dim);
    out_.FreeTensor(narrow);
  }
  // Pages are (pages, kv_heads, page_size, dim): the heads of a token are a page's tokens apart.
  __aicore__ inline void StoreHeads(const GlobalTensor<T> &pages, const LocalTensor<T> &from,
                                    const Unit &unit, uint32_t dim) {
    const uint64_t page = static_cast<uint32_t>(unit.slot) / t_.page_size;
    const uint32_t place = static_cast<uint32_t>(unit.slot) % t_.page_size;
    const uint64_t first = ((page * t_.kv_heads + unit.head) * t_.page_size + place) * dim;
    const uint32_t bytes = dim * sizeof(T);
    DataCopyPad(pages[first], from,
                DataCopyExtParams{uint16_t(unit.heads), bytes, 0, (t_.page_size - 1) * bytes, 0});
  }

  TPipe *pipe_;
  RotaryAppendTiling t_;
  uint32_t q_groups_ = 0, kv_groups_ = 0;
  uint64_t loaded_ = ~0ull, first_slot_ = ~0ull - kSlots;
  TQue<TPosition::VECIN, 2> in_, in_cos_, in_sin_;
  TQue<TPosition::VECOUT, 2> out_;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> values_;
  TBuf<TPosition::VECCALC> x_, swapped_, offsets_, spread_, sign_, c_, s_, slots_;
  GlobalTensor<T> q_, k_, v_, k_pages_, v_pages_;
  GlobalTensor<float> cos_, sin_;
  GlobalTensor<int32_t> slot_words_;
};

template <typename T>
__aicore__ inline void Run(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR cos, GM_ADDR sin, GM_ADDR k_pages,
                           GM_ADDR v_pages, GM_ADDR slots, const RotaryAppendTiling &tiling) {
  TPipe pipe;
  RotaryAppend<T> kernel(&pipe, tiling);
  kernel.Init(q, k, v, cos, sin, k_pages, v_pages, slots);
  kernel.Process();
}
} // namespace

extern "C" __global__ __aicore__ void atb_rotary_append_half(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR cos,
                                                             GM_ADDR sin, GM_ADDR k_pages, GM_ADDR v_pages,
                                                             GM_ADDR slots, RotaryAppendTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<half>(q, k, v, cos, sin, k_pages, v_pages, slots, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_rotary_append_bfloat16(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR cos,
                                                                 GM_ADDR sin, GM_ADDR k_pages,
                                                                 GM_ADDR v_pages, GM_ADDR slots,
                                                                 RotaryAppendTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<bfloat16_t>(q, k, v, cos, sin, k_pages, v_pages, slots, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_rotary_append_float(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR cos,
                                                              GM_ADDR sin, GM_ADDR k_pages, GM_ADDR v_pages,
                                                              GM_ADDR slots, RotaryAppendTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<float>(q, k, v, cos, sin, k_pages, v_pages, slots, tiling);
}
