// What dav-3510 (950) adds: the way from the unified buffer to the L1 of the cube core, and fractals loaded
// by the rectangle.
#pragma once
#include "cube.h"

namespace AscendC {

// Rows of the unified buffer to fractals of L1: the two vector cores of a block write the L1 of its cube
// core, on the pipe MTE3. (DataCopy with Nd2NzParams between local tensors; on dav-2201 it would go through
// global memory.)
template <typename T>
inline void DataCopy(const LocalTensor<T> &to, const LocalTensor<T> &from, const Nd2NzParams &p) {
  using namespace emulation;
  auto &core = Self();
  Require(core.launch.limits.ReachesL1(), "this SoC has no way from the unified buffer to L1");
  Require(core.cube != nullptr,
          "DataCopy from the unified buffer to L1 runs on a vector core beside a cube core");
  Require(from.place() == UB, "DataCopy to fractals of L1 reads the unified buffer");
  Require(p.srcDValue * sizeof(T) % 32 == 0, "DataCopy to fractals: rows of the unified buffer start blocks");
  RequireOperand(from, 0, "DataCopy to fractals");
  core.Begin(MTE3, "DataCopy");
  CopyToFractals(to, p, [&](size_t at) {
    RequireOperand(from, static_cast<int64_t>(at + p.dValue), "DataCopy to fractals");
    core.Read(UB, from.offset() + at * sizeof(T), p.dValue * sizeof(T));
    return static_cast<const T *>(from.Raw() + at);
  });
}

// A rectangle of fractals: starts and steps in fractals (16 rows down, 32 bytes across); strides in fractals
// from one column of fractals to the next.
struct LoadData2DParamsV2 {
  uint32_t mStartPosition = 0, kStartPosition = 0;
  uint16_t mStep = 0, kStep = 0;
  int32_t srcStride = 0;
  uint16_t dstStride = 0;
  bool ifTranspose = false;
  uint8_t sid = 0;
};
template <typename T>
inline void LoadData(const LocalTensor<T> &to, const LocalTensor<T> &from, const LoadData2DParamsV2 &p) {
  using namespace emulation;
  RequireCube("LoadData");
  auto &core = Self();
  Require(core.launch.limits.arch == 3510, "LoadData2DParamsV2 is known to dav-3510 alone");
  Require(from.place() == L1 && (to.place() == L0A || to.place() == L0B),
          "LoadData moves from L1 to L0A or L0B");
  Require(!p.ifTranspose, "the emulated LoadData of rectangles does not transpose");
  Require(p.mStep > 0 && p.kStep > 0, "LoadData: mStep and kStep are not 0");
  Require(p.srcStride >= p.mStep && p.dstStride >= p.mStep,
          "LoadData: a stride is smaller than the fractals of a column");
  core.Begin(MTE1, "LoadData");
  constexpr size_t elements = kFractal / sizeof(T);
  RequireOperand(to, 0, "LoadData", kFractal);
  for (size_t k = 0; k < p.kStep; ++k) {
    const size_t source = ((p.kStartPosition + k) * static_cast<size_t>(p.srcStride) + p.mStartPosition) *
                          elements,
                 target = k * p.dstStride * elements, n = p.mStep * elements;
    RequireOperand(from, static_cast<int64_t>(source + n), "LoadData");
    RequireOperand(to, static_cast<int64_t>(target + n), "LoadData", kFractal);
    core.Read(L1, from.offset() + source * sizeof(T), n * sizeof(T));
    core.Write(to.place(), to.offset() + target * sizeof(T), n * sizeof(T));
    std::copy(from.Raw() + source, from.Raw() + source + n, to.Raw() + target);
  }
  core.Note(to.place(), to.offset(), size_t{p.mStep} * p.kStep * kFractal);
}

} // namespace AscendC
