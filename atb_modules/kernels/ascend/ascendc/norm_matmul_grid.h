// How the blocks of RMSNorm + product share rows and columns, and the flags between the cores of a block.
#pragma once
#include "cross_core.h"
#include "rows.h"
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

// The steps of the cube core of a block, in order: one chunk of the width of one tile of the output; `tile`
// is the ordinal of its rows in the block.
struct NormMatmulStep {
  bool live;
  uint32_t tile, column, start;
};
class NormMatmulSteps {
public:
  __aicore__ inline NormMatmulSteps(const NormMatmulTiling &tiling, uint32_t block)
      : t_(tiling), blocks_(BlocksOf(tiling, block)) {}

  __aicore__ inline NormMatmulStep First() const {
    const uint32_t column = blocks_.column_group * t_.tile_columns;
    return {blocks_.count > 0 && column < t_.columns, 0, column, 0};
  }
  __aicore__ inline NormMatmulStep After(NormMatmulStep step) const {
    step.start += t_.chunk;
    if (step.start < t_.width) return step;
    step.start = 0;
    step.column += t_.column_groups * t_.tile_columns;
    if (step.column < t_.columns) return step;
    step.column = blocks_.column_group * t_.tile_columns;
    step.live = ++step.tile < blocks_.count;
    return step;
  }
  __aicore__ inline uint32_t Tiles() const { return blocks_.count; }
  __aicore__ inline uint32_t Row(const NormMatmulStep &step) const {
    return (blocks_.first + step.tile * t_.row_groups) * t_.tile_rows;
  }
  __aicore__ inline uint32_t Rows(const NormMatmulStep &step) const {
    return Least(t_.tile_rows, t_.rows - Row(step));
  }
  __aicore__ inline uint32_t Columns(const NormMatmulStep &step) const {
    return Least(t_.tile_columns, t_.columns - step.column);
  }
  __aicore__ inline uint32_t Width(const NormMatmulStep &step) const {
    return Least(t_.chunk, t_.width - step.start);
  }

private:
  NormMatmulTiling t_;
  NormMatmulBlocks blocks_;
};

} // namespace atb
