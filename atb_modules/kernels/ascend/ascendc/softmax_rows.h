// What the attention kernels share on the vector unit: rows times factors, and capped scores.
#pragma once
#include "rows.h"

namespace atb {

// rows * factors, where the factor of a row fills a block of 32 bytes; rows are `step` floats apart.
__aicore__ inline void TimesRows(const LocalTensor<float> &rows, const LocalTensor<float> &factors,
                                 uint32_t count, uint32_t width, uint32_t step) {
  const uint8_t blocks = static_cast<uint8_t>(step / 8);
  for (uint32_t start = 0; start < width; start += 64)
    Mul(rows[start], rows[start], factors, Least(64, width - start), static_cast<uint8_t>(count),
        BinaryRepeatParams(1, 1, 0, blocks, blocks, 1));
}

// x = softcap * tanh(x): a continued fraction where |x| < 0.8, where 1 - 2 / (exp(2 x) + 1) would cancel.
__aicore__ inline void Cap(const LocalTensor<float> &x, const LocalTensor<float> &square,
                           const LocalTensor<float> &small, const LocalTensor<float> &large,
                           const LocalTensor<uint8_t> &near, uint32_t count, float softcap) {
  const int32_t n = static_cast<int32_t>(count);
  Mul(square, x, x, n);
  PipeBarrier<PIPE_V>();
  Muls(small, square, 1.0f / 9.0f, n);
  CompareScalar(near, square, 0.64f, CMPMODE::LT, count);
  PipeBarrier<PIPE_V>();
  Adds(small, small, 7.0f, n);
  PipeBarrier<PIPE_V>();
  for (float term = 5.0f; term > 0.0f; term -= 2.0f) {
    Div(small, square, small, n);
    PipeBarrier<PIPE_V>();
    Adds(small, small, term, n);
    PipeBarrier<PIPE_V>();
  }
  Div(small, x, small, n);
  Mins(large, x, 40.0f, n);
  Duplicate(square, 2.0f, n);
  PipeBarrier<PIPE_V>();
  Muls(large, large, 2.0f, n);
  PipeBarrier<PIPE_V>();
  Exp(large, large, n);
  PipeBarrier<PIPE_V>();
  Adds(large, large, 1.0f, n);
  PipeBarrier<PIPE_V>();
  Div(large, square, large, n);
  PipeBarrier<PIPE_V>();
  Muls(large, large, -1.0f, n);
  PipeBarrier<PIPE_V>();
  Adds(large, large, 1.0f, n);
  PipeBarrier<PIPE_V>();
  Select(x, near, small, large, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
  PipeBarrier<PIPE_V>();
  Muls(x, x, softcap, n);
  PipeBarrier<PIPE_V>();
}

} // namespace atb
