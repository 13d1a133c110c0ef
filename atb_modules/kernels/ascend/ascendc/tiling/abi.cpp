// The tilings behind a C interface, for the host emulation: the same functions that the binding calls.
#include "rms_norm.h"

#define ATB_TILING_SIZE(name)                                                                                \
  extern "C" int32_t atb_sizeof_##name() { return static_cast<int32_t>(sizeof(name)); }
ATB_TILING_SIZE(RmsNormTiling)

extern "C" const char *atb_tile_rms_norm(const AtbSoc *soc, int32_t dtype, int64_t rows, int64_t width, int32_t adds,
                                         int32_t has_weight, int32_t cast_first, int32_t keeps_rstd, float eps,
                                         float weight_offset, RmsNormTiling *out) {
  return TileRmsNorm(*soc, dtype, rows, width, adds, has_weight, cast_first, keeps_rstd, eps, weight_offset, out);
}
