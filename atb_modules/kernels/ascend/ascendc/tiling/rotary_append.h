// How the rotary embedding with cache append is laid out on a core. See rotary_append.cpp for the kernel.
#pragma once
#include "soc.h"

struct RotaryAppendTiling {
  uint32_t blocks;
  uint32_t tokens, heads, kv_heads, head_dim, value_dim;
  uint32_t pairs;                  // rotated pairs of channels; the channels behind them pass through
  uint32_t q_step, k_step, v_step; // elements between tokens in global memory; heads are dense
  uint32_t page_size, pages;
  uint32_t group;            // heads that are computed at once
  uint32_t step, value_step; // elements between heads in the unified buffer
  uint32_t interleaved;
  uint32_t slot_words; // 32-bit words of a slot: 1 int32, 2 int64
};

// A call.
struct RotaryAppendShape {
  int64_t tokens, heads, kv_heads, head_dim, value_dim;
  int64_t pairs;                  // rotated pairs of channels; the channels behind them pass through
  int64_t q_step, k_step, v_step; // elements between tokens in global memory; heads are dense
  int64_t page_size, pages;
  int32_t interleaved, slots_int64;
};

inline int64_t RotaryAppendBytes(const RotaryAppendTiling &t, int32_t dtype) {
  const int64_t e = AtbElement(dtype), heads = int64_t{t.group} * t.step;
  const int64_t moves = heads * (4 * e + 12) + int64_t{t.group} * t.value_step * e * 2;
  return moves + 4 * AtbRoundUp(t.pairs * 4ll, 32) + 4ll * t.step * 4 + 2ll * 64 * 8;
}

inline const char *TileRotaryAppend(const AtbSoc &soc, int32_t dtype, const RotaryAppendShape &shape,
                                    RotaryAppendTiling *out) {
  if (const char *reason = AtbCheckRows(soc, dtype, shape.tokens, shape.head_dim)) return reason;
  if (!soc.pads) return "this SoC has no Gather with 32-bit offsets";
  if (shape.heads < 0 || shape.kv_heads < 0 || shape.heads + shape.kv_heads < 1 || shape.heads > 65535 ||
      shape.kv_heads > 65535)
    return "the numbers of heads are 0 to 65535, and not both 0";
  if (shape.head_dim > 1024 || shape.value_dim < 1 || shape.value_dim > 1024)
    return "the head sizes are 1 to 1024";
  if (shape.pairs < 1 || 2 * shape.pairs > shape.head_dim)
    return "the rotated channels are 2 to the head size";
  if (shape.page_size < 1 || shape.pages < 0 || shape.page_size > 65535 ||
      shape.page_size * shape.pages > 0x7fffffffll)
    return "pages hold 1 to 65535 tokens, and all of them less than 2^31";
  const int64_t e = AtbElement(dtype);
  if (shape.page_size * AtbMax(shape.head_dim, shape.value_dim) * e > kAtbMost)
    return "the heads of a page are less than 4 GiB apart";
  if (shape.tokens > 1 && (shape.q_step < 0 || shape.k_step < 0 || shape.v_step < 0 ||
                           AtbMax(AtbMax(shape.q_step, shape.k_step), shape.v_step) > kAtbMost))
    return "tokens of q, k and v are 0 to 2^32 - 1 elements apart";
  RotaryAppendTiling t{};
  t.tokens = static_cast<uint32_t>(shape.tokens);
  t.heads = static_cast<uint32_t>(shape.heads);
  t.kv_heads = static_cast<uint32_t>(shape.kv_heads);
  t.head_dim = static_cast<uint32_t>(shape.head_dim);
  t.value_dim = static_cast<uint32_t>(shape.value_dim);
  t.pairs = static_cast<uint32_t>(shape.pairs);
  t.q_step = static_cast<uint32_t>(shape.q_step);
  t.k_step = static_cast<uint32_t>(shape.k_step);
  t.v_step = static_cast<uint32_t>(shape.v_step);
  t.page_size = static_cast<uint32_t>(shape.page_size);
  t.pages = static_cast<uint32_t>(shape.pages);
  t.step = static_cast<uint32_t>(AtbRoundUp(shape.head_dim, 32 / e));
  t.value_step = static_cast<uint32_t>(AtbRoundUp(shape.value_dim, 32 / e));
  t.interleaved = shape.interleaved != 0;
  t.slot_words = shape.slots_int64 ? 2 : 1;
  const int64_t fair =
      (shape.tokens * (shape.heads + shape.kv_heads) + soc.vector_cores - 1) / soc.vector_cores;
  t.group = static_cast<uint32_t>(AtbMin(AtbMin(AtbMax(shape.heads, shape.kv_heads), fair), 128));
  while (t.group > 1 && RotaryAppendBytes(t, dtype) > soc.ub) --t.group;
  const int64_t q_groups = (shape.heads + t.group - 1) / t.group;
  const int64_t kv_groups = (shape.kv_heads + t.group - 1) / t.group;
  t.blocks = static_cast<uint32_t>(AtbMin(shape.tokens * (q_groups + 2 * kv_groups), soc.vector_cores));
  *out = t;
  return RotaryAppendBytes(t, dtype) > soc.ub ? "one head does not fit the unified buffer" : nullptr;
}
