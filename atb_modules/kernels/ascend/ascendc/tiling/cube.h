// What a tiling must know of the cube cores of a SoC.
#pragma once
#include "soc.h"

struct AtbCube {
  int64_t l1, l0a, l0b, l0c; // bytes
  int32_t arch;              // as __NPU_ARCH__
};

inline const char *AtbCheckCube(const AtbCube &cube) {
  return cube.arch != 2002 ? nullptr : "the kernel is written for cube and vector cores apart (not 310P)";
}
