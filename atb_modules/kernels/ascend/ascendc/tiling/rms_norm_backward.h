// How the backward of RMSNorm is laid out on a core. See rms_norm_backward.cpp for the kernel.
#pragma once
#include "soc.h"

struct RmsNormBackwardTiling {
  uint32_t blocks; // rows of grad_weight's partial sums, one a core
  uint32_t rows, width;
  uint32_t piece; // elements of a row that are held at once: the width, or less for long rows
  uint32_t chunk; // elements that are computed at once in float
  uint32_t in_buffers, out_buffers;
  uint32_t has_weight, has_sum_grad;
  float weight_offset;
};

inline int64_t RmsNormBackwardBytes(const RmsNormBackwardTiling &t, int32_t dtype) {
  const int64_t e = AtbElement(dtype), line = AtbRoundUp(t.piece * e, 32);
  const bool pieces = t.piece < t.width;
  const int64_t inputs = 2 + t.has_sum_grad, weight = t.has_weight ? line * (pieces ? t.in_buffers : 1) : 0;
  const int64_t sums = t.has_weight ? AtbRoundUp(t.piece * 4ll, 32) * (pieces ? 2 : 1) : 0;
  const int64_t floats = 4 * AtbRoundUp(t.chunk * 4ll, 32) + AtbRoundUp((t.chunk + 63) / 64 * 4ll, 32);
  return line * (inputs * t.in_buffers + t.out_buffers) + weight + sums + floats + 32 + 2 * 256;
}

inline const char *TileRmsNormBackward(const AtbSoc &soc, int32_t dtype, int64_t rows, int64_t width,
                                       bool has_weight, bool has_sum_grad, float weight_offset,
                                       RmsNormBackwardTiling *out) {
  if (const char *reason = AtbCheckRows(soc, dtype, rows, width)) return reason;
  if (!soc.pads) return "this SoC copies multiples of 32 bytes: the backward is not for one";
  RmsNormBackwardTiling t{};
  t.rows = static_cast<uint32_t>(rows);
  t.width = static_cast<uint32_t>(width);
  t.has_weight = has_weight;
  t.has_sum_grad = has_sum_grad;
  t.weight_offset = weight_offset;
  t.blocks = static_cast<uint32_t>(AtbMin(rows, soc.vector_cores));
  t.piece = t.width;
  t.chunk = static_cast<uint32_t>(AtbMin(AtbRoundUp(width, 64), 1024));
  const uint32_t buffers[3][2] = {{2, 2}, {2, 1}, {1, 1}};
  for (const auto &pair : buffers) {
    t.in_buffers = pair[0];
    t.out_buffers = pair[1];
    *out = t;
    if (RmsNormBackwardBytes(t, dtype) <= soc.ub) return nullptr;
  }
  t.in_buffers = t.out_buffers = 2;
  t.piece = 2048;
  *out = t;
  return RmsNormBackwardBytes(t, dtype) > soc.ub ? "a piece of a row does not fit the unified buffer"
                                                 : nullptr;
}
