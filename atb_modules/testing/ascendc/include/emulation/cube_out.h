// Fixpipe: results leave L0C for global memory, converted and row by row.
#pragma once
#include "cube.h"

namespace AscendC {

enum class CO2Layout : uint8_t { NZ = 0, ROW_MAJOR };
struct FixpipeConfig {
  CO2Layout format;
};
constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ};
constexpr FixpipeConfig CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR};
enum class QuantMode_t { NoQuant, F322F16, F322BF16 };
} // namespace AscendC
using AscendC::QuantMode_t;
constexpr QuantMode_t NoQuant = QuantMode_t::NoQuant, F322F16 = QuantMode_t::F322F16,
                      F322BF16 = QuantMode_t::F322BF16;

namespace AscendC {

// srcStride: rows of a column of fractals in L0C, in units of 16 results; dstStride: elements of a row of the
// target.
struct FixpipeParamsV220 {
  uint16_t nSize = 0, mSize = 0, srcStride = 0;
  uint32_t dstStride = 0;
  QuantMode_t quantPre = QuantMode_t::NoQuant;
  uint64_t deqScalar = 0;
  uint16_t ndNum = 1, srcNdStride = 0, dstNdStride = 0;
  bool reluEn = false;
  uint8_t unitFlag = 0;
  bool isChannelSplit = false;
  FixpipeParamsV220() = default;
  FixpipeParamsV220(uint16_t n, uint16_t m, uint16_t src, uint32_t dst, bool relu)
      : nSize(n), mSize(m), srcStride(src), dstStride(dst), reluEn(relu) {}
};

template <typename T, typename U, const FixpipeConfig &config = CFG_ROW_MAJOR>
inline void Fixpipe(const GlobalTensor<T> &to, const LocalTensor<U> &from, const FixpipeParamsV220 &p) {
  using namespace emulation;
  static_assert(std::is_same_v<U, float>, "the emulated Fixpipe reads float");
  static_assert(config.format == CO2Layout::ROW_MAJOR, "the emulated Fixpipe writes rows (CFG_ROW_MAJOR)");
  constexpr QuantMode_t wanted = std::is_same_v<T, half> ? QuantMode_t::F322F16
                                 : kIsBf16<T>            ? QuantMode_t::F322BF16
                                                         : QuantMode_t::NoQuant;
  RequireCube("Fixpipe");
  RequireType<T>();
  Require(from.place() == L0C, "Fixpipe reads L0C");
  Require(p.quantPre == wanted,
          "Fixpipe: quantPre does not fit the type (half F322F16, bfloat16_t F322BF16, float NoQuant)");
  Require(p.ndNum == 1 && !p.isChannelSplit, "the emulated Fixpipe writes one matrix without channel split");
  Require(p.nSize > 0 && p.mSize > 0 && p.dstStride >= p.nSize, "Fixpipe: dstStride is smaller than a row");
  Require(p.nSize <= 4095 && p.mSize <= 8192, "Fixpipe to rows: nSize is at most 4095, mSize at most 8192");
  Require(p.srcStride >= p.mSize && p.srcStride % 16 == 0,
          "Fixpipe: srcStride is the rows of L0C, a multiple of 16");
  auto &core = Self();
  core.Begin(FIX, "Fixpipe");
  RequireOperand(from, 0, "Fixpipe", 64);
  const size_t columns = (p.nSize + 15u) / 16;
  RequireOperand(from, static_cast<int64_t>(((columns - 1) * p.srcStride + p.mSize) * 16), "Fixpipe", 64);
  for (size_t j = 0; j < columns; ++j) core.Read(L0C, from.offset() + j * p.srcStride * 64, p.mSize * 64ul);
  std::vector<T> row(p.nSize);
  for (size_t i = 0; i < p.mSize; ++i) {
    for (size_t j = 0; j < p.nSize; ++j) {
      float value = from.Raw()[(j / 16 * p.srcStride + i) * 16 + j % 16];
      if (p.reluEn && value < 0.0f) value = 0.0f;
      row[j] = static_cast<T>(value);
    }
    const auto target = to[i * p.dstStride];
    target.Check(p.nSize);
    core.WriteGlobal(target.Raw(), p.nSize * sizeof(T), !core.atomic.empty(), target.region());
    Store(target.Raw(), row.data(), row.size(), core.atomic);
  }
  core.Note(L0C, from.offset(), size_t{p.mSize} * p.nSize * sizeof(T));
}

} // namespace AscendC
