// RMSNorm over rows, alone or of the sum of two tensors: y = s / sqrt(mean(s^2) + eps) * (offset + weight).
//
// Whole rows stay in the unified buffer between the sum of their squares and their scaling, so every input is
// read once and every output written once. A row that does not fit is taken in pieces and read a second time.
// Statistics are in float; the sum is rounded to the dtype first, as its reader will see it.
#pragma once
#include "rows.h"
#include "tiling/rms_norm.h"

namespace atb {

template <typename T, bool kAdds> class RmsNormRows {
public:
  __aicore__ inline RmsNormRows(TPipe *pipe, const RmsNormTiling &tiling) : pipe_(pipe), t_(tiling) {}

  __aicore__ inline void Init(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR y, GM_ADDR sum,
                              GM_ADDR rstd) {
    const uint64_t all = uint64_t(t_.rows) * t_.width;
    x_.SetGlobalBuffer((__gm__ T *)x, all);
    y_.SetGlobalBuffer((__gm__ T *)y, all);
    if constexpr (kAdds) {
      residual_.SetGlobalBuffer((__gm__ T *)residual, all);
      sum_.SetGlobalBuffer((__gm__ T *)sum, all);
    }
    const uint32_t tile = t_.tile_rows * t_.step * sizeof(T);
    pipe_->InitBuffer(in_x_, t_.in_buffers, tile);
    pipe_->InitBuffer(out_y_, t_.out_buffers, tile);
    if constexpr (kAdds) {
      pipe_->InitBuffer(in_residual_, t_.in_buffers, tile);
      pipe_->InitBuffer(out_sum_, t_.out_buffers, tile);
    }
    if (t_.has_weight) {
      weight_.SetGlobalBuffer((__gm__ T *)weight, t_.width);
      pipe_->InitBuffer(in_weight_, t_.piece < t_.width ? t_.in_buffers : 1, t_.piece * sizeof(T));
    }
    pipe_->InitBuffer(a_, t_.chunk * sizeof(float));
    pipe_->InitBuffer(b_, t_.chunk * sizeof(float));
    pipe_->InitBuffer(squares_, t_.chunk * sizeof(float));
    pipe_->InitBuffer(work_, (t_.chunk + 63) / 64 * sizeof(float));
    pipe_->InitBuffer(means_, t_.tile_rows * sizeof(float));
    pipe_->InitBuffer(ones_, t_.tile_rows * sizeof(float));
    if (t_.keeps_rstd) {
      rstd_.SetGlobalBuffer((__gm__ float *)rstd, t_.rows);
      pipe_->InitBuffer(out_rstd_, 1, t_.tile_rows * sizeof(float));
    }
  }

  __aicore__ inline void Process() {
    const Share share = ShareOf(t_.rows);
    if (share.begin >= share.end) return;
    if (t_.piece < t_.width) {
      for (uint64_t row = share.begin; row < share.end; ++row) LongRow(row);
      return;
    }
    if (t_.has_weight) {
      LoadWeight(0, t_.width);
      weights_ = in_weight_.template DeQue<T>();
    }
    const bool ahead = t_.in_buffers > 1;
    if (ahead) Load(share, share.begin);
    for (uint64_t row = share.begin; row < share.end; row += t_.tile_rows) {
      if (!ahead) Load(share, row);
      if (ahead && row + t_.tile_rows < share.end) Load(share, row + t_.tile_rows);
      Tile(row, Least(t_.tile_rows, share.end - row));
    }
    if (t_.has_weight) in_weight_.FreeTensor(weights_);
  }

private:
  using In = TQue<TPosition::VECIN, 2>;
  using Out = TQue<TPosition::VECOUT, 2>;

  __aicore__ inline void LoadInto(In &queue, const GlobalTensor<T> &from, uint32_t rows, uint32_t width) {
    LocalTensor<T> to = queue.template AllocTensor<T>();
    LoadRows(to, from, rows, width);
    queue.EnQue(to);
  }
  __aicore__ inline void Load(const Share &share, uint64_t row) {
    const uint32_t rows = Least(t_.tile_rows, share.end - row);
    LoadInto(in_x_, x_[row * t_.width], rows, t_.width);
    if constexpr (kAdds) LoadInto(in_residual_, residual_[row * t_.width], rows, t_.width);
  }
  __aicore__ inline void LoadWeight(uint64_t start, uint32_t count) {
    LoadInto(in_weight_, weight_[start], 1, count);
  }

  // total = x + residual, rounded; squares += the squares of what was rounded.
  __aicore__ inline void Accumulate(const LocalTensor<T> &x, const LocalTensor<T> &residual,
                                    const LocalTensor<T> &total, uint32_t count, bool first) {
    LocalTensor<float> a = a_.Get<float>(), b = b_.Get<float>(), squares = squares_.Get<float>();
    for (uint32_t start = 0; start < count; start += t_.chunk) {
      const uint32_t n = Least(t_.chunk, count - start);
      Widen(a, x[start], n);
      if constexpr (kAdds) {
        Widen(b, residual[start], n);
        Add(a, a, b, n);
        PipeBarrier<PIPE_V>();
        Narrow(total[start], a, n);
        if constexpr (sizeof(T) == 2) Widen(a, total[start], n);
      }
      if (first && start == 0) {
        Mul(squares, a, a, n);
      } else {
        Mul(b, a, a, n);
        PipeBarrier<PIPE_V>();
        Add(squares, squares, b, n);
      }
      PipeBarrier<PIPE_V>();
    }
  }
  // means[row] = the sum of the squares gathered so far.
  __aicore__ inline void Reduce(uint32_t row, uint32_t count) {
    ReduceSum(means_.Get<float>()[row], squares_.Get<float>(), work_.Get<float>(),
              static_cast<int32_t>(Least(t_.chunk, count)));
    PipeBarrier<PIPE_V>();
  }
  // means = 1 / sqrt(means / width + eps), for all rows of the tile.
  __aicore__ inline void Invert(uint64_t row, uint32_t rows) {
    LocalTensor<float> means = means_.Get<float>(), ones = ones_.Get<float>();
    Muls(means, means, 1.0f / static_cast<float>(t_.width), rows);
    Duplicate(ones, 1.0f, rows);
    PipeBarrier<PIPE_V>();
    Adds(means, means, t_.eps, rows);
    PipeBarrier<PIPE_V>();
    Sqrt(means, means, rows);
    PipeBarrier<PIPE_V>();
    Div(means, ones, means, rows);
    PipeBarrier<PIPE_V>();
    if (!t_.keeps_rstd) return;
    LocalTensor<float> kept = out_rstd_.template AllocTensor<float>();
    Muls(kept, means, 1.0f, rows);
    out_rstd_.EnQue(kept);
    kept = out_rstd_.template DeQue<float>();
    DataCopyPad(rstd_[row], kept, DataCopyExtParams{1, uint32_t(rows * sizeof(float)), 0, 0, 0});
    out_rstd_.FreeTensor(kept);
  }
  __aicore__ inline void Scale(const LocalTensor<T> &y, const LocalTensor<T> &total,
                               const LocalTensor<T> &weight, float rstd, uint32_t count) {
    LocalTensor<float> a = a_.Get<float>(), b = b_.Get<float>();
    for (uint32_t start = 0; start < count; start += t_.chunk) {
      const uint32_t n = Least(t_.chunk, count - start);
      Widen(a, total[start], n);
      Muls(a, a, rstd, n);
      PipeBarrier<PIPE_V>();
      if (t_.has_weight) {
        if (t_.cast_first && sizeof(T) == 2) {
          Narrow(y[start], a, n);
          Widen(a, y[start], n);
        }
        Widen(b, weight[start], n);
        if (t_.weight_offset != 0.0f) {
          Adds(b, b, t_.weight_offset, n);
          PipeBarrier<PIPE_V>();
        }
        Mul(a, a, b, n);
        PipeBarrier<PIPE_V>();
      }
      Narrow(y[start], a, n);
    }
  }
  __aicore__ inline float ReadMean(uint32_t row) { return means_.Get<float>().GetValue(row); }

  __aicore__ inline void Tile(uint64_t row, uint32_t rows) {
    LocalTensor<T> x = in_x_.template DeQue<T>(), residual, total = x;
    if constexpr (kAdds) {
      residual = in_residual_.template DeQue<T>();
      total = out_sum_.template AllocTensor<T>();
    }
    for (uint32_t r = 0; r < rows; ++r) {
      Accumulate(x[r * t_.step], residual[kAdds ? r * t_.step : 0], total[r * t_.step], t_.width, true);
      Reduce(r, t_.width);
    }
    if constexpr (kAdds) {
      in_x_.FreeTensor(x);
      in_residual_.FreeTensor(residual);
    }
    Invert(row, rows);
    LocalTensor<T> y = out_y_.template AllocTensor<T>();
    WaitForVector(pipe_);
    for (uint32_t r = 0; r < rows; ++r)
      Scale(y[r * t_.step], total[r * t_.step], weights_, ReadMean(r), t_.width);
    VectorWaitsForScalar(pipe_);
    if constexpr (!kAdds) in_x_.FreeTensor(x);
    StoreFrom(out_y_, y, y_[row * t_.width], rows, t_.width);
    if constexpr (kAdds) StoreFrom(out_sum_, total, sum_[row * t_.width], rows, t_.width);
  }
  __aicore__ inline void StoreFrom(Out &queue, LocalTensor<T> &from, const GlobalTensor<T> &to, uint32_t rows,
                                   uint32_t width) {
    queue.EnQue(from);
    from = queue.template DeQue<T>();
    StoreRows(to, from, rows, width);
    queue.FreeTensor(from);
  }

  __aicore__ inline void LongRow(uint64_t row) {
    const uint64_t base = row * t_.width;
    for (uint32_t start = 0; start < t_.width; start += t_.piece) {
      const uint32_t n = Least(t_.piece, t_.width - start);
      LoadInto(in_x_, x_[base + start], 1, n);
      if constexpr (kAdds) LoadInto(in_residual_, residual_[base + start], 1, n);
      LocalTensor<T> x = in_x_.template DeQue<T>(), residual, total = x;
      if constexpr (kAdds) {
        residual = in_residual_.template DeQue<T>();
        total = out_sum_.template AllocTensor<T>();
      }
      Accumulate(x, residual, total, n, start == 0);
      in_x_.FreeTensor(x);
      if constexpr (kAdds) {
        in_residual_.FreeTensor(residual);
        StoreFrom(out_sum_, total, sum_[base + start], 1, n);
      }
    }
    Reduce(0, t_.width);
    Invert(row, 1);
    WaitForVector(pipe_);
    const float rstd = ReadMean(0);
    VectorWaitsForScalar(pipe_);
    if constexpr (kAdds) { // the sums are read back from global memory
      const TEventID id = pipe_->FetchEventID(HardEvent::MTE3_MTE2);
      SetFlag<HardEvent::MTE3_MTE2>(id);
      WaitFlag<HardEvent::MTE3_MTE2>(id);
    }
    for (uint32_t start = 0; start < t_.width; start += t_.piece) {
      const uint32_t n = Least(t_.piece, t_.width - start);
      LoadInto(in_x_, kAdds ? sum_[base + start] : x_[base + start], 1, n);
      LocalTensor<T> weight;
      if (t_.has_weight) {
        LoadWeight(start, n);
        weight = in_weight_.template DeQue<T>();
      }
      LocalTensor<T> total = in_x_.template DeQue<T>(), y = out_y_.template AllocTensor<T>();
      Scale(y, total, weight, rstd, n);
      in_x_.FreeTensor(total);
      if (t_.has_weight) in_weight_.FreeTensor(weight);
      StoreFrom(out_y_, y, y_[base + start], 1, n);
    }
  }

  TPipe *pipe_;
  RmsNormTiling t_;
  In in_x_, in_residual_, in_weight_;
  Out out_y_, out_sum_, out_rstd_;
  TBuf<TPosition::VECCALC> a_, b_, squares_, work_, means_, ones_;
  GlobalTensor<T> x_, residual_, weight_, y_, sum_;
  GlobalTensor<float> rstd_;
  LocalTensor<T> weights_;
};

} // namespace atb
