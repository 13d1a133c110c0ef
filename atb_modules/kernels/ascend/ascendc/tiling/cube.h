// What a tiling must know of the cube cores of a SoC.
#pragma once
#include "soc.h"

struct AtbCube {
  int64_t l1, l0a, l0b, l0c; // bytes; 0: not published
  int32_t split;             // cube and vector cores apart (dav-2201)
};

inline const char *AtbCheckCube(const AtbCube &cube) {
  return cube.split ? nullptr : "the kernel is written for cube and vector cores apart (910B, 910_93)";
}
