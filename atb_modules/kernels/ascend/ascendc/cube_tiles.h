// What the kernels with a cube side share: rows of global memory to fractals in L1, fractals to L0A and L0B,
// the product into L0C, and rows back to global memory. For dav-2201 and dav-3510, which differ in the order
// of fractals in L0A.
#pragma once
#include "kernel_operator.h"

namespace atb {
using namespace AscendC;

template <typename T> constexpr uint32_t kFractalWidth = 32 / sizeof(T);
template <typename T> constexpr uint32_t kFractalSize = 16 * kFractalWidth<T>;

__aicore__ inline uint32_t Fractals(uint32_t lines) {
  return (lines + 15) / 16;
}

// (lines, width) with rows `step` apart; columns of fractals of `padded` lines, a multiple of 16, of which
// the missing ones are zero.
template <typename T>
__aicore__ inline void LoadFractals(const LocalTensor<T> &to, const GlobalTensor<T> &from, uint32_t lines,
                                    uint32_t width, uint32_t step, uint32_t padded) {
  const uint32_t blocks = (width + kFractalWidth<T> - 1) / kFractalWidth<T>;
  if (padded != lines) {
    const uint16_t all = static_cast<uint16_t>(blocks * padded);
#if __NPU_ARCH__ == 3510
    Fill(to, InitConstValueParams<T>(1, all, 0, static_cast<T>(0.0f)));
#else
    InitConstValue(to, InitConstValueParams<T>(1, all, 0, static_cast<T>(0.0f)));
#endif
    PipeBarrier<PIPE_MTE2>();
  }
  Nd2NzParams copy;
  copy.ndNum = 1;
  copy.nValue = static_cast<uint16_t>(lines);
  copy.dValue = static_cast<uint16_t>(width);
  copy.srcNdMatrixStride = 0;
  copy.srcDValue = static_cast<uint16_t>(step);
  copy.dstNzC0Stride = static_cast<uint16_t>(padded);
  copy.dstNzNStride = 1;
  copy.dstNzMatrixStride = 0;
  DataCopy(to, from, copy);
}

template <typename T>
__aicore__ inline void LoadFractals(const LocalTensor<T> &to, const GlobalTensor<T> &from, uint32_t lines,
                                    uint32_t width, uint32_t step) {
  LoadFractals(to, from, lines, width, step, Fractals(lines) * 16);
}

// The k columns from `at` on of all lines, for the left operand: rows of fractals on dav-2201, columns of
// them on dav-3510.
template <typename T>
__aicore__ inline void LoadLeft(const LocalTensor<T> &to, const LocalTensor<T> &from, uint32_t lines,
                                uint32_t at, uint32_t k) {
  const uint32_t rows = Fractals(lines), columns = (k + kFractalWidth<T> - 1) / kFractalWidth<T>;
#if __NPU_ARCH__ == 3510
  LoadData2DParamsV2 load;
  load.kStartPosition = at / kFractalWidth<T>;
  load.mStep = static_cast<uint16_t>(rows);
  load.kStep = static_cast<uint16_t>(columns);
  load.srcStride = static_cast<int32_t>(rows);
  load.dstStride = static_cast<uint16_t>(rows);
  LoadData(to, from, load);
#else
  LoadData2DParams load;
  load.repeatTimes = static_cast<uint8_t>(columns);
  load.srcStride = static_cast<uint16_t>(rows);
  for (uint32_t row = 0; row < rows; ++row)
    LoadData(to[row * columns * kFractalSize<T>],
             from[(at / kFractalWidth<T> * rows + row) * kFractalSize<T>], load);
#endif
}
// The same for the right operand, whose lines are the columns of the product.
template <typename T>
__aicore__ inline void LoadRight(const LocalTensor<T> &to, const LocalTensor<T> &from, uint32_t lines,
                                 uint32_t at, uint32_t k) {
  const uint32_t rows = Fractals(lines), columns = (k + kFractalWidth<T> - 1) / kFractalWidth<T>;
  LoadData2DParams load;
  load.repeatTimes = static_cast<uint8_t>(rows * columns);
  load.srcStride = 1;
  LoadData(to, from[at / kFractalWidth<T> * rows * kFractalSize<T>], load);
}

// k columns from the first on, of `count` lines of `lines` from `first` on.
template <typename T>
__aicore__ inline void LoadRightLines(const LocalTensor<T> &to, const LocalTensor<T> &from, uint32_t lines,
                                      uint32_t first, uint32_t count, uint32_t k) {
  const uint32_t rows = Fractals(lines), columns = (k + kFractalWidth<T> - 1) / kFractalWidth<T>;
  LoadData2DParams load;
  load.repeatTimes = static_cast<uint8_t>(Fractals(count));
  load.srcStride = 1;
  for (uint32_t column = 0; column < columns; ++column)
    LoadData(to[column * Fractals(count) * kFractalSize<T>],
             from[(column * rows + first / 16) * kFractalSize<T>], load);
}
// Columns `at` to `at + width` of all lines (a multiple of 16), transposed: the lines are what the product
// sums over. For elements of 16 bits.
template <typename T>
__aicore__ inline void LoadRightTransposed(const LocalTensor<T> &to, const LocalTensor<T> &from,
                                           uint32_t lines, uint32_t at, uint32_t width) {
  const uint32_t rows = Fractals(lines), columns = Fractals(width);
  LoadData2DParams load;
  load.repeatTimes = static_cast<uint8_t>(columns);
  load.srcStride = static_cast<uint16_t>(rows);
  load.ifTranspose = true;
  for (uint32_t row = 0; row < rows; ++row)
    LoadData(to[row * columns * kFractalSize<T>], from[(at / 16 * rows + row) * kFractalSize<T>], load);
}

// The operands should hold no NaN: "it may cause an execution error".
template <typename T>
__aicore__ inline void Multiply(const LocalTensor<float> &sums, const LocalTensor<T> &left,
                                const LocalTensor<T> &right, uint32_t rows, uint32_t columns, uint32_t k,
                                bool first) {
  MmadParams product;
  product.m = static_cast<uint16_t>(Fractals(rows) * 16);
  product.n = static_cast<uint16_t>(Fractals(columns) * 16);
  product.k = static_cast<uint16_t>(k);
  product.cmatrixInitVal = first;
  Mmad(sums, left, right, product);
  if (Fractals(rows) * Fractals(columns) < 10) PipeBarrier<PIPE_M>(); // small products follow too closely
}

template <typename T>
__aicore__ inline void StoreSums(const GlobalTensor<T> &to, const LocalTensor<float> &sums, uint32_t rows,
                                 uint32_t columns, uint32_t step) {
  FixpipeParamsV220 store;
  store.nSize = static_cast<uint16_t>(columns);
  store.mSize = static_cast<uint16_t>(rows);
  store.srcStride = static_cast<uint16_t>(Fractals(rows) * 16);
  store.dstStride = step;
  if constexpr (std::is_same_v<T, half>)
    store.quantPre = QuantMode_t::F322F16;
  else if constexpr (std::is_same_v<T, bfloat16_t>)
    store.quantPre = QuantMode_t::F322BF16;
  Fixpipe<T, float, CFG_ROW_MAJOR>(to, sums, store);
}

} // namespace atb
