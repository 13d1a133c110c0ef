// c = (2 a) b^T: vector cores scale rows of a into a workspace, the cube core multiplies what they wrote.
#include "kernel_operator.h"
using namespace AscendC;

constexpr uint16_t kReady = 3;

template <bool waits>
__aicore__ inline void Multiply(GM_ADDR work, GM_ADDR b, GM_ADDR c, uint32_t m, uint32_t n, uint32_t k) {
  TPipe pipe;
  TBuf<TPosition::A1> a1;
  TBuf<TPosition::B1> b1;
  TQue<TPosition::A2, 1> a2;
  TQue<TPosition::B2, 1> b2;
  TQue<TPosition::CO1, 1> co1;
  const uint32_t mf = (m + 15) / 16 * 16, nf = (n + 15) / 16 * 16, kf = (k + 15) / 16 * 16;
  pipe.InitBuffer(a1, mf * kf * 2);
  pipe.InitBuffer(b1, nf * kf * 2);
  pipe.InitBuffer(a2, 1, mf * kf * 2);
  pipe.InitBuffer(b2, 1, nf * kf * 2);
  pipe.InitBuffer(co1, 1, mf * nf * 4);
  GlobalTensor<half> left, right;
  GlobalTensor<float> out;
  left.SetGlobalBuffer((__gm__ half *)work, m * k);
  right.SetGlobalBuffer((__gm__ half *)b, n * k);
  out.SetGlobalBuffer((__gm__ float *)c, m * n);
  LocalTensor<half> al1 = a1.Get<half>(), bl1 = b1.Get<half>();
  InitConstValue(al1, InitConstValueParams<half>(1, mf * kf / 16, 0, half(0.0f)));
  InitConstValue(bl1, InitConstValueParams<half>(1, nf * kf / 16, 0, half(0.0f)));
  PipeBarrier<PIPE_MTE2>();
  if constexpr (waits) CrossCoreWaitFlag(kReady);
  DataCopy(al1, left, Nd2NzParams{1, uint16_t(m), uint16_t(k), 0, uint16_t(k), uint16_t(mf), 1, 0});
  DataCopy(bl1, right, Nd2NzParams{1, uint16_t(n), uint16_t(k), 0, uint16_t(k), uint16_t(nf), 1, 0});
  const TEventID id = pipe.FetchEventID(HardEvent::MTE2_MTE1);
  SetFlag<HardEvent::MTE2_MTE1>(id);
  WaitFlag<HardEvent::MTE2_MTE1>(id);
  LocalTensor<half> al0 = a2.AllocTensor<half>(), bl0 = b2.AllocTensor<half>();
  for (uint32_t i = 0; i < mf / 16; ++i)
    LoadData(al0[i * kf * 16], al1[i * 256],
             LoadData2DParams{0, uint8_t(kf / 16), uint16_t(mf / 16), 0, 0, false, 0});
  LoadData(bl0, bl1, LoadData2DParams{0, uint8_t(kf / 16 * nf / 16), 1, 0, 0, false, 0});
  a2.EnQue(al0);
  b2.EnQue(bl0);
  al0 = a2.DeQue<half>();
  bl0 = b2.DeQue<half>();
  LocalTensor<float> cl0 = co1.AllocTensor<float>();
  MmadParams mm;
  mm.m = mf;
  mm.n = nf;
  mm.k = kf;
  Mmad(cl0, al0, bl0, mm);
  a2.FreeTensor(al0);
  b2.FreeTensor(bl0);
  co1.EnQue(cl0);
  cl0 = co1.DeQue<float>();
  FixpipeParamsV220 fix(n, m, mf, n, false);
  Fixpipe(out, cl0, fix);
  co1.FreeTensor(cl0);
}

__aicore__ inline void Scale(GM_ADDR a, GM_ADDR work, uint32_t m, uint32_t k) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  pipe.InitBuffer(in, 1, k * 2);
  pipe.InitBuffer(out, 1, k * 2);
  GlobalTensor<half> source, target;
  source.SetGlobalBuffer((__gm__ half *)a, m * k);
  target.SetGlobalBuffer((__gm__ half *)work, m * k);
  for (uint32_t row = GetSubBlockIdx(); row < m; row += 2) {
    LocalTensor<half> x = in.AllocTensor<half>();
    DataCopyPad(x, source[row * k], DataCopyExtParams{1, k * 2, 0, 0, 0}, DataCopyPadExtParams<half>{});
    in.EnQue(x);
    x = in.DeQue<half>();
    LocalTensor<half> y = out.AllocTensor<half>();
    Muls(y, x, half(2.0f), k);
    in.FreeTensor(x);
    out.EnQue(y);
    y = out.DeQue<half>();
    DataCopyPad(target[row * k], y, DataCopyExtParams{1, k * 2, 0, 0, 0});
    out.FreeTensor(y);
  }
}

extern "C" __global__ __aicore__ void mixed(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR work, uint32_t m,
                                            uint32_t n, uint32_t k) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  if ASCEND_IS_AIV {
    Scale(a, work, m, k);
    CrossCoreSetFlag<2, PIPE_MTE3>(kReady);
  }
  if ASCEND_IS_AIC
    Multiply<true>(work, b, c, m, n, k);
}

// The cube core does not wait for the rows.
extern "C" __global__ __aicore__ void mixed_without_wait(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR work,
                                                         uint32_t m, uint32_t n, uint32_t k) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  if ASCEND_IS_AIV
    Scale(a, work, m, k);
  if ASCEND_IS_AIC
    Multiply<false>(work, b, c, m, n, k);
}

// One of the two vector cores forgets to say that it has finished.
extern "C" __global__ __aicore__ void mixed_half_set(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR work,
                                                     uint32_t m, uint32_t n, uint32_t k) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  if ASCEND_IS_AIV {
    Scale(a, work, m, k);
    if (GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE3>(kReady);
  }
  if ASCEND_IS_AIC
    Multiply<true>(work, b, c, m, n, k);
}
