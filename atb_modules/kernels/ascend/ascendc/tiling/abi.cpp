// The tilings behind a C interface, for the host emulation: the same functions that the binding calls.
#include "gated.h"
#include "lse_merge.h"
#include "paged_decode.h"
#include "rms_norm.h"
#include "rms_norm_backward.h"
#include "rotary_append.h"

#define ATB_TILING_SIZE(name)                                                                                \
  extern "C" int32_t atb_sizeof_##name() {                                                                   \
    return static_cast<int32_t>(sizeof(name));                                                               \
  }
ATB_TILING_SIZE(GatedTiling)
ATB_TILING_SIZE(LseMergeTiling)
ATB_TILING_SIZE(PagedDecodeTiling)
ATB_TILING_SIZE(RmsNormTiling)
ATB_TILING_SIZE(RmsNormBackwardTiling)
ATB_TILING_SIZE(RotaryAppendTiling)

extern "C" {
const char *atb_tile_rms_norm(const AtbSoc *soc, int32_t dtype, int64_t rows, int64_t width, int32_t adds,
                              int32_t has_weight, int32_t cast_first, int32_t keeps_rstd, float eps,
                              float weight_offset, RmsNormTiling *out) {
  return TileRmsNorm(*soc, dtype, rows, width, adds, has_weight, cast_first, keeps_rstd, eps, weight_offset,
                     out);
}
const char *atb_tile_rms_norm_backward(const AtbSoc *soc, int32_t dtype, int64_t rows, int64_t width,
                                       int32_t has_weight, int32_t has_sum_grad, float weight_offset,
                                       RmsNormBackwardTiling *out) {
  return TileRmsNormBackward(*soc, dtype, rows, width, has_weight, has_sum_grad, weight_offset, out);
}
const char *atb_tile_gated(const AtbSoc *soc, int32_t dtype, int64_t rows, int64_t width, int64_t gate_step,
                           int64_t up_step, int64_t kind, GatedTiling *out) {
  return TileGated(*soc, dtype, rows, width, gate_step, up_step, static_cast<int32_t>(kind), out);
}
const char *atb_tile_rotary_append(const AtbSoc *soc, int32_t dtype, int64_t tokens, int64_t heads,
                                   int64_t kv_heads, int64_t head_dim, int64_t value_dim, int64_t pairs,
                                   int64_t q_step, int64_t k_step, int64_t v_step, int64_t page_size,
                                   int64_t pages, int32_t interleaved, int32_t slots_int64,
                                   RotaryAppendTiling *out) {
  return TileRotaryAppend(*soc, dtype, tokens, heads, kv_heads, head_dim, value_dim, pairs, q_step, k_step,
                          v_step, page_size, pages, interleaved, slots_int64, out);
}
const char *atb_tile_lse_merge(const AtbSoc *soc, int32_t dtype, int64_t parts, int64_t rows, int64_t width,
                               LseMergeTiling *out) {
  return TileLseMerge(*soc, dtype, parts, rows, width, out);
}
const char *atb_tile_paged_decode(const AtbSoc *soc, int32_t dtype, int64_t batch, int64_t heads,
                                  int64_t kv_heads, int64_t head_dim, int64_t value_dim, int64_t page_size,
                                  int64_t pages, int64_t max_blocks, int64_t q_step, int64_t max_length,
                                  int64_t left, float scale, float softcap, PagedDecodeTiling *out) {
  return TilePagedDecode(*soc, dtype, batch, heads, kv_heads, head_dim, value_dim, page_size, pages,
                         max_blocks, q_step, max_length, left, scale, softcap, out);
}
int64_t atb_paged_decode_workspace(const PagedDecodeTiling *tiling) {
  return PagedDecodeWorkspace(*tiling);
}
// Bytes of the unified buffer in the larger of the two phases.
int64_t atb_paged_decode_bytes(const PagedDecodeTiling *tiling, int32_t dtype) {
  return AtbMax(PagedDecodeBytes(*tiling, dtype), tiling->parts > 1 ? PagedMergeBytes(*tiling) : 0);
}
}
