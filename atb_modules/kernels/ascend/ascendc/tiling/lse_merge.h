// How the merge of partial attentions is laid out on a core. See lse_merge.cpp for the kernel.
#pragma once
#include "soc.h"

struct LseMergeTiling {
  uint32_t blocks;
  uint32_t parts, rows, width;
  uint32_t tile_rows; // rows that are merged together
  uint32_t step;      // elements between rows of a tile in the unified buffer
  uint32_t lse_step;  // floats between parts of a tile
};

inline int64_t LseMergeBytes(const LseMergeTiling &t, int32_t dtype) {
  const int64_t e = AtbElement(dtype), tile = int64_t{t.tile_rows} * t.step;
  return tile * (4 * e + 4) + t.step * 4ll + 3ll * t.parts * t.lse_step * 4 + 4ll * t.lse_step * 4;
}

inline const char *TileLseMerge(const AtbSoc &soc, int32_t dtype, int64_t parts, int64_t rows, int64_t width,
                                LseMergeTiling *out) {
  if (const char *reason = AtbCheckRows(soc, dtype, rows, width)) return reason;
  if (parts < 1 || parts > 512) return "the number of parts is 1 to 512";
  if (width > 4096) return "the head size is 1 to 4096";
  if (!soc.pads) return "this SoC copies multiples of 32 bytes, and the log-sum-exps of a row are none";
  LseMergeTiling t{};
  t.parts = static_cast<uint32_t>(parts);
  t.rows = static_cast<uint32_t>(rows);
  t.width = static_cast<uint32_t>(width);
  t.blocks = static_cast<uint32_t>(AtbMin(rows, soc.vector_cores));
  t.step = static_cast<uint32_t>(AtbRoundUp(width, 32 / AtbElement(dtype)));
  const int64_t per_core = (rows + t.blocks - 1) / t.blocks;
  t.tile_rows = static_cast<uint32_t>(AtbMax(AtbMin(AtbMin(8192 / t.step, per_core), 64), 1));
  for (;; --t.tile_rows) {
    t.lse_step = static_cast<uint32_t>(AtbRoundUp(t.tile_rows, 8));
    if (t.tile_rows == 1 || LseMergeBytes(t, dtype) <= soc.ub) break;
  }
  *out = t;
  return LseMergeBytes(t, dtype) > soc.ub ? "one row of all parts does not fit the unified buffer" : nullptr;
}
