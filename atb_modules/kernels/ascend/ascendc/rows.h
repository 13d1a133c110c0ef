// What the vector kernels share: rows in and out of the unified buffer, and the way to float and back.
#pragma once
#include "kernel_operator.h"

namespace atb {
using namespace AscendC;

// `rows` rows of `width` elements, dense in global memory; in the unified buffer each starts a block of 32
// bytes.
template <typename T>
__aicore__ inline void LoadRows(const LocalTensor<T> &to, const GlobalTensor<T> &from, uint32_t rows,
                                uint32_t width) {
  const uint32_t bytes = width * sizeof(T);
  if (bytes % 32 == 0) {
    DataCopy(to, from, rows * width);
    return;
  }
  const DataCopyExtParams run{static_cast<uint16_t>(rows), bytes, 0, 0, 0};
  DataCopyPad(to, from, run, DataCopyPadExtParams<T>{});
}
// `right` zeros behind each row of a copy, which fill it up to a whole block.
template <typename T> __aicore__ inline DataCopyPadExtParams<T> ZerosBehind(uint32_t right) {
  DataCopyPadExtParams<T> pad; // its value is 0
  pad.isPad = right != 0;
  pad.rightPadding = static_cast<uint8_t>(right);
  return pad;
}
template <typename T>
__aicore__ inline void StoreRows(const GlobalTensor<T> &to, const LocalTensor<T> &from, uint32_t rows,
                                 uint32_t width) {
  const uint32_t bytes = width * sizeof(T);
  if (bytes % 32 == 0) {
    DataCopy(to, from, rows * width);
    return;
  }
  DataCopyPad(to, from, DataCopyExtParams{static_cast<uint16_t>(rows), bytes, 0, 0, 0});
}

// To float and, rounded to nearest, back. The results are visible to the next instruction of the vector pipe.
template <typename T>
__aicore__ inline void Widen(const LocalTensor<float> &to, const LocalTensor<T> &from, uint32_t count) {
  if constexpr (sizeof(T) == 4)
    Muls(to, from, 1.0f, static_cast<int32_t>(count));
  else
    Cast(to, from, RoundMode::CAST_NONE, count);
  PipeBarrier<PIPE_V>();
}
template <typename T>
__aicore__ inline void Narrow(const LocalTensor<T> &to, const LocalTensor<float> &from, uint32_t count) {
  if constexpr (sizeof(T) == 4)
    Muls(to, from, 1.0f, static_cast<int32_t>(count));
  else
    Cast(to, from, RoundMode::CAST_RINT, count);
  PipeBarrier<PIPE_V>();
}

// The scalar unit waits for the vector unit, and the other way round.
__aicore__ inline void WaitForVector(TPipe *pipe) {
  const TEventID id = pipe->FetchEventID(HardEvent::V_S);
  SetFlag<HardEvent::V_S>(id);
  WaitFlag<HardEvent::V_S>(id);
}
__aicore__ inline void VectorWaitsForScalar(TPipe *pipe) {
  const TEventID id = pipe->FetchEventID(HardEvent::S_V);
  SetFlag<HardEvent::S_V>(id);
  WaitFlag<HardEvent::S_V>(id);
}

// The run of rows (or of anything) that belongs to this core.
struct Share {
  uint64_t begin, end;
};
__aicore__ inline Share ShareOf(uint64_t total) {
  const uint64_t cores = GetBlockNum(), me = GetBlockIdx();
  const uint64_t each = total / cores, more = total % cores;
  const uint64_t begin = me * each + (me < more ? me : more);
  return {begin, begin + each + (me < more ? 1 : 0)};
}

__aicore__ inline uint32_t Least(uint64_t a, uint64_t b) {
  return static_cast<uint32_t>(a < b ? a : b);
}

} // namespace atb
