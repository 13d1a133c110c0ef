// Residual sum and its RMSNorm: x, residual (rows, width), weight (width) or null -> y, sum (rows, width),
// rstd (rows).
#include "rms_norm_rows.h"

namespace {
template <typename T>
__aicore__ inline void Run(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR y, GM_ADDR sum, GM_ADDR rstd,
                           const RmsNormTiling &tiling) {
  AscendC::TPipe pipe;
  atb::RmsNormRows<T, true> kernel(&pipe, tiling);
  kernel.Init(x, residual, weight, y, sum, rstd);
  kernel.Process();
}
} // namespace

extern "C" __global__ __aicore__ void atb_add_rms_norm_half(GM_ADDR x, GM_ADDR residual, GM_ADDR weight,
                                                            GM_ADDR y, GM_ADDR sum, GM_ADDR rstd,
                                                            RmsNormTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<half>(x, residual, weight, y, sum, rstd, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_add_rms_norm_bfloat16(GM_ADDR x, GM_ADDR residual, GM_ADDR weight,
                                                                GM_ADDR y, GM_ADDR sum, GM_ADDR rstd,
                                                                RmsNormTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<bfloat16_t>(x, residual, weight, y, sum, rstd, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_add_rms_norm_float(GM_ADDR x, GM_ADDR residual, GM_ADDR weight,
                                                             GM_ADDR y, GM_ADDR sum, GM_ADDR rstd,
                                                             RmsNormTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Run<float>(x, residual, weight, y, sum, rstd, tiling);
}
