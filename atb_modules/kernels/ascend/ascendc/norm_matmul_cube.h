// The cube side of RMSNorm + product: slots of normalised rows times the weight, tile by tile.
#pragma once
#include "cube_tiles.h"
#include "norm_matmul_rows.h"

namespace atb {

template <typename T> class NormMatmulCube {
public:
  __aicore__ inline NormMatmulCube(TPipe *pipe, const NormMatmulTiling &tiling)
      : t_(tiling), steps_(tiling, static_cast<uint32_t>(GetBlockIdx())) {
    pipe->InitBuffer(left_, 2, t_.tile_rows * t_.chunk * sizeof(T));
    pipe->InitBuffer(right_, 2, t_.tile_columns * t_.chunk * sizeof(T));
    pipe->InitBuffer(left0_, 2, t_.tile_rows * t_.piece * sizeof(T));
    pipe->InitBuffer(right0_, 2, t_.tile_columns * t_.piece * sizeof(T));
    pipe->InitBuffer(sums_, 2, t_.tile_rows * t_.tile_columns * sizeof(float));
  }

  __aicore__ inline void Process(GM_ADDR work, GM_ADDR weight, GM_ADDR out) {
    const uint32_t block = static_cast<uint32_t>(GetBlockIdx()), slot = t_.tile_rows * t_.step;
    slots_.SetGlobalBuffer((__gm__ T *)work + uint64_t(block) * 2 * slot, 2ull * slot);
    weight_.SetGlobalBuffer((__gm__ T *)weight, uint64_t(t_.columns) * t_.width);
    out_.SetGlobalBuffer((__gm__ T *)out, uint64_t(t_.rows) * t_.columns);
    NormMatmulStep now = steps_.First();
    Load(now);
    while (now.live) {
      const NormMatmulStep next = steps_.After(now);
      Load(next);
      Compute(now);
      now = next;
    }
  }

private:
  __aicore__ inline void Load(const NormMatmulStep &step) {
    if (!step.live) return;
    const uint32_t n = steps_.Width(step);
    const uint16_t which = static_cast<uint16_t>(step.tile % 2);
    LocalTensor<T> right = right_.template AllocTensor<T>();
    LoadFractals(right, weight_[uint64_t(step.column) * t_.width + step.start], steps_.Columns(step), n,
                 t_.width);
    right_.EnQue(right);
    const bool begins = step.start == 0 && step.column == steps_.First().column;
    if (begins) AwaitVectors<PIPE_MTE2>(kSlotFull + which);
    LocalTensor<T> left = left_.template AllocTensor<T>();
    LoadFractals(left, slots_[which * t_.tile_rows * t_.step + step.start], steps_.Rows(step), n, t_.step);
    left_.EnQue(left);
    const bool ends = steps_.After(step).tile != step.tile;
    if (ends && step.tile + 2 < steps_.Tiles()) TellVectors<PIPE_MTE2>(kSlotFree + which);
  }

  __aicore__ inline void Compute(const NormMatmulStep &step) {
    const uint32_t n = steps_.Width(step), rows = steps_.Rows(step), columns = steps_.Columns(step);
    LocalTensor<T> left = left_.template DeQue<T>(), right = right_.template DeQue<T>();
    if (step.start == 0) sum_ = sums_.template AllocTensor<float>();
    for (uint32_t at = 0; at < n; at += t_.piece) {
      const uint32_t k = Least(t_.piece, n - at);
      LocalTensor<T> a = left0_.template AllocTensor<T>(), b = right0_.template AllocTensor<T>();
      LoadLeft(a, left, rows, at, k);
      LoadRight(b, right, columns, at, k);
      left0_.EnQue(a);
      right0_.EnQue(b);
      a = left0_.template DeQue<T>();
      b = right0_.template DeQue<T>();
      Multiply(sum_, a, b, rows, columns, k, step.start + at == 0);
      left0_.FreeTensor(a);
      right0_.FreeTensor(b);
    }
    left_.FreeTensor(left);
    right_.FreeTensor(right);
    if (step.start + n < t_.width) return;
    sums_.EnQue(sum_);
    sum_ = sums_.template DeQue<float>();
    StoreSums(out_[uint64_t(steps_.Row(step)) * t_.columns + step.column], sum_, rows, columns, t_.columns);
    sums_.FreeTensor(sum_);
  }

  NormMatmulTiling t_;
  NormMatmulSteps steps_;
  TQue<TPosition::A1, 2> left_;
  TQue<TPosition::B1, 2> right_;
  TQue<TPosition::A2, 2> left0_;
  TQue<TPosition::B2, 2> right0_;
  TQue<TPosition::CO1, 2> sums_;
  LocalTensor<float> sum_;
  GlobalTensor<T> slots_, weight_, out_;
};

} // namespace atb
