// How the blocks of RMSNorm + product share rows and columns, and the flags between the cores of a block.
#pragma once
#include "cross_core.h"
#include "tiling/norm_matmul.h"

namespace atb {

// One of each kind for each of the two slots of normalised rows.
constexpr uint16_t kSlotFull = 0, kSlotFree = 2;

// The tiles of rows of a block: first, first + row_groups, ...
struct NormMatmulBlocks {
  uint32_t first, count, column_group;
};
__aicore__ inline NormMatmulBlocks BlocksOf(const NormMatmulTiling &t, uint32_t block) {
  const uint32_t all = (t.rows + t.tile_rows - 1) / t.tile_rows, first = block / t.column_groups;
  return {first, (all - first + t.row_groups - 1) / t.row_groups, block % t.column_groups};
}

} // namespace atb
