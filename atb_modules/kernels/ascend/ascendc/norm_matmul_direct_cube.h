// The cube side of RMSNorm + product where vector cores reach L1 (dav-3510): chunks of normalised rows that
// lie in two slots of L1, times the weight.
#pragma once
#include "cube_tiles.h"
#include "norm_matmul_grid.h"

namespace atb {

template <typename T> class NormMatmulDirectCube {
public:
  __aicore__ inline NormMatmulDirectCube(TPipe *pipe, const NormMatmulTiling &tiling)
      : t_(tiling), steps_(tiling, static_cast<uint32_t>(GetBlockIdx())) {
    pipe->InitBuffer(slots_, 2 * t_.tile_rows * t_.chunk * sizeof(T)); // first: vector cores count on byte 0
    pipe->InitBuffer(right_, 2, t_.tile_columns * t_.chunk * sizeof(T));
    pipe->InitBuffer(left0_, 2, t_.tile_rows * t_.piece * sizeof(T));
    pipe->InitBuffer(right0_, 2, t_.tile_columns * t_.piece * sizeof(T));
    pipe->InitBuffer(sums_, 2, t_.tile_rows * t_.tile_columns * sizeof(float));
  }

  __aicore__ inline void Process(GM_ADDR weight, GM_ADDR out) {
    weight_.SetGlobalBuffer((__gm__ T *)weight, uint64_t(t_.columns) * t_.width);
    out_.SetGlobalBuffer((__gm__ T *)out, uint64_t(t_.rows) * t_.columns);
    NormMatmulStep now = steps_.First();
    Load(now);
    while (now.live) {
      const NormMatmulStep next = steps_.After(now);
      Load(next);
      Compute(now, steps_.After(next).live && next.live);
      now = next;
    }
  }

private:
  __aicore__ inline void Load(const NormMatmulStep &step) {
    if (!step.live) return;
    LocalTensor<T> right = right_.template AllocTensor<T>();
    LoadFractals(right, weight_[uint64_t(step.column) * t_.width + step.start], steps_.Columns(step),
                 steps_.Width(step), t_.width);
    right_.EnQue(right);
  }

  // `again`: another chunk will be written into the slot that this one leaves.
  __aicore__ inline void Compute(const NormMatmulStep &step, bool again) {
    const uint32_t rows = steps_.Rows(step), columns = steps_.Columns(step), n = steps_.Width(step);
    const uint16_t which = static_cast<uint16_t>(taken_++ % 2);
    const LocalTensor<T> left = slots_.template Get<T>()[which * t_.tile_rows * t_.chunk];
    LocalTensor<T> right = right_.template DeQue<T>();
    if (step.start == 0) sum_ = sums_.template AllocTensor<float>();
    AwaitVectors<PIPE_MTE1>(kSlotFull + which);
    for (uint32_t at = 0; at < n; at += t_.piece) {
      const uint32_t k = Least(t_.piece, n - at);
      LocalTensor<T> a = left0_.template AllocTensor<T>(), b = right0_.template AllocTensor<T>();
      LoadLeft(a, left, rows, at, k);
      if (at + k == n && again) TellVectors<PIPE_MTE1>(kSlotFree + which);
      LoadRight(b, right, columns, at, k);
      left0_.EnQue(a);
      right0_.EnQue(b);
      a = left0_.template DeQue<T>();
      b = right0_.template DeQue<T>();
      Multiply(sum_, a, b, rows, columns, k, step.start + at == 0);
      left0_.FreeTensor(a);
      right0_.FreeTensor(b);
    }
    right_.FreeTensor(right);
    if (step.start + n < t_.width) return;
    sums_.EnQue(sum_);
    sum_ = sums_.template DeQue<float>();
    StoreSums(out_[uint64_t(steps_.Row(step)) * t_.columns + step.column], sum_, rows, columns, t_.columns);
    sums_.FreeTensor(sum_);
  }

  NormMatmulTiling t_;
  NormMatmulSteps steps_;
  uint32_t taken_ = 0;
  TBuf<TPosition::A1> slots_;
  TQue<TPosition::B1, 2> right_;
  TQue<TPosition::A2, 2> left0_;
  TQue<TPosition::B2, 2> right0_;
  TQue<TPosition::CO1, 2> sums_;
  LocalTensor<float> sum_;
  GlobalTensor<T> weight_, out_;
};

} // namespace atb
