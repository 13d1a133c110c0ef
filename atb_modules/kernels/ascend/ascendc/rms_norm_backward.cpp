// Backward of RMSNorm, and of the residual sum before it: with n = x rstd and g = grad_y (offset + weight),
// grad_x = rstd (g - n mean(g n)) [+ grad_sum], and grad_weight = sum over rows of grad_y n.
//
// x (the sum, where there was one), grad_y, grad_sum (rows, width), rstd (rows) in float, weight (width);
// out: grad_x (rows, width), and grad_weight in float as (blocks, width), one partial sum a core, which the
// caller adds up: no atomic addition between cores, so a result is the same from run to run. A row that does
// not fit the unified buffer is read twice, in pieces, and the partial sums grow in global memory.
#include "tiling/rms_norm_backward.h"
#include "rows.h"

namespace {
using namespace AscendC;
constexpr uint32_t kStats = 64; // values of rstd that are fetched together

template <typename T> class RmsNormBackward {
public:
  __aicore__ inline RmsNormBackward(TPipe *pipe, const RmsNormBackwardTiling &tiling)
      : pipe_(pipe), t_(tiling) {
    const uint32_t line = t_.piece * sizeof(T);
    pieces_ = t_.piece < t_.width;
    pipe->InitBuffer(in_grad_, t_.in_buffers, line);
    pipe->InitBuffer(in_x_, t_.in_buffers, line);
    pipe->InitBuffer(out_, t_.out_buffers, line);
    if (t_.has_sum_grad) pipe->InitBuffer(in_sum_grad_, t_.in_buffers, line);
    if (t_.has_weight) {
      pipe->InitBuffer(in_weight_, pieces_ ? t_.in_buffers : 1, line);
      pipe->InitBuffer(out_weight_grad_, pieces_ ? 2 : 1, t_.piece * sizeof(float));
    }
    pipe->InitBuffer(a_, t_.chunk * sizeof(float));
    pipe->InitBuffer(b_, t_.chunk * sizeof(float));
    pipe->InitBuffer(d_, t_.chunk * sizeof(float));
    pipe->InitBuffer(products_, t_.chunk * sizeof(float));
    pipe->InitBuffer(work_, (t_.chunk + 63) / 64 * sizeof(float));
    pipe->InitBuffer(mean_, 32);
    pipe->InitBuffer(stats_, kStats * sizeof(float));
  }

  __aicore__ inline void Process(GM_ADDR grad_y, GM_ADDR x, GM_ADDR rstd, GM_ADDR weight, GM_ADDR grad_sum,
                                 GM_ADDR grad_x, GM_ADDR grad_weight) {
    const uint64_t all = uint64_t(t_.rows) * t_.width;
    grad_y_.SetGlobalBuffer((__gm__ T *)grad_y, all);
    x_.SetGlobalBuffer((__gm__ T *)x, all);
    grad_x_.SetGlobalBuffer((__gm__ T *)grad_x, all);
    rstd_.SetGlobalBuffer((__gm__ float *)rstd, t_.rows);
    if (t_.has_sum_grad) grad_sum_.SetGlobalBuffer((__gm__ T *)grad_sum, all);
    if (t_.has_weight) {
      weight_.SetGlobalBuffer((__gm__ T *)weight, t_.width);
      grad_weight_.SetGlobalBuffer((__gm__ float *)grad_weight, uint64_t(t_.blocks) * t_.width);
    }
    share_ = atb::ShareOf(t_.rows);
    if (share_.begin >= share_.end) return;
    if (pieces_)
      LongRows();
    else
      WholeRows();
  }

private:
  using In = TQue<TPosition::VECIN, 2>;

  __aicore__ inline void LoadInto(In &queue, const GlobalTensor<T> &from, uint32_t count) {
    LocalTensor<T> to = queue.template AllocTensor<T>();
    atb::LoadRows(to, from, 1, count);
    queue.EnQue(to);
  }
  __aicore__ inline void Load(uint64_t at, uint32_t count, bool sum_too) {
    LoadInto(in_grad_, grad_y_[at], count);
    LoadInto(in_x_, x_[at], count);
    if (t_.has_sum_grad && sum_too) LoadInto(in_sum_grad_, grad_sum_[at], count);
  }
  __aicore__ inline float RstdOf(uint64_t row) {
    LocalTensor<float> stats = stats_.Get<float>();
    if (row >= first_ + kStats || first_ > row) {
      const TEventID free = pipe_->FetchEventID(HardEvent::S_MTE2);
      SetFlag<HardEvent::S_MTE2>(free);
      WaitFlag<HardEvent::S_MTE2>(free);
      PipeBarrier<PIPE_MTE2>();
      first_ = row;
      const uint32_t count = atb::Least(kStats, t_.rows - row);
      DataCopyPad(stats, rstd_[row], DataCopyExtParams{1, uint32_t(count * sizeof(float)), 0, 0, 0},
                  DataCopyPadExtParams<float>{});
      const TEventID there = pipe_->FetchEventID(HardEvent::MTE2_S);
      SetFlag<HardEvent::MTE2_S>(there);
      WaitFlag<HardEvent::MTE2_S>(there);
    }
    return stats.GetValue(static_cast<uint32_t>(row - first_));
  }

  // a = n, b = grad_y and, where there is a weight, d = grad_y (offset + weight); returns which of b and d is
  // g.
  __aicore__ inline LocalTensor<float> Widened(const LocalTensor<T> &grad, const LocalTensor<T> &x,
                                               const LocalTensor<T> &weight, uint32_t start, uint32_t n,
                                               float rstd) {
    LocalTensor<float> a = a_.Get<float>(), b = b_.Get<float>(), d = d_.Get<float>();
    atb::Widen(a, x[start], n);
    Muls(a, a, rstd, n);
    atb::Widen(b, grad[start], n);
    if (!t_.has_weight) return b;
    atb::Widen(d, weight[start], n);
    if (t_.weight_offset != 0.0f) {
      Adds(d, d, t_.weight_offset, n);
      PipeBarrier<PIPE_V>();
    }
    Mul(d, d, b, n);
    PipeBarrier<PIPE_V>();
    return d;
  }
  // products += g n, over the chunks of `count` elements.
  __aicore__ inline void Accumulate(const LocalTensor<T> &grad, const LocalTensor<T> &x,
                                    const LocalTensor<T> &weight, uint32_t count, float rstd, bool first) {
    LocalTensor<float> a = a_.Get<float>(), products = products_.Get<float>();
    for (uint32_t start = 0; start < count; start += t_.chunk) {
      const uint32_t n = atb::Least(t_.chunk, count - start);
      const LocalTensor<float> g = Widened(grad, x, weight, start, n, rstd);
      if (first && start == 0) {
        Mul(products, a, g, n);
      } else {
        Mul(a, a, g, n);
        PipeBarrier<PIPE_V>();
        Add(products, products, a, n);
      }
      PipeBarrier<PIPE_V>();
    }
  }
  __aicore__ inline float Mean() {
    LocalTensor<float> mean = mean_.Get<float>();
    ReduceSum(mean, products_.Get<float>(), work_.Get<float>(),
              static_cast<int32_t>(atb::Least(t_.chunk, t_.width)));
    atb::WaitForVector(pipe_);
    const float value = mean.GetValue(0) / static_cast<float>(t_.width);
    atb::VectorWaitsForScalar(pipe_);
    return value;
  }
  // grad_x of `count` elements, and their part of grad_weight, added to `sums` or put there.
  __aicore__ inline void Finish(const LocalTensor<T> &out, const LocalTensor<float> &sums,
                                const LocalTensor<T> &grad, const LocalTensor<T> &x,
                                const LocalTensor<T> &weight, const LocalTensor<T> &sum_grad, uint32_t count,
                                float rstd, float mean, bool fresh) {
    LocalTensor<float> a = a_.Get<float>(), b = b_.Get<float>(), d = d_.Get<float>();
    for (uint32_t start = 0; start < count; start += t_.chunk) {
      const uint32_t n = atb::Least(t_.chunk, count - start);
      const LocalTensor<float> g = Widened(grad, x, weight, start, n, rstd);
      if (t_.has_weight) {
        if (fresh) {
          Mul(sums[start], a, b, n);
        } else {
          Mul(b, a, b, n);
          PipeBarrier<PIPE_V>();
          Add(sums[start], sums[start], b, n);
        }
      }
      Muls(a, a, -mean, n);
      PipeBarrier<PIPE_V>();
      Add(a, a, g, n);
      PipeBarrier<PIPE_V>();
      Muls(a, a, rstd, n);
      PipeBarrier<PIPE_V>();
      if (t_.has_sum_grad) {
        atb::Widen(d, sum_grad[start], n);
        Add(a, a, d, n);
        PipeBarrier<PIPE_V>();
      }
      atb::Narrow(out[start], a, n);
    }
  }
  __aicore__ inline void StoreGrad(LocalTensor<T> &out, uint64_t at, uint32_t count) {
    out_.EnQue(out);
    out = out_.template DeQue<T>();
    atb::StoreRows(grad_x_[at], out, 1, count);
    out_.FreeTensor(out);
  }
  __aicore__ inline void StoreSums(LocalTensor<float> &sums, uint64_t at, uint32_t count) {
    out_weight_grad_.EnQue(sums);
    sums = out_weight_grad_.template DeQue<float>();
    atb::StoreRows(grad_weight_[GetBlockIdx() * uint64_t(t_.width) + at], sums, 1, count);
    out_weight_grad_.FreeTensor(sums);
  }

  __aicore__ inline void WholeRows() {
    LocalTensor<T> weight, sum_grad;
    LocalTensor<float> sums;
    if (t_.has_weight) {
      LoadInto(in_weight_, weight_, t_.width);
      weight = in_weight_.template DeQue<T>();
      sums = out_weight_grad_.template AllocTensor<float>();
    }
    const bool ahead = t_.in_buffers > 1;
    if (ahead) Load(share_.begin * t_.width, t_.width, true);
    for (uint64_t row = share_.begin; row < share_.end; ++row) {
      if (!ahead) Load(row * t_.width, t_.width, true);
      if (ahead && row + 1 < share_.end) Load((row + 1) * t_.width, t_.width, true);
      const float rstd = RstdOf(row);
      LocalTensor<T> grad = in_grad_.template DeQue<T>(), x = in_x_.template DeQue<T>();
      Accumulate(grad, x, weight, t_.width, rstd, true);
      const float mean = Mean();
      if (t_.has_sum_grad) sum_grad = in_sum_grad_.template DeQue<T>();
      LocalTensor<T> out = out_.template AllocTensor<T>();
      Finish(out, sums, grad, x, weight, sum_grad, t_.width, rstd, mean, row == share_.begin);
      in_grad_.FreeTensor(grad);
      in_x_.FreeTensor(x);
      if (t_.has_sum_grad) in_sum_grad_.FreeTensor(sum_grad);
      StoreGrad(out, row * t_.width, t_.width);
    }
    if (t_.has_weight) {
      in_weight_.FreeTensor(weight);
      StoreSums(sums, 0, t_.width);
    }
  }

  __aicore__ inline void LongRows() {
    for (uint64_t row = share_.begin; row < share_.end; ++row) {
      const float rstd = RstdOf(row);
      for (uint32_t start = 0; start < t_.width; start += t_.piece) Piece(row, start, rstd, 0.0f, true);
      const float mean = Mean();
      for (uint32_t start = 0; start < t_.width; start += t_.piece) Piece(row, start, rstd, mean, false);
      if (row == share_.begin && t_.has_weight && row + 1 < share_.end) {
        PipeBarrier<PIPE_MTE3>(); // what the first row has put there, the others add to
        adds_ = true;
      }
    }
  }
  __aicore__ inline void Piece(uint64_t row, uint32_t start, float rstd, float mean, bool first_pass) {
    const uint64_t at = row * t_.width + start;
    const uint32_t n = atb::Least(t_.piece, t_.width - start);
    Load(at, n, !first_pass);
    LocalTensor<T> weight, sum_grad;
    if (t_.has_weight) {
      LoadInto(in_weight_, weight_[start], n);
      weight = in_weight_.template DeQue<T>();
    }
    LocalTensor<T> grad = in_grad_.template DeQue<T>(), x = in_x_.template DeQue<T>();
    if (first_pass) {
      Accumulate(grad, x, weight, n, rstd, start == 0);
    } else {
      if (t_.has_sum_grad) sum_grad = in_sum_grad_.template DeQue<T>();
      LocalTensor<float> sums;
      if (t_.has_weight) sums = out_weight_grad_.template AllocTensor<float>();
      LocalTensor<T> out = out_.template AllocTensor<T>();
      Finish(out, sums, grad, x, weight, sum_grad, n, rstd, mean, true);
      if (t_.has_sum_grad) in_sum_grad_.FreeTensor(sum_grad);
      StoreGrad(out, at, n);
      if (t_.has_weight) {
        if (adds_) SetAtomicAdd<float>();
        StoreSums(sums, start, n);
        if (adds_) SetAtomicNone();
      }
    }
    in_grad_.FreeTensor(grad);
    in_x_.FreeTensor(x);
    if (t_.has_weight) in_weight_.FreeTensor(weight);
  }

  TPipe *pipe_;
  RmsNormBackwardTiling t_;
  bool pieces_ = false, adds_ = false;
  atb::Share share_{0, 0};
  uint64_t first_ = ~0ull - kStats;
  In in_grad_, in_x_, in_sum_grad_, in_weight_;
  TQue<TPosition::VECOUT, 2> out_, out_weight_grad_;
  TBuf<TPosition::VECCALC> a_, b_, d_, products_, work_, mean_, stats_;
  GlobalTensor<T> grad_y_, x_, weight_, grad_sum_, grad_x_;
  GlobalTensor<float> rstd_, grad_weight_;
};

template <typename T>
__aicore__ inline void Run(GM_ADDR grad_y, GM_ADDR x, GM_ADDR rstd, GM_ADDR weight, GM_ADDR grad_sum,
                           GM_ADDR grad_x, GM_ADDR grad_weight, const RmsNormBackwardTiling &tiling) {
  TPipe pipe;
  RmsNormBackward<T> kernel(&pipe, tiling);
  kernel.Process(grad_y, x, rstd, weight, grad_sum, grad_x, grad_weight);
}
} // namespace

extern "C" __global__ __aicore__ void atb_rms_norm_backward_half(GM_ADDR grad_y, GM_ADDR x, GM_ADDR rstd,
                                                                 GM_ADDR weight, GM_ADDR grad_sum,
                                                                 GM_ADDR grad_x, GM_ADDR grad_weight,
                                                                 RmsNormBackwardTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<half>(grad_y, x, rstd, weight, grad_sum, grad_x, grad_weight, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_rms_norm_backward_bfloat16(GM_ADDR grad_y, GM_ADDR x, GM_ADDR rstd,
                                                                     GM_ADDR weight, GM_ADDR grad_sum,
                                                                     GM_ADDR grad_x, GM_ADDR grad_weight,
                                                                     RmsNormBackwardTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<bfloat16_t>(grad_y, x, rstd, weight, grad_sum, grad_x, grad_weight, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_rms_norm_backward_float(GM_ADDR grad_y, GM_ADDR x, GM_ADDR rstd,
                                                                  GM_ADDR weight, GM_ADDR grad_sum,
                                                                  GM_ADDR grad_x, GM_ADDR grad_weight,
                                                                  RmsNormBackwardTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<float>(grad_y, x, rstd, weight, grad_sum, grad_x, grad_weight, tiling);
}
