// Vector cores write L1, compiled without what opens the way there.
#undef ENABLE_CV_COMM_VIA_SSBUF
#include "kernel_operator.h"
using namespace AscendC;

extern "C" __global__ __aicore__ void closed() {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  TPipe pipe;
  if ASCEND_IS_AIC {
    TBuf<TPosition::A1> buffer;
    pipe.InitBuffer(buffer, 32);
  }
  if ASCEND_IS_AIV {
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 32);
    DataCopy(LocalTensor<half>(TPosition::A1, 0, 16), buffer.Get<half>(), DataCopyParams{1, 1, 0, 0});
  }
}
