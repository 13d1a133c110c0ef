// The cube side of dav-2201 and dav-3510: global memory to L1 in fractals, L1 to L0A and L0B, and the product
// into L0C.
//
// A fractal is 16 rows of 32 bytes (512 bytes); in L0C it is 16 x 16 results. Orders, outer and inner: L1 is
// nZ as it is copied (columns of fractals, rows inside), L0B zN, L0C nZ; L0A is zZ on dav-2201 and nZ, as L1,
// on dav-3510.
#pragma once
#include <algorithm>

#include "copy.h"

namespace AscendC {

// A row-major matrix of nValue x dValue to fractals, columns of them first.
struct Nd2NzParams {
  uint16_t ndNum = 1, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0, dstNzC0Stride = 0,
           dstNzNStride = 1, dstNzMatrixStride = 0;
};
struct LoadData2DParams {
  uint16_t startIndex = 0;
  uint8_t repeatTimes = 1;
  uint16_t srcStride = 1;
  uint8_t sid = 0;
  uint16_t dstGap = 0;
  bool ifTranspose = false;
  uint8_t addrMode = 0;
};
struct MmadParams {
  uint16_t m = 0, n = 0, k = 0;
  uint8_t unitFlag = 0;
  bool cmatrixSource = false, cmatrixInitVal = true;
};

namespace emulation {

inline void RequireCube(const char *op) {
  Require(Self().launch.limits.Apart(), "the cube side of this SoC is not modelled");
  if (Self().type != CoreType::Cube) Fail(std::string(op) + " runs on a cube core");
}
constexpr size_t kFractal = 512;

} // namespace emulation

// From global memory to fractals of L1.
template <typename T>
inline void DataCopy(const LocalTensor<T> &to, const GlobalTensor<T> &from, const Nd2NzParams &p) {
  using namespace emulation;
  constexpr size_t c0 = kPerBlock<T>;
  RequireCube("DataCopy to fractals");
  RequireType<T>();
  Require(to.place() == L1, "DataCopy to fractals writes L1");
  Require(p.ndNum > 0 && p.ndNum <= 4095, "DataCopy to fractals: ndNum is at most 4095 (0 copies nothing)");
  Require(p.nValue > 0 && p.dValue > 0 && p.nValue <= 16384,
          "DataCopy to fractals: nValue is 1 to 16384, dValue not 0");
  Require(p.srcDValue >= p.dValue,
          "DataCopy to fractals: srcDValue is the row length of the source, at least dValue");
  Require(p.dstNzC0Stride >= 1 && p.dstNzC0Stride <= 16384 && p.dstNzNStride >= 1 && p.dstNzNStride <= 16384,
          "DataCopy to fractals: dstNzC0Stride and dstNzNStride are 1 to 16384");
  Require(p.dstNzC0Stride >= p.nValue * p.dstNzNStride || p.dValue <= c0,
          "DataCopy to fractals: dstNzC0Stride is smaller than the rows of a column");
  auto &core = Self();
  core.Begin(MTE2, "DataCopy");
  const size_t columns = (p.dValue + c0 - 1) / c0;
  for (size_t matrix = 0; matrix < p.ndNum; ++matrix)
    for (size_t row = 0; row < p.nValue; ++row) {
      const auto source = from[matrix * p.srcNdMatrixStride + row * p.srcDValue];
      source.Check(p.dValue);
      core.ReadGlobal(source.Raw(), p.dValue * sizeof(T), source.region());
      for (size_t column = 0; column < columns; ++column) {
        const size_t at =
            matrix * p.dstNzMatrixStride + column * p.dstNzC0Stride * c0 + row * p.dstNzNStride * c0;
        const size_t n = std::min<size_t>(c0, p.dValue - column * c0);
        RequireOperand(to, static_cast<int64_t>(at + c0), "DataCopy to fractals");
        core.Write(to.place(), to.offset() + at * sizeof(T), 32);
        std::copy(source.Raw() + column * c0, source.Raw() + column * c0 + n, to.Raw() + at);
        std::fill(to.Raw() + at + n, to.Raw() + at + c0, T{}); // the rest of a row of a fractal becomes 0
      }
    }
  core.Note(L1, to.offset(), size_t{p.ndNum} * p.nValue * p.dValue * sizeof(T));
}

// Zeros for rows of fractals that no copy fills.
template <typename T> struct InitConstValueParams {
  uint16_t repeatTimes = 0, blockNum = 0, dstGap = 0;
  T initValue{};
  InitConstValueParams() = default;
  InitConstValueParams(uint16_t repeats, uint16_t blocks, uint16_t gap, T value)
      : repeatTimes(repeats), blockNum(blocks), dstGap(gap), initValue(value) {}
};
template <typename T> inline void Fill(const LocalTensor<T> &to, const InitConstValueParams<T> &p) {
  using namespace emulation;
  RequireCube("Fill");
  Require(to.place() == L1 || Self().launch.limits.arch == 2201, "dav-3510 fills L1, not L0A or L0B");
  Require(p.repeatTimes <= 32767 && p.blockNum <= 32767 && p.dstGap <= 32767,
          "Fill: repeatTimes, blockNum and dstGap are at most 32767");
  const size_t unit = to.place() == L1 ? 32 : kFractal;
  auto &core = Self();
  core.Begin(to.place() == L1 ? MTE2 : MTE1, "Fill");
  for (size_t r = 0; r < p.repeatTimes; ++r) {
    const size_t at = r * (p.blockNum + p.dstGap) * unit, bytes = p.blockNum * unit;
    RequireOperand(to, static_cast<int64_t>((at + bytes) / sizeof(T)), "Fill");
    core.Write(to.place(), to.offset() + at, bytes);
    std::fill_n(to.Raw() + at / sizeof(T), bytes / sizeof(T), p.initValue);
  }
  core.Note(to.place(), to.offset(), p.repeatTimes * p.blockNum * unit);
}
// The name of Fill until CANN 8.5.
template <typename T> inline void InitConstValue(const LocalTensor<T> &to, const InitConstValueParams<T> &p) {
  Fill(to, p);
}

// repeatTimes fractals, srcStride apart in L1 and dstGap free fractals between them in L0; each may be
// transposed.
template <typename T>
inline void LoadData(const LocalTensor<T> &to, const LocalTensor<T> &from, const LoadData2DParams &p) {
  using namespace emulation;
  RequireCube("LoadData");
  Require(from.place() == L1 && (to.place() == L0A || to.place() == L0B),
          "LoadData moves from L1 to L0A or L0B");
  // Mmad reads L0A of dav-3510 by columns of fractals ("Nz"), of dav-2201 by rows of them ("Zz").
  Require(to.place() == L0B || Self().launch.limits.arch == 2201,
          "L0A of dav-3510 holds columns of fractals: the emulation fills it by LoadData2DParamsV2 alone");
  Require(p.dstGap == 0 || Self().launch.limits.arch == 2201, "LoadData: dstGap has no effect on dav-3510");
  Require(!p.ifTranspose || sizeof(T) == 2, "LoadData transposes fractals of 16-bit elements alone");
  auto &core = Self();
  core.Begin(MTE1, "LoadData");
  constexpr size_t elements = kFractal / sizeof(T);
  RequireOperand(to, 0, "LoadData", kFractal);
  for (size_t i = 0; i < p.repeatTimes; ++i) {
    const size_t source = (p.startIndex + i * p.srcStride) * elements,
                 target = i * (p.dstGap + 1u) * elements;
    RequireOperand(from, static_cast<int64_t>(source + elements), "LoadData");
    RequireOperand(to, static_cast<int64_t>(target + elements), "LoadData", kFractal);
    core.Read(from.place(), from.offset() + source * sizeof(T), kFractal);
    core.Write(to.place(), to.offset() + target * sizeof(T), kFractal);
    const T *a = from.Raw() + source;
    T *b = to.Raw() + target;
    for (size_t r = 0; r < 16; ++r)
      for (size_t c = 0; c < elements / 16; ++c)
        if (p.ifTranspose)
          b[c * 16 + r] = a[r * 16 + c];
        else
          b[r * (elements / 16) + c] = a[r * (elements / 16) + c];
  }
  core.Note(to.place(), to.offset(), p.repeatTimes * kFractal);
}

// L0C (m x n, float) = or += L0A (m x k) L0B (k x n). All three are stored in whole fractals.
template <typename T>
inline void Mmad(const LocalTensor<float> &c, const LocalTensor<T> &a, const LocalTensor<T> &b,
                 const MmadParams &p) {
  using namespace emulation;
  static_assert(std::is_same_v<T, half> || kIsBf16<T> || std::is_same_v<T, float>,
                "the emulated Mmad takes half, bfloat16_t or float");
  RequireCube("Mmad");
  RequireType<T>();
  Require(a.place() == L0A && b.place() == L0B && c.place() == L0C, "Mmad reads L0A and L0B and writes L0C");
  Require(p.m > 1, "Mmad with m of 1 reads L0A as a vector; the emulation takes m of 2 and more: give 16");
  Require(p.n > 0 && p.k > 0 && p.m <= 4095 && p.n <= 4095 && p.k <= 4095, "Mmad: m, n and k are 1 to 4095");
  constexpr size_t c0 = kPerBlock<T>, elements = kFractal / sizeof(T);
  const size_t mf = (p.m + 15) / 16, nf = (p.n + 15) / 16, kf = (p.k + c0 - 1) / c0;
  auto &core = Self();
  core.Begin(M, "Mmad");
  RequireOperand(a, static_cast<int64_t>(mf * kf * elements), "Mmad", kFractal);
  RequireOperand(b, static_cast<int64_t>(kf * nf * elements), "Mmad", kFractal);
  RequireOperand(c, static_cast<int64_t>(mf * nf * 256), "Mmad", 1024);
  core.Read(L0A, a.offset(), mf * kf * kFractal);
  core.Read(L0B, b.offset(), kf * nf * kFractal);
  // small products follow each other too closely: the documentation asks for PipeBarrier<PIPE_M> below ten
  // fractals
  const bool in_order = mf * nf >= 10;
  const bool fresh = p.cmatrixInitVal && !p.cmatrixSource;
  if (!fresh) core.Read(L0C, c.offset(), mf * nf * 1024, in_order);
  core.Write(L0C, c.offset(), mf * nf * 1024, in_order || fresh);
  core.Note(L0C, c.offset(), mf * nf * 1024);
  const T *A = a.Raw(), *B = b.Raw();
  const bool columns_first = core.launch.limits.arch == 3510; // L0A
  std::vector<float> left(16 * kf * c0), right(16 * kf * c0);
  for (size_t fi = 0; fi < mf; ++fi) {
    for (size_t k = 0; k < kf * c0; ++k)
      for (size_t i = 0; i < 16; ++i)
        left[i * kf * c0 + k] =
            ToFloat(A[(columns_first ? k / c0 * mf + fi : fi * kf + k / c0) * elements + i * c0 + k % c0]);
    for (size_t fj = 0; fj < nf; ++fj) {
      for (size_t k = 0; k < kf * c0; ++k)
        for (size_t j = 0; j < 16; ++j)
          right[k * 16 + j] = ToFloat(B[(k / c0 * nf + fj) * elements + j * c0 + k % c0]);
      for (size_t i = 0; i < 16; ++i) {
        float *out = c.Raw() + (fj * mf + fi) * 256 + i * 16;
        float sums[16];
        for (size_t j = 0; j < 16; ++j) sums[j] = fresh ? 0.0f : out[j];
        for (size_t start = 0; start < p.k; start += c0) { // a fractal is summed before it joins the rest
          float part[16] = {};
          for (size_t k = start; k < std::min<size_t>(start + c0, p.k); ++k)
            for (size_t j = 0; j < 16; ++j) part[j] += left[i * kf * c0 + k] * right[k * 16 + j];
          for (size_t j = 0; j < 16; ++j) sums[j] += part[j];
        }
        std::copy(sums, sums + 16, out);
      }
    }
  }
}

} // namespace AscendC
