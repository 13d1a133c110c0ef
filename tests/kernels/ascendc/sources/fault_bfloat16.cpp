// The vector unit has no addition of bfloat16.
#include "kernel_operator.h"
using namespace AscendC;

extern "C" __global__ __aicore__ void add_bfloat16(GM_ADDR x, GM_ADDR y, uint32_t n) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, n * 2);
  LocalTensor<bfloat16_t> a = buffer.Get<bfloat16_t>();
  Add(a, a, a, n);
}
