// How RMSNorm, alone or after the residual sum, is laid out on a core. See rms_norm_rows.h for the kernel.
#pragma once
#include "soc.h"

struct RmsNormTiling {
  uint32_t blocks;     // cores; rows are dealt out in runs
  uint32_t rows;       //
  uint32_t width;      //
  uint32_t tile_rows;  // rows that are loaded together; 1 where a row is taken in pieces
  uint32_t step;       // elements between rows of a tile in the unified buffer
  uint32_t piece;      // elements of a row that are held at once: the width, or less for long rows
  uint32_t chunk;      // elements that are computed at once in float
  uint32_t in_buffers; // 2: the next tile is loaded while this one is computed
  uint32_t out_buffers;
  uint32_t has_weight, cast_first, keeps_rstd;
  float eps, weight_offset;
};

// Bytes of the unified buffer that the kernel takes with such a tiling.
inline int64_t RmsNormBytes(const RmsNormTiling &t, int32_t dtype, bool adds) {
  const int64_t e = AtbElement(dtype), tile = int64_t{t.tile_rows} * t.step * e;
  const int64_t inputs = adds ? 2 : 1, outputs = adds ? 2 : 1;
  const bool pieces = t.piece < t.width;
  const int64_t weight = t.has_weight ? AtbRoundUp(t.piece * e, 32) * (pieces ? t.in_buffers : 1) : 0;
  const int64_t floats = 3 * AtbRoundUp(t.chunk * 4ll, 32);
  const int64_t work = AtbRoundUp((t.chunk + 63) / 64 * 4ll, 32);
  const int64_t stats = AtbRoundUp(t.tile_rows * 4ll, 32) * (t.keeps_rstd ? 3 : 2);
  return tile * (inputs * t.in_buffers + outputs * t.out_buffers) + weight + floats + work + stats;
}

// Fills the tiling; returns null, or why the kernel cannot take the call.
inline const char *TileRmsNorm(const AtbSoc &soc, int32_t dtype, int64_t rows, int64_t width, bool adds,
                               bool has_weight, bool cast_first, bool keeps_rstd, float eps,
                               float weight_offset, RmsNormTiling *out) {
  if (const char *reason = AtbCheckRows(soc, dtype, rows, width)) return reason;
  if (keeps_rstd && !soc.pads) return "this SoC copies multiples of 32 bytes: it returns no rstd";
  const int64_t e = AtbElement(dtype), per_block = 32 / e;
  RmsNormTiling t{};
  t.rows = static_cast<uint32_t>(rows);
  t.width = static_cast<uint32_t>(width);
  t.has_weight = has_weight;
  t.cast_first = cast_first;
  t.keeps_rstd = keeps_rstd;
  t.eps = eps;
  t.weight_offset = weight_offset;
  t.blocks = static_cast<uint32_t>(AtbMin(rows, soc.vector_cores));
  t.piece = t.width;
  t.step = static_cast<uint32_t>(AtbRoundUp(width, per_block));
  t.chunk = static_cast<uint32_t>(AtbMin(AtbRoundUp(width, 64), 2048));
  t.tile_rows = 1;
  const uint32_t buffers[3][2] = {{2, 2}, {2, 1}, {1, 1}};
  for (const auto &pair : buffers) {
    t.in_buffers = pair[0];
    t.out_buffers = pair[1];
    if (RmsNormBytes(t, dtype, adds) > soc.ub) continue;
    // short rows travel together, 16 KiB at a time, as long as every core has two tiles
    const int64_t per_core = (rows + t.blocks - 1) / t.blocks;
    const int64_t most = AtbMin(AtbMin(16384 / (t.step * e), 64), (per_core + 1) / 2);
    t.tile_rows = static_cast<uint32_t>(AtbMax(most, 1));
    while (t.tile_rows > 1 && RmsNormBytes(t, dtype, adds) > soc.ub) --t.tile_rows;
    *out = t;
    return nullptr;
  }
  t.in_buffers = t.out_buffers = 2;
  t.piece = t.step = 4096;
  *out = t;
  return RmsNormBytes(t, dtype, adds) > soc.ub ? "a piece of a row does not fit the unified buffer" : nullptr;
}
