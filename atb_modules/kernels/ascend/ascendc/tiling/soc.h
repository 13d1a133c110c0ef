// What a tiling must know of a SoC. Host and device compile the headers of this folder: plain data, no device
// calls.
#pragma once
#include <cstdint>

struct AtbSoc {
  int64_t ub;           // bytes of the unified buffer that a kernel may take
  int32_t vector_cores; //
  int32_t cube_cores;   //
  int32_t bfloat16;     // computes in bfloat16
  int32_t pads;         // has DataCopyPad and Gather: rows need not be multiples of 32 bytes
};

// Bytes of the unified buffer that are left to the runtime of kernels, which keeps some for itself on 910B.
constexpr int64_t kAtbReservedUb = 256;

enum AtbDtype : int32_t { ATB_HALF, ATB_BFLOAT16, ATB_FLOAT };

inline int64_t AtbElement(int32_t dtype) {
  return dtype == ATB_FLOAT ? 4 : 2;
}
inline int64_t AtbRoundUp(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}
inline int64_t AtbMin(int64_t a, int64_t b) {
  return a < b ? a : b;
}
inline int64_t AtbMax(int64_t a, int64_t b) {
  return a > b ? a : b;
}
constexpr int64_t kAtbMost = 0xffffffffll;
// What Select takes of the unified buffer for itself, behind all buffers of the kernel.
constexpr int64_t kAtbSelectBytes = 8192;

// What every kernel asks of its dtype and of the bytes of a row; null where it can.
inline const char *AtbCheckRows(const AtbSoc &soc, int32_t dtype, int64_t rows, int64_t width) {
  if (dtype < ATB_HALF || dtype > ATB_FLOAT) return "the dtype is float16, bfloat16 or float32";
  if (dtype == ATB_BFLOAT16 && !soc.bfloat16) return "this SoC has no bfloat16";
  if (rows < 1 || rows > kAtbMost) return "the number of rows is 1 to 2^32 - 1";
  if (width < 1 || width > (1ll << 30)) return "the width is 1 to 2^30";
  if (!soc.pads && width * AtbElement(dtype) % 32 != 0)
    return "this SoC copies multiples of 32 bytes, and a row is none";
  return nullptr;
}
