// Small kernels in which vector cores write the L1 of their cube core, each with one fault. `correct` is the
// same without one.
#include "kernel_operator.h"
using namespace AscendC;

// c (16, 16) = (a + 1) b^T: the vector cores write eight rows of the left operand each.
struct Fault {
  bool waits = true, for_one = false, hands_over = true, ahead = false, v1 = false, fills_l0a = false,
       close = false, as_fractals = false, nothing = false;
  uint32_t address = 0, gap = 0, m = 1;
};

struct Vectors {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in_;
  TQue<TPosition::VECOUT, 1> out_;
  GlobalTensor<half> x;
  __aicore__ inline Vectors(GM_ADDR source) {
    x.SetGlobalBuffer((__gm__ half *)source, 256);
    pipe.InitBuffer(in_, 1, 256);
    pipe.InitBuffer(out_, 1, 512);
  }
  __aicore__ inline void Send(const Fault &fault) {
    const uint32_t mine = static_cast<uint32_t>(GetSubBlockIdx()) * 128;
    LocalTensor<half> rows = in_.AllocTensor<half>();
    DataCopy(rows, x[mine], 128);
    in_.EnQue(rows);
    rows = in_.DeQue<half>();
    LocalTensor<half> sum = out_.AllocTensor<half>();
    Duplicate(sum, half(0.0f), 256);
    PipeBarrier<PIPE_V>();
    Adds(sum, rows, half(1.0f), 128);
    in_.FreeTensor(rows);
    out_.EnQue(sum);
    if (fault.hands_over) sum = out_.DeQue<half>();
    const LocalTensor<half> l1(TPosition::A1, fault.address, 256);
    if (fault.as_fractals) DataCopy(l1[mine], sum, Nd2NzParams{1, 8, 16, 0, 16, 16, 1, 0});
    if (fault.nothing) Adds(sum, sum, half(0.0f), 0);
    DataCopy(l1[mine], sum, 128); // rows of half of a fractal
    if (fault.ahead) {
      CrossCoreSetFlag<4, PIPE_MTE3>(0);
      PipeBarrier<PIPE_MTE3>();
      DataCopy(l1[mine], sum, DataCopyParams{1, 8, 0, 0});
    }
    if (fault.hands_over) out_.FreeTensor(sum);
    CrossCoreSetFlag<4, PIPE_MTE3>(0);
  }
};

struct Cube {
  TPipe pipe;
  TBuf<TPosition::A1> a1_, b1_;
  TBuf<TPosition::A2> a2_;
  TBuf<TPosition::B2> b2_;
  TBuf<TPosition::CO1> c_;
  GlobalTensor<half> x;
  GlobalTensor<float> y;
  __aicore__ inline Cube(GM_ADDR source, GM_ADDR target) {
    x.SetGlobalBuffer((__gm__ half *)source, 256);
    y.SetGlobalBuffer((__gm__ float *)target, 256);
    pipe.InitBuffer(a1_, 512);
    pipe.InitBuffer(b1_, 512);
    pipe.InitBuffer(a2_, 512);
    pipe.InitBuffer(b2_, 512);
    pipe.InitBuffer(c_, 1024);
  }
  __aicore__ inline void Multiply(const Fault &fault) {
    const LocalTensor<half> a1 = a1_.Get<half>(), b1 = b1_.Get<half>(), a2 = a2_.Get<half>(),
                            b2 = b2_.Get<half>();
    const LocalTensor<float> c = c_.Get<float>();
    DataCopy(b1, x, Nd2NzParams{1, 16, 16, 0, 16, 16, 1, 0});
    SetFlag<HardEvent::MTE2_MTE1>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_MTE1>(EVENT_ID0);
    if (fault.fills_l0a) Fill(a2, InitConstValueParams<half>(1, 1, 0, half(0.0f)));
    if (fault.waits) CrossCoreWaitFlag<4, PIPE_MTE1>(0);
    if (fault.waits && !fault.for_one) CrossCoreWaitFlag<4, PIPE_MTE1>(16);
    if (fault.v1) LoadData(a2, a1, LoadData2DParams{0, 1, 1, 0, 0, false, 0});
    LoadData2DParamsV2 load;
    load.mStep = static_cast<uint16_t>(fault.m);
    load.kStep = 1;
    load.srcStride = fault.close ? 0 : 1;
    load.dstStride = 1;
    LoadData(a2, a1, load);
    if (fault.ahead) {
      CrossCoreWaitFlag<4, PIPE_MTE1>(0);
      CrossCoreWaitFlag<4, PIPE_MTE1>(16);
    }
    LoadData(b2, b1, LoadData2DParams{0, 1, 1, 0, static_cast<uint16_t>(fault.gap), false, 0});
    SetFlag<HardEvent::MTE1_M>(EVENT_ID0);
    WaitFlag<HardEvent::MTE1_M>(EVENT_ID0);
    MmadParams product;
    product.m = product.n = product.k = 16;
    Mmad(c, a2, b2, product);
    SetFlag<HardEvent::M_FIX>(EVENT_ID0);
    WaitFlag<HardEvent::M_FIX>(EVENT_ID0);
    Fixpipe(y, c, FixpipeParamsV220(16, 16, 16, 16, false));
  }
};

__aicore__ inline void Run(GM_ADDR a, GM_ADDR b, GM_ADDR c, const Fault &fault) {
  if ASCEND_IS_AIV {
    Vectors vectors(a);
    vectors.Send(fault);
  }
  if ASCEND_IS_AIC {
    Cube cube(b, c);
    cube.Multiply(fault);
  }
}

extern "C" __global__ __aicore__ void correct(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Run(a, b, c, Fault{});
}
extern "C" __global__ __aicore__ void no_wait_for_the_rows(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.waits = false;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void waits_for_one_vector_core(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.for_one = true;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void slot_filled_too_early(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.ahead = true;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void rows_not_yet_computed(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.hands_over = false;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void over_another_buffer(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.address = 512;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void behind_the_buffers(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.address = 1024;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void rows_of_fractals_in_l0a(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.v1 = true;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void fill_of_l0a(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.fills_l0a = true;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void columns_too_close(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.close = true;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void rows_copied_as_fractals(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.as_fractals = true;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void too_many_fractals_at_once(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.m = 256;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void gap_between_fractals(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.gap = 1;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void adds_to_no_elements(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.nothing = true;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void between_blocks(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.address = 16;
  Run(a, b, c, fault);
}
extern "C" __global__ __aicore__ void past_the_end_of_l1(GM_ADDR a, GM_ADDR b, GM_ADDR c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Fault fault;
  fault.address = 512 * 1024 - 256;
  Run(a, b, c, fault);
}
