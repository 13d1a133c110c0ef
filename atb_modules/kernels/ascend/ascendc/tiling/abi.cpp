// The tilings behind a C interface, for the host emulation: the same functions that the binding calls.
#include "flash_attention.h"
#include "gated.h"
#include "lse_merge.h"
#include "norm_matmul.h"
#include "paged_decode.h"
#include "rms_norm.h"
#include "rms_norm_backward.h"
#include "rotary_append.h"

#define ATB_TILING_SIZE(name)                                                                                \
  extern "C" int32_t atb_sizeof_##name() {                                                                   \
    return static_cast<int32_t>(sizeof(name));                                                               \
  }
ATB_TILING_SIZE(FlashAttentionTiling)
ATB_TILING_SIZE(GatedTiling)
ATB_TILING_SIZE(LseMergeTiling)
ATB_TILING_SIZE(NormMatmulTiling)
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
const char *atb_tile_rotary_append(const AtbSoc *soc, int32_t dtype, const RotaryAppendShape *shape,
                                   RotaryAppendTiling *out) {
  return TileRotaryAppend(*soc, dtype, *shape, out);
}
const char *atb_tile_lse_merge(const AtbSoc *soc, int32_t dtype, int64_t parts, int64_t rows, int64_t width,
                               LseMergeTiling *out) {
  return TileLseMerge(*soc, dtype, parts, rows, width, out);
}
const char *atb_tile_paged_decode(const AtbSoc *soc, int32_t dtype, const PagedDecodeShape *shape,
                                  float scale, float softcap, PagedDecodeTiling *out) {
  return TilePagedDecode(*soc, dtype, *shape, scale, softcap, out);
}
int64_t atb_paged_decode_workspace(const PagedDecodeTiling *tiling) {
  return PagedDecodeWorkspace(*tiling);
}
// Bytes of the unified buffer in the larger of the two phases.
int64_t atb_paged_decode_bytes(const PagedDecodeTiling *tiling, int32_t dtype) {
  return AtbMax(PagedDecodeBytes(*tiling, dtype), tiling->parts > 1 ? PagedMergeBytes(*tiling) : 0);
}
const char *atb_tile_norm_matmul(const AtbSoc *soc, const AtbCube *cube, int32_t dtype, int64_t rows,
                                 int64_t width, int64_t columns, int32_t has_weight, int32_t cast_first,
                                 float eps, float weight_offset, NormMatmulTiling *out) {
  return TileNormMatmul(*soc, *cube, dtype, rows, width, columns, has_weight, cast_first, eps, weight_offset,
                        out);
}
int64_t atb_norm_matmul_workspace(const NormMatmulTiling *tiling, int32_t dtype) {
  return NormMatmulWorkspace(*tiling, dtype);
}
// Bytes of an on-chip memory: UB, L1, L0A, L0B, L0C in this order.
int64_t atb_norm_matmul_bytes(const NormMatmulTiling *tiling, int32_t dtype, int32_t place) {
  const NormMatmulTiling &t = *tiling;
  const int64_t bytes[] = {NormMatmulUb(t, dtype), NormMatmulL1(t, dtype),
                           NormMatmulL0(t.tile_rows, t, dtype), NormMatmulL0(t.tile_columns, t, dtype),
                           NormMatmulL0c(t)};
  return bytes[place];
}
const char *atb_tile_flash_attention(const AtbSoc *soc, const AtbCube *cube, int32_t dtype, int64_t batch,
                                     int64_t heads, int64_t kv_heads, int64_t q_len, int64_t kv_len,
                                     int64_t head_dim, int64_t value_dim, int64_t left, int64_t right,
                                     float scale, float softcap, FlashAttentionTiling *out) {
  return TileFlashAttention(*soc, *cube, dtype, batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim,
                            left, right, scale, softcap, out);
}
int64_t atb_flash_attention_workspace(const FlashAttentionTiling *tiling, int32_t dtype) {
  return FlashWorkspace(*tiling, dtype);
}
// Bytes of an on-chip memory: UB, L1, L0A, L0B, L0C in this order.
int64_t atb_flash_attention_bytes(const FlashAttentionTiling *tiling, int32_t dtype, int32_t place) {
  const FlashAttentionTiling &t = *tiling;
  const int64_t bytes[] = {FlashUb(t, dtype), FlashL1(t, dtype), FlashL0a(t), FlashL0b(t, dtype),
                           FlashL0c(t)};
  return bytes[place];
}
}
