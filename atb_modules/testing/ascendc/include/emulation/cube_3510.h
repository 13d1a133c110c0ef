// What dav-3510 (950) adds: the way from the unified buffer to the L1 of the cube core, and fractals loaded
// by the rectangle.
#pragma once
#include "cube.h"

namespace AscendC {

#ifdef ENABLE_CV_COMM_VIA_SSBUF
constexpr bool kStraightToL1 = ENABLE_CV_COMM_VIA_SSBUF;
#else
constexpr bool kStraightToL1 = false;
#endif

// Runs of blocks of 32 bytes from the unified buffer to L1: the two vector cores of a block write the L1 of
// its cube core, on the pipe MTE3. Only where ENABLE_CV_COMM_VIA_SSBUF is true "the data goes through the
// hardware channel from UB to L1"; else, as on dav-2201, through global memory and by Matmul's high-level
// API.
template <typename T>
inline void DataCopy(const LocalTensor<T> &to, const LocalTensor<T> &from, const DataCopyParams &p) {
  using namespace emulation;
  auto &core = Self();
  RequireType<T>();
  Require(to.place() == L1 && from.place() == UB,
          "the emulated DataCopy of runs between local tensors goes from the unified buffer to L1");
  Require(core.launch.limits.ReachesL1(), "this SoC has no way from the unified buffer to L1");
  Require(kStraightToL1, "the way from the unified buffer to L1 is there where the kernel is compiled with "
                         "-DENABLE_CV_COMM_VIA_SSBUF=true");
  Require(core.cube != nullptr,
          "DataCopy from the unified buffer to L1 runs on a vector core beside a cube core");
  RequireRuns(p.blockCount, p.blockLen, 65535);
  Require(p.blockLen != 0, "DataCopy of no bytes");
  core.Begin(MTE3, "DataCopy");
  const size_t bytes = p.blockLen * 32ul, read = bytes + p.srcStride * 32ul,
               written = bytes + p.dstStride * 32ul, last = p.blockCount - 1u;
  RequireOperand(from, static_cast<int64_t>((last * read + bytes) / sizeof(T)), "DataCopy");
  RequireOperand(to, static_cast<int64_t>((last * written + bytes) / sizeof(T)), "DataCopy");
  for (size_t run = 0; run < p.blockCount; ++run) {
    core.Read(UB, from.offset() + run * read, bytes);
    core.Write(L1, to.offset() + run * written, bytes);
    std::memcpy(reinterpret_cast<uint8_t *>(to.Raw()) + run * written,
                reinterpret_cast<const uint8_t *>(from.Raw()) + run * read, bytes);
  }
  core.Note(L1, to.offset(), p.blockCount * bytes);
}
// "DataCopy(dst, src, Nd2NzParams) is simulated by software, the hardware has no such ability": it takes
// memory of the unified buffer that no kernel sees, and what lies between the rows that it writes may change.
template <typename T>
inline void DataCopy(const LocalTensor<T> &, const LocalTensor<T> &, const Nd2NzParams &) {
  emulation::Fail("DataCopy from the unified buffer to fractals of L1 is simulated by software: make "
                  "fractals in the unified buffer, and copy blocks");
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
  Require(p.mStep > 0 && p.kStep > 0 && p.mStep <= 255 && p.kStep <= 255,
          "LoadData: mStep and kStep are 1 to 255 (0 loads nothing)");
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
