// The vector side of RMSNorm + product where vector cores reach L1 (dav-3510): chunks of normalised rows,
// written as fractals straight into two slots of the L1 of the cube core.
//
// They become fractals as they are narrowed: the copy of rows as fractals (DataCopy with Nd2NzParams) has no
// hardware between these memories, and is documented as "simulated by software". That of blocks has, where
// the kernel is compiled with ENABLE_CV_COMM_VIA_SSBUF=true.
#pragma once
#include "cube_tiles.h"
#include "norm_matmul_grid.h"
#include "softmax_rows.h"

namespace atb {

// The slots lie at the start of L1: the cube core's first buffer there, which vector cores, whose pipe has no
// L1, name by its address. (The documentation has tensors by address for kernels without a pipe.)
template <typename T> __aicore__ inline LocalTensor<T> SlotOfL1(const NormMatmulTiling &t, uint32_t which) {
  const uint32_t size = t.tile_rows * t.chunk;
  return LocalTensor<T>(TPosition::A1, static_cast<uint32_t>(which * size * sizeof(T)), size);
}

// Each vector core of a block has half the rows of a tile. It reads them once for their statistics, and a
// chunk of them again, from L2, for every tile of columns: so that neither a long row nor a whole tile must
// fit a buffer.
template <typename T> class NormMatmulDirectRows {
public:
  __aicore__ inline NormMatmulDirectRows(TPipe *pipe, const NormMatmulTiling &tiling) : t_(tiling) {
    const uint32_t rows = t_.tile_rows / 2, chunk = rows * t_.chunk;
    pipe->InitBuffer(in_, 2, chunk * sizeof(T));
    pipe->InitBuffer(out_, 1, chunk * sizeof(T));
    if (t_.has_weight) {
      pipe->InitBuffer(in_weight_, 2, t_.chunk * sizeof(T));
      pipe->InitBuffer(weight_, t_.chunk * sizeof(float));
    }
    pipe->InitBuffer(wide_, chunk * sizeof(float));
    pipe->InitBuffer(squares_, chunk * sizeof(float));
    pipe->InitBuffer(rstd_, rows * sizeof(float));
    pipe->InitBuffer(factors_, rows * 32);
  }

  __aicore__ inline void Process(GM_ADDR x, GM_ADDR weight) {
    blocks_ = BlocksOf(t_, static_cast<uint32_t>(GetBlockIdx() / 2));
    x_.SetGlobalBuffer((__gm__ T *)x, uint64_t(t_.rows) * t_.width);
    if (t_.has_weight) weights_.SetGlobalBuffer((__gm__ T *)weight, t_.width);
    const uint32_t column_tiles = (t_.columns + t_.tile_columns - 1) / t_.tile_columns;
    passes_ = 1 + (column_tiles - blocks_.column_group + t_.column_groups - 1) / t_.column_groups;
    Step now{blocks_.count > 0, 0, 0, 0};
    Load(now);
    while (now.live) {
      const Step next = After(now);
      Load(next);
      if (now.pass == 0)
        Measure(now);
      else
        Send(now);
      now = next;
    }
  }

private:
  // One chunk of the width of one tile of rows. Pass 0 takes the statistics, each other serves a tile of
  // columns.
  struct Step {
    bool live;
    uint32_t tile, pass, start;
  };
  __aicore__ inline Step After(Step step) const {
    step.start += t_.chunk;
    if (step.start < t_.width) return step;
    step.start = 0;
    if (++step.pass < passes_) return step;
    step.pass = 0;
    step.live = ++step.tile < blocks_.count;
    return step;
  }
  __aicore__ inline uint32_t FirstRow(const Step &step) const {
    return (blocks_.first + step.tile * t_.row_groups) * t_.tile_rows;
  }
  // Rows of fractals of this core, whole ones, and those of them that x has.
  __aicore__ inline uint32_t Share(const Step &step) const {
    return (Least(t_.tile_rows, t_.rows - FirstRow(step)) + 15) / 16 * 8;
  }
  __aicore__ inline uint32_t MyRow(const Step &step) const {
    return FirstRow(step) + static_cast<uint32_t>(GetSubBlockIdx()) * Share(step);
  }
  __aicore__ inline uint32_t Valid(const Step &step) const {
    const uint32_t first = MyRow(step);
    return first < t_.rows ? Least(Share(step), t_.rows - first) : 0;
  }
  // Elements of the chunk in whole blocks of 32 bytes; those behind the row are zero.
  __aicore__ inline uint32_t Width(const Step &step) const {
    return (Least(t_.chunk, t_.width - step.start) + kFractalWidth<T> - 1) / kFractalWidth<T> *
           kFractalWidth<T>;
  }

  __aicore__ inline void Load(const Step &step) {
    if (!step.live) return;
    const uint32_t n = Least(t_.chunk, t_.width - step.start), bytes = n * sizeof(T), width = Width(step);
    if (step.pass > 0 && t_.has_weight) {
      LocalTensor<T> weight = in_weight_.template AllocTensor<T>();
      DataCopyPad(weight, weights_[step.start], DataCopyExtParams{1, bytes, 0, 0, 0},
                  ZerosBehind<T>(width - n));
      in_weight_.EnQue(weight);
    }
    const uint32_t rows = Valid(step);
    if (rows == 0) return;
    LocalTensor<T> x = in_.template AllocTensor<T>();
    const uint32_t behind = static_cast<uint32_t>((t_.width - n) * sizeof(T));
    const uint32_t gap = static_cast<uint32_t>((t_.chunk - width) * sizeof(T) / 32);
    DataCopyPad(x, x_[uint64_t(MyRow(step)) * t_.width + step.start],
                DataCopyExtParams{static_cast<uint16_t>(rows), bytes, behind, gap, 0},
                ZerosBehind<T>(width - n));
    in_.EnQue(x);
  }

  __aicore__ inline void WidenRows(const LocalTensor<float> &to, const LocalTensor<T> &from, uint32_t rows,
                                   uint32_t width) {
    if (width == t_.chunk) return Widen(to, from, rows * width);
    for (uint32_t row = 0; row < rows; ++row) Widen(to[row * t_.chunk], from[row * t_.chunk], width);
  }
  __aicore__ inline void NarrowRows(const LocalTensor<T> &to, const LocalTensor<float> &from, uint32_t rows,
                                    uint32_t width) {
    if (width == t_.chunk) return Narrow(to, from, rows * width);
    for (uint32_t row = 0; row < rows; ++row) Narrow(to[row * t_.chunk], from[row * t_.chunk], width);
  }
  __aicore__ inline LocalTensor<float> WideChunk(uint32_t rows, uint32_t width) {
    LocalTensor<T> x = in_.template DeQue<T>();
    WidenRows(wide_.Get<float>(), x, rows, width);
    in_.FreeTensor(x);
    return wide_.Get<float>();
  }

  // Adds the squares of a chunk; behind the last one, 1 / sqrt(mean + eps) of every row.
  __aicore__ inline void Measure(const Step &step) {
    const uint32_t rows = Valid(step), width = Width(step);
    if (rows == 0) return;
    const LocalTensor<float> wide = WideChunk(rows, width), squares = squares_.Get<float>();
    const uint8_t repeats = static_cast<uint8_t>(rows), line = static_cast<uint8_t>(t_.chunk / 8);
    for (uint32_t start = 0; start < width; start += 64) {
      const BinaryRepeatParams lines(1, 1, 1, line, line, line);
      if (step.start == 0)
        Mul(squares[start], wide[start], wide[start], Least(64, width - start), repeats, lines);
      else
        MulAddDst(squares[start], wide[start], wide[start], Least(64, width - start), repeats, lines);
    }
    PipeBarrier<PIPE_V>();
    if (step.start + t_.chunk < t_.width) return;
    const uint32_t used = step.start == 0 ? width : t_.chunk;
    for (uint32_t start = 64; start < used; start += 64) {
      Add(squares, squares, squares[start], Least(64, used - start), repeats,
          BinaryRepeatParams(1, 1, 1, line, line, line));
      PipeBarrier<PIPE_V>();
    }
    LocalTensor<float> rstd = rstd_.Get<float>();
    const int32_t share = static_cast<int32_t>(Share(step));
    Duplicate(rstd, 1.0f, share);
    PipeBarrier<PIPE_V>();
    WholeReduceSum(rstd, squares, static_cast<int32_t>(Least(64, used)), repeats, 1, 1, line);
    PipeBarrier<PIPE_V>();
    Muls(rstd, rstd, 1.0f / static_cast<float>(t_.width), share);
    PipeBarrier<PIPE_V>();
    Adds(rstd, rstd, t_.eps, share);
    PipeBarrier<PIPE_V>();
    Sqrt(rstd, rstd, share);
    Duplicate(squares, 1.0f, share);
    PipeBarrier<PIPE_V>();
    Div(rstd, squares, rstd, share);
    PipeBarrier<PIPE_V>();
    Brcb(factors_.Get<float>(), rstd, static_cast<uint8_t>(share / 8), BrcbRepeatParams{1, 8});
    PipeBarrier<PIPE_V>();
  }

  // A chunk of normalised rows, into the next slot of L1.
  __aicore__ inline void Send(const Step &step) {
    const uint32_t rows = Valid(step), share = Share(step), width = Width(step);
    LocalTensor<float> weight;
    if (t_.has_weight) {
      LocalTensor<T> narrow = in_weight_.template DeQue<T>();
      weight = weight_.Get<float>();
      Widen(weight, narrow, width);
      in_weight_.FreeTensor(narrow);
      if (t_.weight_offset != 0.0f) {
        Adds(weight, weight, t_.weight_offset, static_cast<int32_t>(width));
        PipeBarrier<PIPE_V>();
      }
    }
    LocalTensor<T> y = out_.template AllocTensor<T>();
    if (rows > 0) Scale(y, weight, rows, width);
    if (rows < share) { // x has no such rows
      Duplicate(y, static_cast<T>(0.0f), static_cast<int32_t>(share * width));
      PipeBarrier<PIPE_V>();
    }
    if (rows > 0) NarrowToFractals(y, rows, share, width);
    out_.EnQue(y);
    y = out_.template DeQue<T>();
    const uint16_t which = static_cast<uint16_t>(sent_ % 2);
    if (sent_ >= 2) AwaitCube<PIPE_MTE3>(kSlotFree + which);
    // columns of fractals, of which this core has one half and the other core the other
    const DataCopyParams columns{static_cast<uint16_t>(width / kFractalWidth<T>),
                                 static_cast<uint16_t>(share), 0, static_cast<uint16_t>(share)};
    DataCopy(SlotOfL1<T>(t_, which)[static_cast<uint32_t>(GetSubBlockIdx()) * share * kFractalWidth<T>], y,
             columns);
    TellCube<PIPE_MTE3>(kSlotFull + which);
    ++sent_;
    out_.FreeTensor(y);
  }
  // The rows of the chunk to columns of fractals: `share` pieces of 32 bytes of a column follow each other.
  __aicore__ inline void NarrowToFractals(const LocalTensor<T> &to, uint32_t rows, uint32_t share,
                                          uint32_t width) {
    const LocalTensor<float> wide = wide_.Get<float>();
    const uint8_t repeats = static_cast<uint8_t>(rows);
    const UnaryRepeatParams steps(static_cast<uint16_t>(share), 1, 1, static_cast<uint8_t>(t_.chunk / 8));
    for (uint32_t start = 0; start < width; start += 64) {
      if constexpr (sizeof(T) == 4)
        Muls(to[start * share], wide[start], 1.0f, Least(64, width - start), repeats, steps);
      else
        Cast(to[start * share], wide[start], RoundMode::CAST_RINT, Least(64, width - start), repeats, steps);
    }
    PipeBarrier<PIPE_V>();
  }
  // wide * rstd * (weight_offset + weight); `scratch` for a chunk of rows.
  __aicore__ inline void Scale(const LocalTensor<T> &scratch, const LocalTensor<float> &weight, uint32_t rows,
                               uint32_t width) {
    const LocalTensor<float> wide = WideChunk(rows, width);
    TimesRows(wide, factors_.Get<float>(), rows, width, t_.chunk);
    PipeBarrier<PIPE_V>();
    if (t_.has_weight) {
      if (t_.cast_first && sizeof(T) == 2) {
        NarrowRows(scratch, wide, rows, width);
        WidenRows(wide, scratch, rows, width);
      }
      const uint8_t line = static_cast<uint8_t>(t_.chunk / 8);
      for (uint32_t start = 0; start < width; start += 64)
        Mul(wide[start], wide[start], weight[start], Least(64, width - start), static_cast<uint8_t>(rows),
            BinaryRepeatParams(1, 1, 1, line, line, 0));
      PipeBarrier<PIPE_V>();
    }
  }

  NormMatmulTiling t_;
  NormMatmulBlocks blocks_{};
  uint32_t passes_ = 1, sent_ = 0;
  TQue<TPosition::VECIN, 2> in_, in_weight_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> wide_, squares_, weight_, rstd_, factors_;
  GlobalTensor<T> x_, weights_;
};

} // namespace atb
