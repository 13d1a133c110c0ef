// y = 2 x + 1 over rows, double buffered: the smallest complete kernel.
#include "kernel_operator.h"
using namespace AscendC;

extern "C" __global__ __aicore__ void axpb(GM_ADDR x, GM_ADDR y, uint32_t rows, uint32_t width) {
  TPipe pipe;
  TQue<TPosition::VECIN, 2> in;
  TQue<TPosition::VECOUT, 2> out;
  GlobalTensor<float> source, target;
  source.SetGlobalBuffer((__gm__ float *)x, uint64_t(rows) * width);
  target.SetGlobalBuffer((__gm__ float *)y, uint64_t(rows) * width);
  const uint32_t bytes = width * sizeof(float);
  pipe.InitBuffer(in, 2, bytes);
  pipe.InitBuffer(out, 2, bytes);
  const DataCopyExtParams run{1, bytes, 0, 0, 0};
  for (uint32_t row = GetBlockIdx(); row < rows; row += GetBlockNum()) {
    LocalTensor<float> a = in.AllocTensor<float>();
    DataCopyPad(a, source[uint64_t(row) * width], run, DataCopyPadExtParams<float>{false, 0, 0, 0});
    in.EnQue(a);
    a = in.DeQue<float>();
    LocalTensor<float> b = out.AllocTensor<float>();
    Muls(b, a, 2.0f, width);
    PipeBarrier<PIPE_V>();
    Adds(b, b, 1.0f, width);
    in.FreeTensor(a);
    out.EnQue(b);
    b = out.DeQue<float>();
    DataCopyPad(target[uint64_t(row) * width], b, run);
    out.FreeTensor(b);
  }
}
