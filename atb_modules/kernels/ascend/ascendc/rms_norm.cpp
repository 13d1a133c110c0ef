// RMSNorm: x (rows, width), weight (width) or null -> y (rows, width), and rstd (rows) in float for the
// backward.
#include "rms_norm_rows.h"

namespace {
template <typename T>
__aicore__ inline void Run(GM_ADDR x, GM_ADDR weight, GM_ADDR y, GM_ADDR rstd, const RmsNormTiling &tiling) {
  AscendC::TPipe pipe;
  atb::RmsNormRows<T, false> kernel(&pipe, tiling);
  kernel.Init(x, nullptr, weight, y, nullptr, rstd);
  kernel.Process();
}
} // namespace

extern "C" __global__ __aicore__ void atb_rms_norm_half(GM_ADDR x, GM_ADDR weight, GM_ADDR y, GM_ADDR rstd,
                                                        RmsNormTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<half>(x, weight, y, rstd, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_rms_norm_bfloat16(GM_ADDR x, GM_ADDR weight, GM_ADDR y,
                                                            GM_ADDR rstd, RmsNormTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<bfloat16_t>(x, weight, y, rstd, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_rms_norm_float(GM_ADDR x, GM_ADDR weight, GM_ADDR y, GM_ADDR rstd,
                                                         RmsNormTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<float>(x, weight, y, rstd, tiling);
}
