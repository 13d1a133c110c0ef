// How a gated activation is laid out on a core. See gated.cpp for the kernel.
#pragma once
#include "soc.h"

enum AtbGate : int32_t { ATB_SILU, ATB_GELU_TANH, ATB_QUICK_GELU };

struct GatedTiling {
  uint32_t blocks;
  uint32_t rows, width;        // of the result
  uint32_t gate_step, up_step; // elements between rows of gate and up in global memory
  uint32_t tile_rows, piece;   // what is computed at once: rows x elements of a row
  uint32_t step;               // elements between rows of a tile in the unified buffer
  uint32_t kind;               // AtbGate
};

// Rows of gate and up may be longer than the result's: the halves of one product.
inline const char *TileGated(const AtbSoc &soc, int32_t dtype, int64_t rows, int64_t width, int64_t gate_step,
                             int64_t up_step, int32_t kind, GatedTiling *out) {
  const int64_t e = AtbElement(dtype), most = 4096;
  if (kind < ATB_SILU || kind > ATB_QUICK_GELU) return "the activation is silu, gelu_tanh or quick_gelu";
  if (rows > 0 && width > 0 && gate_step == width && up_step == width && rows * width <= (1ll << 30)) {
    width *= rows; // dense: one long row
    gate_step = up_step = width;
    rows = 1;
  }
  if (const char *reason = AtbCheckRows(soc, dtype, rows, width)) return reason;
  if (gate_step < width || up_step < width || gate_step > kAtbMost || up_step > kAtbMost)
    return "rows of gate and up are at least as far apart as they are long";
  if (gate_step * e > kAtbMost || up_step * e > kAtbMost) return "rows are less than 4 GiB apart";
  GatedTiling t{};
  t.rows = static_cast<uint32_t>(rows);
  t.width = static_cast<uint32_t>(width);
  t.gate_step = static_cast<uint32_t>(gate_step);
  t.up_step = static_cast<uint32_t>(up_step);
  t.kind = static_cast<uint32_t>(kind);
  // small calls are cut finer, so that every core has something to do
  const int64_t fair = AtbRoundUp((rows * width + soc.vector_cores - 1) / soc.vector_cores, 256);
  t.piece = static_cast<uint32_t>(AtbMin(AtbMin(width, most), fair));
  t.step = static_cast<uint32_t>(AtbRoundUp(t.piece, 32 / e));
  // whole rows of a tile are apart in global memory; 310P takes one at a time
  const int64_t together = t.piece == width && soc.pads ? AtbMin(AtbMin(most, fair) / t.step, 255) : 1;
  t.tile_rows = static_cast<uint32_t>(AtbMax(AtbMin(together, rows), 1));
  const int64_t tiles = (rows + t.tile_rows - 1) / t.tile_rows * ((width + t.piece - 1) / t.piece);
  t.blocks = static_cast<uint32_t>(AtbMin(tiles, soc.vector_cores));
  *out = t;
  return int64_t{t.tile_rows} * t.step * (6 * e + 12) > soc.ub ? "a tile does not fit the unified buffer"
                                                               : nullptr;
}
