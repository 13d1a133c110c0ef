// Small kernels of the cube side, each with one fault. `correct` is the same without one.
#include "kernel_operator.h"
using namespace AscendC;

// c (16, 16) = a (16, 16) b (16, 16)^T, stepwise, so that one step may be wrong.
struct Parts {
  TPipe pipe;
  TBuf<TPosition::A1> a1_;
  TBuf<TPosition::A2> a2_;
  TBuf<TPosition::B2> b2_;
  TBuf<TPosition::CO1> c_;
  GlobalTensor<half> x;
  GlobalTensor<float> y;
  LocalTensor<half> a1, a2, b2;
  LocalTensor<float> c;
  __aicore__ inline Parts(GM_ADDR source, GM_ADDR target, uint32_t results = 256) {
    x.SetGlobalBuffer((__gm__ half *)source, 256);
    y.SetGlobalBuffer((__gm__ float *)target, 256);
    pipe.InitBuffer(a1_, 512);
    pipe.InitBuffer(a2_, 512);
    pipe.InitBuffer(b2_, 512);
    pipe.InitBuffer(c_, results * sizeof(float));
    a1 = a1_.Get<half>();
    a2 = a2_.Get<half>();
    b2 = b2_.Get<half>();
    c = c_.Get<float>();
  }
  __aicore__ inline void Load(uint16_t rows = 16) {
    DataCopy(a1, x, Nd2NzParams{1, rows, 16, 0, 16, 16, 1, 0});
  }
  template <HardEvent event> __aicore__ inline void Hand() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }
  __aicore__ inline void Split() {
    LoadData(a2, a1, LoadData2DParams{0, 1, 1, 0, 0, false, 0});
    LoadData(b2, a1, LoadData2DParams{0, 1, 1, 0, 0, false, 0});
  }
  __aicore__ inline MmadParams Shape(bool first = true) {
    MmadParams p;
    p.m = p.n = p.k = 16;
    p.cmatrixInitVal = first;
    return p;
  }
  __aicore__ inline void Product() {
    Load();
    Hand<HardEvent::MTE2_MTE1>();
    Split();
    Hand<HardEvent::MTE1_M>();
    Mmad(c, a2, b2, Shape());
  }
};
extern "C" __global__ __aicore__ void correct(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Parts p(x, y);
  p.Product();
  PipeBarrier<PIPE_M>();
  Mmad(p.c, p.a2, p.b2, p.Shape(false));
  p.Hand<HardEvent::M_FIX>();
  Fixpipe(p.y, p.c, FixpipeParamsV220(16, 16, 16, 16, false));
}
extern "C" __global__ __aicore__ void l0c_overflow(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Parts p(x, y, 32768 + 256);
}
extern "C" __global__ __aicore__ void no_wait_for_l1(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Parts p(x, y);
  p.Load();
  p.Split();
}
extern "C" __global__ __aicore__ void no_wait_for_the_product(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Parts p(x, y);
  p.Product();
  Fixpipe(p.y, p.c, FixpipeParamsV220(16, 16, 16, 16, false));
}
extern "C" __global__ __aicore__ void small_products_without_barrier(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Parts p(x, y);
  p.Product();
  Mmad(p.c, p.a2, p.b2, p.Shape(false));
}
extern "C" __global__ __aicore__ void accumulates_on_nothing(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Parts p(x, y);
  p.Load();
  p.Hand<HardEvent::MTE2_MTE1>();
  p.Split();
  p.Hand<HardEvent::MTE1_M>();
  Mmad(p.c, p.a2, p.b2, p.Shape(false));
}
// Three rows are copied, sixteen are multiplied.
extern "C" __global__ __aicore__ void rows_that_nobody_filled(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Parts p(x, y);
  p.Load(3);
  p.Hand<HardEvent::MTE2_MTE1>();
  p.Split();
}
extern "C" __global__ __aicore__ void conversion_that_does_not_fit(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Parts p(x, y);
  p.Product();
  p.Hand<HardEvent::M_FIX>();
  FixpipeParamsV220 fix(16, 16, 16, 16, false);
  fix.quantPre = QuantMode_t::F322F16;
  Fixpipe(p.y, p.c, fix);
}
extern "C" __global__ __aicore__ void vector_op_on_a_cube_core(GM_ADDR x, GM_ADDR y) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, 512);
}
