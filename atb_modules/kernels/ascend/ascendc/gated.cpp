// Gated activation (SwiGLU, GeGLU): out = gate / (1 + exp(-z(gate))) * up over (rows, width), in float,
// rounded once.
//
// z(x) is x for SiLU, 2 sqrt(2 / pi) (x + 0.044715 x^3) for GELU with tanh, 1.702 x for quick GELU.
#include "tiling/gated.h"
#include "rows.h"

namespace {
using namespace AscendC;

template <typename T> class Gated {
public:
  __aicore__ inline Gated(TPipe *pipe, const GatedTiling &tiling) : t_(tiling) {
    const uint32_t elements = t_.tile_rows * t_.step;
    pipe->InitBuffer(in_gate_, 2, elements * sizeof(T));
    pipe->InitBuffer(in_up_, 2, elements * sizeof(T));
    pipe->InitBuffer(out_, 2, elements * sizeof(T));
    pipe->InitBuffer(gate_floats_, elements * sizeof(float));
    pipe->InitBuffer(up_floats_, elements * sizeof(float));
    pipe->InitBuffer(z_, elements * sizeof(float));
  }

  __aicore__ inline void Process(GM_ADDR gate, GM_ADDR up, GM_ADDR out) {
    gate_.SetGlobalBuffer((__gm__ T *)gate, uint64_t(t_.rows - 1) * t_.gate_step + t_.width);
    up_.SetGlobalBuffer((__gm__ T *)up, uint64_t(t_.rows - 1) * t_.up_step + t_.width);
    result_.SetGlobalBuffer((__gm__ T *)out, uint64_t(t_.rows) * t_.width);
    pieces_ = (t_.width + t_.piece - 1) / t_.piece;
    const uint64_t tiles = uint64_t((t_.rows + t_.tile_rows - 1) / t_.tile_rows) * pieces_;
    const atb::Share share = atb::ShareOf(tiles);
    if (share.begin < share.end) Load(share.begin);
    for (uint64_t tile = share.begin; tile < share.end; ++tile) {
      if (tile + 1 < share.end) Load(tile + 1);
      Compute(tile);
    }
  }

private:
  struct Place {
    uint64_t row;
    uint32_t column, rows, count;
  };
  __aicore__ inline Place PlaceOf(uint64_t tile) const {
    const uint64_t row = tile / pieces_ * t_.tile_rows;
    const uint32_t column = static_cast<uint32_t>(tile % pieces_) * t_.piece;
    return {row, column, atb::Least(t_.tile_rows, t_.rows - row), atb::Least(t_.piece, t_.width - column)};
  }
  __aicore__ inline void LoadInto(TQue<TPosition::VECIN, 2> &queue, const GlobalTensor<T> &from,
                                  const Place &at, uint32_t step) {
    LocalTensor<T> to = queue.template AllocTensor<T>();
    const uint32_t bytes = at.count * sizeof(T);
    if (at.rows == 1) {
      atb::LoadRows(to, from, 1, at.count);
    } else { // what fills up a row to whole blocks is 0, so that the tile is computed at once
      const DataCopyExtParams run{static_cast<uint16_t>(at.rows), bytes,
                                  uint32_t((step - at.count) * sizeof(T)), 0, 0};
      DataCopyPad(to, from, run, atb::ZerosBehind<T>(t_.step - at.count));
    }
    queue.EnQue(to);
  }
  __aicore__ inline void Load(uint64_t tile) {
    const Place at = PlaceOf(tile);
    LoadInto(in_gate_, gate_[at.row * t_.gate_step + at.column], at, t_.gate_step);
    LoadInto(in_up_, up_[at.row * t_.up_step + at.column], at, t_.up_step);
  }

  // z = -z(gate)
  __aicore__ inline void Exponent(const LocalTensor<float> &z, const LocalTensor<float> &gate, int32_t n) {
    if (t_.kind == ATB_GELU_TANH) {
      Mul(z, gate, gate, n);
      PipeBarrier<PIPE_V>();
      Muls(z, z, -1.5957691216057308f * 0.044715f, n);
      PipeBarrier<PIPE_V>();
      Adds(z, z, -1.5957691216057308f, n);
      PipeBarrier<PIPE_V>();
      Mul(z, z, gate, n);
    } else {
      Muls(z, gate, t_.kind == ATB_QUICK_GELU ? -1.702f : -1.0f, n);
    }
    PipeBarrier<PIPE_V>();
  }
  __aicore__ inline void Compute(uint64_t tile) {
    const Place at = PlaceOf(tile);
    const int32_t n = static_cast<int32_t>(at.rows == 1 ? at.count : at.rows * t_.step);
    LocalTensor<float> gate = gate_floats_.Get<float>(), up = up_floats_.Get<float>(), z = z_.Get<float>();
    LocalTensor<T> narrow = in_gate_.template DeQue<T>();
    atb::Widen(gate, narrow, n);
    in_gate_.FreeTensor(narrow);
    narrow = in_up_.template DeQue<T>();
    atb::Widen(up, narrow, n);
    in_up_.FreeTensor(narrow);
    Exponent(z, gate, n);
    Exp(z, z, n);
    PipeBarrier<PIPE_V>();
    Adds(z, z, 1.0f, n);
    PipeBarrier<PIPE_V>();
    Div(gate, gate, z, n);
    PipeBarrier<PIPE_V>();
    Mul(gate, gate, up, n);
    PipeBarrier<PIPE_V>();
    LocalTensor<T> result = out_.template AllocTensor<T>();
    atb::Narrow(result, gate, n);
    out_.EnQue(result);
    result = out_.template DeQue<T>();
    const GlobalTensor<T> to = result_[at.row * t_.width + at.column];
    if (at.rows == 1)
      atb::StoreRows(to, result, 1, at.count);
    else
      DataCopyPad(to, result, DataCopyExtParams{uint16_t(at.rows), uint32_t(at.count * sizeof(T)), 0, 0, 0});
    out_.FreeTensor(result);
  }

  GatedTiling t_;
  uint32_t pieces_ = 1;
  TQue<TPosition::VECIN, 2> in_gate_, in_up_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> gate_floats_, up_floats_, z_;
  GlobalTensor<T> gate_, up_, result_;
};

template <typename T>
__aicore__ inline void Run(GM_ADDR gate, GM_ADDR up, GM_ADDR out, const GatedTiling &tiling) {
  TPipe pipe;
  Gated<T> kernel(&pipe, tiling);
  kernel.Process(gate, up, out);
}
} // namespace

extern "C" __global__ __aicore__ void atb_gated_half(GM_ADDR gate, GM_ADDR up, GM_ADDR out,
                                                     GatedTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<half>(gate, up, out, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_gated_bfloat16(GM_ADDR gate, GM_ADDR up, GM_ADDR out,
                                                         GatedTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<bfloat16_t>(gate, up, out, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_gated_float(GM_ADDR gate, GM_ADDR up, GM_ADDR out,
                                                      GatedTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<float>(gate, up, out, tiling);
}
