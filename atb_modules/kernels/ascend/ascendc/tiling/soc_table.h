// The SoCs by name, for the binding: the rows of kernels/ascend/socs.py (a test holds them equal).
#pragma once
#include <cstring>

#include "soc.h"

struct AtbSocRow {
  const char *name;
  AtbSoc soc;
  int64_t l1, l0a, l0b, l0c; // bytes
  int32_t arch;              // as __NPU_ARCH__: 2201 (910B, 910_93), 3510 (950), 2002 (310P)
};

constexpr int64_t kAtbKiB = 1024;
constexpr AtbSocRow kAtbSocs[] = {
    {"ascend910b1",
     {192 * kAtbKiB, 48, 24, 1, 1},
     512 * kAtbKiB,
     64 * kAtbKiB,
     64 * kAtbKiB,
     128 * kAtbKiB,
     2201},
    {"ascend910b2",
     {192 * kAtbKiB, 48, 24, 1, 1},
     512 * kAtbKiB,
     64 * kAtbKiB,
     64 * kAtbKiB,
     128 * kAtbKiB,
     2201},
    {"ascend910b3",
     {192 * kAtbKiB, 40, 20, 1, 1},
     512 * kAtbKiB,
     64 * kAtbKiB,
     64 * kAtbKiB,
     128 * kAtbKiB,
     2201},
    {"ascend910b4",
     {192 * kAtbKiB, 40, 20, 1, 1},
     512 * kAtbKiB,
     64 * kAtbKiB,
     64 * kAtbKiB,
     128 * kAtbKiB,
     2201},
    {"ascend910_93",
     {192 * kAtbKiB, 48, 24, 1, 1},
     512 * kAtbKiB,
     64 * kAtbKiB,
     64 * kAtbKiB,
     128 * kAtbKiB,
     2201},
    {"ascend310p",
     {256 * kAtbKiB, 8, 10, 0, 0},
     1024 * kAtbKiB,
     64 * kAtbKiB,
     64 * kAtbKiB,
     256 * kAtbKiB,
     2002},
    {"ascend950",
     {248 * kAtbKiB, 64, 32, 1, 1},
     512 * kAtbKiB,
     64 * kAtbKiB,
     64 * kAtbKiB,
     256 * kAtbKiB,
     3510},
};

// The row of a name as the runtime gives it ("Ascend910_9391"); null where there is none.
inline const AtbSocRow *AtbFindSoc(const char *name) {
  for (const AtbSocRow &row : kAtbSocs) {
    size_t i = 0;
    while (row.name[i] != 0 && (name[i] | 0x20) == (row.name[i] | 0x20)) ++i;
    if (row.name[i] == 0) return &row;
  }
  return nullptr;
}
