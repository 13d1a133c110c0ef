// RMSNorm and the product behind it as one mixed kernel: x (rows, width), norm weight (width) or null, weight
// (columns, width) -> out (rows, columns) = rms_norm(x) weight^T, accumulated in float.
//
// On dav-2201 the two vector cores of a block normalise a tile of rows into one of two slots of the
// workspace, small enough to stay in L2, while the cube core multiplies the tile before it. On dav-3510,
// whose vector cores reach L1, the slots lie there and hold a chunk of the width each: nothing goes through
// global memory. A flag a slot says that it is full, another that it may be filled again. Blocks form a grid
// over rows and columns; the blocks of a row of the grid normalise the same rows each for itself, which the
// product hides as soon as a block has some 200 columns, and which needs no meeting of all cores.
#if __NPU_ARCH__ == 3510
#include "norm_matmul_direct_cube.h"
#include "norm_matmul_direct_rows.h"
#else
#include "norm_matmul_cube.h"
#include "norm_matmul_rows.h"
#endif

namespace {
using namespace AscendC;

template <typename T>
__aicore__ inline void Run(GM_ADDR x, GM_ADDR norm_weight, GM_ADDR weight, GM_ADDR out, GM_ADDR work,
                           const NormMatmulTiling &tiling) {
  TPipe pipe;
#if __NPU_ARCH__ == 3510
  if ASCEND_IS_AIV {
    atb::NormMatmulDirectRows<T> rows(&pipe, tiling);
    rows.Process(x, norm_weight);
  }
  if ASCEND_IS_AIC {
    atb::NormMatmulDirectCube<T> product(&pipe, tiling);
    product.Process(weight, out);
  }
#else
  if ASCEND_IS_AIV {
    atb::NormMatmulRows<T> rows(&pipe, tiling);
    rows.Process(x, norm_weight, work);
  }
  if ASCEND_IS_AIC {
    atb::NormMatmulCube<T> product(&pipe, tiling);
    product.Process(work, weight, out);
  }
#endif
}
} // namespace

extern "C" __global__ __aicore__ void atb_norm_matmul_half(GM_ADDR x, GM_ADDR norm_weight, GM_ADDR weight,
                                                           GM_ADDR out, GM_ADDR work,
                                                           NormMatmulTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Run<half>(x, norm_weight, weight, out, work, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_norm_matmul_bfloat16(GM_ADDR x, GM_ADDR norm_weight, GM_ADDR weight,
                                                               GM_ADDR out, GM_ADDR work,
                                                               NormMatmulTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Run<bfloat16_t>(x, norm_weight, weight, out, work, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_norm_matmul_float(GM_ADDR x, GM_ADDR norm_weight, GM_ADDR weight,
                                                            GM_ADDR out, GM_ADDR work,
                                                            NormMatmulTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Run<float>(x, norm_weight, weight, out, work, tiling);
}
