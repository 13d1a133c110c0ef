// Partial attentions over disjoint keys, joined by their log-sum-exps: outs (parts, rows, width) and lses
// (parts, rows) in float -> out (rows, width), lse (rows). In float: out = sum_i exp(lse_i - lse) out_i.
//
// A part that saw no key has lse -inf and weight 0; where no part saw one, out is 0 and lse -inf. The largest
// lse is held above -1e37 for this, so that no difference of infinities is formed.
#include "tiling/lse_merge.h"
#include "rows.h"

namespace {
using namespace AscendC;

template <typename T> class LseMerge {
public:
  __aicore__ inline LseMerge(TPipe *pipe, const LseMergeTiling &tiling) : pipe_(pipe), t_(tiling) {
    const uint32_t tile = t_.tile_rows * t_.step;
    pipe->InitBuffer(in_, 2, tile * sizeof(T));
    pipe->InitBuffer(out_, 2, tile * sizeof(T));
    pipe->InitBuffer(in_lse_, 2, t_.parts * t_.lse_step * sizeof(float));
    pipe->InitBuffer(out_lse_, 2, t_.lse_step * sizeof(float));
    pipe->InitBuffer(total_, tile * sizeof(float));
    pipe->InitBuffer(row_, t_.step * sizeof(float));
    pipe->InitBuffer(weights_, t_.parts * t_.lse_step * sizeof(float));
    pipe->InitBuffer(most_, t_.lse_step * sizeof(float));
    pipe->InitBuffer(sum_, t_.lse_step * sizeof(float));
  }

  __aicore__ inline void Process(GM_ADDR outs, GM_ADDR lses, GM_ADDR out, GM_ADDR lse) {
    const uint64_t all = uint64_t(t_.rows) * t_.width;
    outs_.SetGlobalBuffer((__gm__ T *)outs, all * t_.parts);
    lses_.SetGlobalBuffer((__gm__ float *)lses, uint64_t(t_.parts) * t_.rows);
    result_.SetGlobalBuffer((__gm__ T *)out, all);
    lse_.SetGlobalBuffer((__gm__ float *)lse, t_.rows);
    const atb::Share share = atb::ShareOf(t_.rows);
    if (share.begin < share.end) LoadLse(share.begin, share.end);
    for (uint64_t row = share.begin; row < share.end; row += t_.tile_rows) {
      const uint32_t rows = atb::Least(t_.tile_rows, share.end - row);
      LoadPart(0, row, rows);
      if (row + t_.tile_rows < share.end) LoadLse(row + t_.tile_rows, share.end);
      Weigh(row, rows);
      Join(row, rows);
    }
  }

private:
  __aicore__ inline void LoadLse(uint64_t row, uint64_t end) {
    LocalTensor<float> lse = in_lse_.AllocTensor<float>();
    const uint32_t rows = atb::Least(t_.tile_rows, end - row);
    for (uint32_t part = 0; part < t_.parts; ++part)
      DataCopyPad(lse[part * t_.lse_step], lses_[uint64_t(part) * t_.rows + row],
                  DataCopyExtParams{1, uint32_t(rows * sizeof(float)), 0, 0, 0},
                  DataCopyPadExtParams<float>{});
    in_lse_.EnQue(lse);
  }
  __aicore__ inline void LoadPart(uint32_t part, uint64_t row, uint32_t rows) {
    LocalTensor<T> to = in_.template AllocTensor<T>();
    atb::LoadRows(to, outs_[(uint64_t(part) * t_.rows + row) * t_.width], rows, t_.width);
    in_.EnQue(to);
  }

  // weights = exp(lse_i - most) / sum, and the joint lse = most + ln(sum)
  __aicore__ inline void Weigh(uint64_t row, uint32_t rows) {
    LocalTensor<float> lse = in_lse_.DeQue<float>(), weights = weights_.Get<float>();
    LocalTensor<float> most = most_.Get<float>(), sum = sum_.Get<float>();
    Maxs(most, lse, -1.0e37f, rows);
    PipeBarrier<PIPE_V>();
    for (uint32_t part = 1; part < t_.parts; ++part) {
      Max(most, most, lse[part * t_.lse_step], rows);
      PipeBarrier<PIPE_V>();
    }
    for (uint32_t part = 0; part < t_.parts; ++part)
      Sub(weights[part * t_.lse_step], lse[part * t_.lse_step], most, rows);
    PipeBarrier<PIPE_V>();
    for (uint32_t part = 0; part < t_.parts; ++part)
      Exp(weights[part * t_.lse_step], weights[part * t_.lse_step], rows);
    Duplicate(sum, 0.0f, rows);
    PipeBarrier<PIPE_V>();
    in_lse_.FreeTensor(lse);
    for (uint32_t part = 0; part < t_.parts; ++part) {
      Add(sum, sum, weights[part * t_.lse_step], rows);
      PipeBarrier<PIPE_V>();
    }
    LocalTensor<float> joint = out_lse_.AllocTensor<float>();
    Ln(joint, sum, rows);
    Maxs(sum, sum, 1.0f, rows); // at least 1 where any part saw a key: the largest counts exp(0)
    PipeBarrier<PIPE_V>();
    Add(joint, joint, most, rows);
    for (uint32_t part = 0; part < t_.parts; ++part)
      Div(weights[part * t_.lse_step], weights[part * t_.lse_step], sum, rows);
    PipeBarrier<PIPE_V>();
    out_lse_.EnQue(joint);
    joint = out_lse_.DeQue<float>();
    DataCopyPad(lse_[row], joint, DataCopyExtParams{1, uint32_t(rows * sizeof(float)), 0, 0, 0});
    out_lse_.FreeTensor(joint);
  }

  __aicore__ inline void Join(uint64_t row, uint32_t rows) {
    LocalTensor<float> total = total_.Get<float>(), wide = row_.Get<float>(), weights = weights_.Get<float>();
    for (uint32_t r = 0; r < rows; ++r) Duplicate(total[r * t_.step], 0.0f, t_.width);
    PipeBarrier<PIPE_V>();
    atb::WaitForVector(pipe_);
    for (uint32_t part = 0; part < t_.parts; ++part) {
      if (part + 1 < t_.parts) LoadPart(part + 1, row, rows);
      LocalTensor<T> out = in_.template DeQue<T>();
      for (uint32_t r = 0; r < rows; ++r) {
        const float weight = weights.GetValue(part * t_.lse_step + r);
        if (weight == 0.0f) continue; // an empty part
        atb::Widen(wide, out[r * t_.step], t_.width);
        Axpy(total[r * t_.step], wide, weight, t_.width);
        PipeBarrier<PIPE_V>();
      }
      in_.FreeTensor(out);
    }
    atb::VectorWaitsForScalar(pipe_);
    LocalTensor<T> result = out_.template AllocTensor<T>();
    for (uint32_t r = 0; r < rows; ++r) atb::Narrow(result[r * t_.step], total[r * t_.step], t_.width);
    out_.EnQue(result);
    result = out_.template DeQue<T>();
    atb::StoreRows(result_[row * t_.width], result, rows, t_.width);
    out_.FreeTensor(result);
  }

  TPipe *pipe_;
  LseMergeTiling t_;
  TQue<TPosition::VECIN, 2> in_, in_lse_;
  TQue<TPosition::VECOUT, 2> out_, out_lse_;
  TBuf<TPosition::VECCALC> total_, row_, weights_, most_, sum_;
  GlobalTensor<T> outs_, result_;
  GlobalTensor<float> lses_, lse_;
};

template <typename T>
__aicore__ inline void Run(GM_ADDR outs, GM_ADDR lses, GM_ADDR out, GM_ADDR lse,
                           const LseMergeTiling &tiling) {
  TPipe pipe;
  LseMerge<T> kernel(&pipe, tiling);
  kernel.Process(outs, lses, out, lse);
}
} // namespace

extern "C" __global__ __aicore__ void atb_lse_merge_half(GM_ADDR outs, GM_ADDR lses, GM_ADDR out, GM_ADDR lse,
                                                         LseMergeTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<half>(outs, lses, out, lse, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_lse_merge_bfloat16(GM_ADDR outs, GM_ADDR lses, GM_ADDR out,
                                                             GM_ADDR lse, LseMergeTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<bfloat16_t>(outs, lses, out, lse, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_lse_merge_float(GM_ADDR outs, GM_ADDR lses, GM_ADDR out,
                                                          GM_ADDR lse, LseMergeTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<float>(outs, lses, out, lse, tiling);
}
