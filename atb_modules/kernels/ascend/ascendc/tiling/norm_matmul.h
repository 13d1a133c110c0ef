// How RMSNorm and the product behind it are laid out on cube and vector cores. See norm_matmul.cpp.
#pragma once
#include "cube.h"

struct NormMatmulTiling {
  uint32_t blocks;
  uint32_t rows, width, columns;      // x (rows, width), weight of the product (columns, width)
  uint32_t to_l1;                     // normalised rows go straight to L1, not through the workspace
  uint32_t step;                      // elements between normalised rows in the workspace
  uint32_t row_groups, column_groups; // blocks = row_groups * column_groups
  uint32_t tile_rows, tile_columns;   // of the output that are computed together
  uint32_t chunk, piece;              // of the width that are loaded together to L1 and to L0
  uint32_t squares;                   // elements whose squares are summed together (through the workspace)
  uint32_t has_weight, cast_first;
  float eps, weight_offset;
};

inline int64_t NormMatmulUb(const NormMatmulTiling &t, int32_t dtype) {
  const int64_t e = AtbElement(dtype);
  if (t.to_l1) { // half a tile of rows: a chunk of them twice coming in, going out, and twice in float
    const int64_t rows = t.tile_rows / 2, chunk = rows * t.chunk;
    return 3 * chunk * e + 2 * chunk * 4 + rows * 36 + (t.has_weight ? t.chunk * (2 * e + 4) : 0);
  }
  const int64_t row = AtbRoundUp(t.width * e, 32), wide = AtbRoundUp(t.width * 4ll, 32);
  return row * (t.has_weight ? 4 : 3) + wide + 2ll * t.squares * 4 + AtbRoundUp(t.squares / 16, 32) + 64;
}
inline int64_t NormMatmulL1(const NormMatmulTiling &t, int32_t dtype) {
  return 2ll * (t.tile_rows + t.tile_columns) * t.chunk * AtbElement(dtype);
}
inline int64_t NormMatmulL0(int64_t lines, const NormMatmulTiling &t, int32_t dtype) {
  return 2 * lines * t.piece * AtbElement(dtype);
}
inline int64_t NormMatmulL0c(const NormMatmulTiling &t) {
  return 2ll * t.tile_rows * t.tile_columns * 4;
}
// Bytes of global memory: two slots of normalised rows for every block.
inline int64_t NormMatmulWorkspace(const NormMatmulTiling &t, int32_t dtype) {
  return t.to_l1 ? 0 : 2ll * t.blocks * t.tile_rows * t.step * AtbElement(dtype);
}
inline bool NormMatmulFits(const NormMatmulTiling &t, int32_t dtype, const AtbSoc &soc, const AtbCube &cube) {
  return NormMatmulUb(t, dtype) <= soc.ub && NormMatmulL1(t, dtype) <= cube.l1 &&
         NormMatmulL0(t.tile_rows, t, dtype) <= cube.l0a &&
         NormMatmulL0(t.tile_columns, t, dtype) <= cube.l0b && NormMatmulL0c(t) <= cube.l0c;
}

// Half of the smallest L2 of these SoCs: the slots of all blocks stay in it.
constexpr int64_t kNormMatmulSlots = 48ll << 20;

inline int64_t AtbCeil(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// Cycles of a block of the grid, roughly: what its cube core multiplies, what its cores load by way of L2 and
// what its vector cores normalise run beside each other, and the first rows are waited for. A tile of columns
// comes with its rows: through the workspace the cube core loads them, straight to L1 the vector cores read
// them again and scale them, after a first pass for their statistics.
inline int64_t NormMatmulCycles(const NormMatmulTiling &t, int32_t dtype) {
  const int64_t e = AtbElement(dtype), half = AtbCeil(t.tile_rows, 2) * t.width;
  const int64_t steps = AtbCeil(AtbCeil(t.rows, t.tile_rows), t.row_groups);
  const int64_t tiles = AtbCeil(AtbCeil(t.columns, t.tile_columns), t.column_groups);
  const int64_t cube = tiles * t.tile_rows * t.tile_columns * t.width / 4096 * (e == 4 ? 4 : 1);
  const int64_t load = tiles * (t.tile_rows + t.tile_columns) * t.width * e / 48;
  if (t.to_l1) {
    const int64_t measure = AtbMax(half / 16, t.tile_rows * t.width * e / 48), scale = tiles * half / 16;
    return steps * (measure + AtbMax(AtbMax(cube, load), scale));
  }
  const int64_t vector = half / 8;
  return vector + steps * AtbMax(AtbMax(cube, load), vector);
}
// Columns of a tile for a group of the grid: tiles of one size, at most `most`, as few as its columns take.
inline int64_t NormMatmulColumns(int64_t columns, int64_t groups, int64_t most) {
  const int64_t share = AtbCeil(columns, groups);
  return AtbRoundUp(AtbCeil(share, AtbCeil(share, most)), 16);
}

inline const char *TileNormMatmul(const AtbSoc &soc, const AtbCube &cube, int32_t dtype, int64_t rows,
                                  int64_t width, int64_t columns, int32_t has_weight, int32_t cast_first,
                                  float eps, float weight_offset, NormMatmulTiling *out) {
  if (const char *reason = AtbCheckCube(cube)) return reason;
  if (const char *reason = AtbCheckRows(soc, dtype, rows, width)) return reason;
  if (columns < 1 || columns > (1ll << 24)) return "the number of columns is 1 to 2^24";
  if (width > 65535) return "the cube core copies rows of at most 65535 elements";
  const int64_t e = AtbElement(dtype);
  NormMatmulTiling t{};
  t.rows = static_cast<uint32_t>(rows);
  t.width = static_cast<uint32_t>(width);
  t.columns = static_cast<uint32_t>(columns);
  t.to_l1 = cube.arch == 3510;
  t.step = static_cast<uint32_t>(AtbRoundUp(width, 32 / e));
  t.has_weight = has_weight != 0;
  t.cast_first = cast_first != 0;
  t.eps = eps;
  t.weight_offset = weight_offset;
  t.squares = static_cast<uint32_t>(AtbMin(AtbRoundUp(width, 64), 2048));
  t.chunk = static_cast<uint32_t>(512 / e);
  if (!t.to_l1 && NormMatmulUb(t, dtype) > soc.ub) return "a row does not fit the unified buffer";
  int64_t least = -1;
  for (int64_t most = 256; most >= 128; most /= 2) {                // of equal ones, that which reads less
    t.piece = static_cast<uint32_t>((most == 128 ? 256 : 128) / e); // L0B
    for (uint32_t lines = 16; lines <= 128 && (lines == 16 || lines < 2 * rows); lines *= 2) {
      t.tile_rows = lines;
      for (int64_t groups = 1; groups <= soc.cube_cores; ++groups) {
        const int64_t wide = NormMatmulColumns(columns, groups, most);
        if (groups > 1 && wide < 64) break; // too narrow a load of the weight
        t.tile_columns = static_cast<uint32_t>(wide);
        t.column_groups = static_cast<uint32_t>(AtbMin(AtbCeil(columns, wide), groups));
        t.row_groups = static_cast<uint32_t>(AtbMin(soc.cube_cores / t.column_groups, AtbCeil(rows, lines)));
        t.blocks = t.row_groups * t.column_groups;
        if (!NormMatmulFits(t, dtype, soc, cube)) continue;
        if (NormMatmulWorkspace(t, dtype) > kNormMatmulSlots) continue;
        const int64_t cycles = NormMatmulCycles(t, dtype);
        if (least >= 0 && cycles >= least) continue;
        least = cycles;
        *out = t;
      }
    }
  }
  return least < 0 ? "a tile does not fit the memories of the cube core" : nullptr;
}
