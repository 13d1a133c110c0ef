// The vector side of RMSNorm + product: rows of x, normalised, into slots of the workspace.
#pragma once
#include "norm_matmul_grid.h"
#include "rows.h"

namespace atb {

template <typename T> class NormMatmulRows {
public:
  __aicore__ inline NormMatmulRows(TPipe *pipe, const NormMatmulTiling &tiling) : pipe_(pipe), t_(tiling) {
    const uint32_t row = t_.width * sizeof(T);
    pipe->InitBuffer(in_, 2, row);
    pipe->InitBuffer(out_, 1, row);
    if (t_.has_weight) pipe->InitBuffer(in_weight_, 1, row);
    pipe->InitBuffer(wide_, t_.width * sizeof(float));
    pipe->InitBuffer(squares_, t_.squares * sizeof(float));
    pipe->InitBuffer(part_, t_.squares * sizeof(float));
    pipe->InitBuffer(work_, t_.squares / 16);
    pipe->InitBuffer(mean_, sizeof(float));
    pipe->InitBuffer(one_, sizeof(float));
  }

  __aicore__ inline void Process(GM_ADDR x, GM_ADDR weight, GM_ADDR work) {
    const uint32_t block = static_cast<uint32_t>(GetBlockIdx() / 2), slot = t_.tile_rows * t_.step;
    const NormMatmulBlocks blocks = BlocksOf(t_, block);
    x_.SetGlobalBuffer((__gm__ T *)x, uint64_t(t_.rows) * t_.width);
    slots_.SetGlobalBuffer((__gm__ T *)work + uint64_t(block) * 2 * slot, 2ull * slot);
    if (t_.has_weight) {
      weight_.SetGlobalBuffer((__gm__ T *)weight, t_.width);
      weights_ = in_weight_.template AllocTensor<T>();
      LoadRows(weights_, weight_, 1, t_.width);
      in_weight_.EnQue(weights_);
      weights_ = in_weight_.template DeQue<T>();
    }
    for (uint32_t i = 0; i < blocks.count; ++i) {
      const uint32_t first = (blocks.first + i * t_.row_groups) * t_.tile_rows;
      const uint16_t which = static_cast<uint16_t>(i % 2);
      if (i >= 2) AwaitCube<PIPE_MTE3>(kSlotFree + which);
      Tile(first, Least(t_.tile_rows, t_.rows - first), slots_[which * slot]);
      TellCube<PIPE_MTE3>(kSlotFull + which);
    }
    if (t_.has_weight) in_weight_.FreeTensor(weights_);
  }

private:
  __aicore__ inline void Load(uint32_t row) {
    LocalTensor<T> x = in_.template AllocTensor<T>();
    LoadRows(x, x_[uint64_t(row) * t_.width], 1, t_.width);
    in_.EnQue(x);
  }
  // Every second row of the tile: the other vector core of the block takes the others.
  __aicore__ inline void Tile(uint32_t first, uint32_t rows, const GlobalTensor<T> &slot) {
    const uint32_t mine = static_cast<uint32_t>(GetSubBlockIdx());
    if (mine < rows) Load(first + mine);
    for (uint32_t row = mine; row < rows; row += 2) {
      if (row + 2 < rows) Load(first + row + 2);
      LocalTensor<T> x = in_.template DeQue<T>();
      Widen(wide_.Get<float>(), x, t_.width);
      in_.FreeTensor(x);
      Scale(Rstd());
      LocalTensor<T> y = out_.template AllocTensor<T>();
      Narrow(y, wide_.Get<float>(), t_.width);
      out_.EnQue(y);
      y = out_.template DeQue<T>();
      StoreRows(slot[row * t_.step], y, 1, t_.width);
      out_.FreeTensor(y);
    }
  }

  // 1 / sqrt(mean(x^2) + eps) of the row in `wide_`
  __aicore__ inline float Rstd() {
    LocalTensor<float> wide = wide_.Get<float>(), squares = squares_.Get<float>(), part = part_.Get<float>();
    LocalTensor<float> mean = mean_.Get<float>(), one = one_.Get<float>();
    Mul(squares, wide, wide, Least(t_.squares, t_.width));
    PipeBarrier<PIPE_V>();
    for (uint32_t start = t_.squares; start < t_.width; start += t_.squares) {
      const uint32_t n = Least(t_.squares, t_.width - start);
      Mul(part, wide[start], wide[start], n);
      PipeBarrier<PIPE_V>();
      Add(squares, squares, part, n);
      PipeBarrier<PIPE_V>();
    }
    ReduceSum(mean, squares, work_.Get<float>(), static_cast<int32_t>(Least(t_.squares, t_.width)));
    Duplicate(one, 1.0f, 1);
    PipeBarrier<PIPE_V>();
    Muls(mean, mean, 1.0f / static_cast<float>(t_.width), 1);
    PipeBarrier<PIPE_V>();
    Adds(mean, mean, t_.eps, 1);
    PipeBarrier<PIPE_V>();
    Sqrt(mean, mean, 1);
    PipeBarrier<PIPE_V>();
    Div(mean, one, mean, 1);
    WaitForVector(pipe_);
    const float rstd = mean.GetValue(0);
    VectorWaitsForScalar(pipe_);
    return rstd;
  }
  // wide = wide * rstd * (weight_offset + weight)
  __aicore__ inline void Scale(float rstd) {
    LocalTensor<float> wide = wide_.Get<float>(), part = part_.Get<float>();
    Muls(wide, wide, rstd, t_.width);
    PipeBarrier<PIPE_V>();
    if (!t_.has_weight) return;
    if (t_.cast_first && sizeof(T) == 2) {
      LocalTensor<T> rounded = out_.template AllocTensor<T>();
      Narrow(rounded, wide, t_.width);
      Widen(wide, rounded, t_.width);
      out_.FreeTensor(rounded);
    }
    for (uint32_t start = 0; start < t_.width; start += t_.squares) {
      const uint32_t n = Least(t_.squares, t_.width - start);
      Widen(part, weights_[start], n);
      if (t_.weight_offset != 0.0f) {
        Adds(part, part, t_.weight_offset, n);
        PipeBarrier<PIPE_V>();
      }
      Mul(wide[start], wide[start], part, n);
      PipeBarrier<PIPE_V>();
    }
  }

  TPipe *pipe_;
  NormMatmulTiling t_;
  TQue<TPosition::VECIN, 2> in_, in_weight_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> wide_, squares_, part_, work_, mean_, one_;
  GlobalTensor<T> x_, weight_, slots_;
  LocalTensor<T> weights_;
};

} // namespace atb
