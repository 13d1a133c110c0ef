// Small kernels, each with one fault of synchronisation between pipes or cores. `correct` is the same without
// one.
#include "kernel_operator.h"
using namespace AscendC;

template <HardEvent event> __aicore__ inline void Hand(int id = EVENT_ID0) {
  SetFlag<event>(id);
  WaitFlag<event>(id);
}

struct Parts {
  TPipe pipe;
  TBuf<TPosition::VECCALC> a_, b_;
  GlobalTensor<float> x, y;
  LocalTensor<float> a, b;
  __aicore__ inline Parts(GM_ADDR source, GM_ADDR target, uint32_t n) {
    x.SetGlobalBuffer((__gm__ float *)source, n);
    y.SetGlobalBuffer((__gm__ float *)target, n);
    pipe.InitBuffer(a_, n * sizeof(float));
    pipe.InitBuffer(b_, n * sizeof(float));
    a = a_.Get<float>();
    b = b_.Get<float>();
  }
};

extern "C" __global__ __aicore__ void correct(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  DataCopy(p.a, p.x, n);
  Hand<HardEvent::MTE2_V>();
  Adds(p.b, p.a, 1.0f, n);
  PipeBarrier<PIPE_V>();
  Muls(p.b, p.b, 2.0f, n);
  Hand<HardEvent::V_MTE3>();
  DataCopy(p.y, p.b, n);
}
extern "C" __global__ __aicore__ void no_wait_for_the_load(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  DataCopy(p.a, p.x, n);
  Adds(p.b, p.a, 1.0f, n);
}
extern "C" __global__ __aicore__ void wrong_event(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  DataCopy(p.a, p.x, n);
  Hand<HardEvent::MTE2_S>(); // the scalar unit waits, what it issues next does not read too early ...
  Hand<HardEvent::MTE2_V>();
  Adds(p.b, p.a, 1.0f, n);
  Hand<HardEvent::V_MTE2>(); // ... but the store is told of the wrong pipe
  DataCopy(p.y, p.b, n);
}
extern "C" __global__ __aicore__ void no_wait_for_the_result(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  Duplicate(p.b, 1.0f, n);
  DataCopy(p.y, p.b, n);
}
// The next load overwrites what the vector unit may still read.
extern "C" __global__ __aicore__ void load_over_a_read(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  DataCopy(p.a, p.x, n);
  Hand<HardEvent::MTE2_V>();
  Adds(p.b, p.a, 1.0f, n);
  DataCopy(p.a, p.x, n);
}
// The next result overwrites what the store may still read.
extern "C" __global__ __aicore__ void compute_over_a_store(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  Duplicate(p.b, 1.0f, n);
  Hand<HardEvent::V_MTE3>();
  DataCopy(p.y, p.b, n);
  Duplicate(p.b, 2.0f, n);
}
extern "C" __global__ __aicore__ void no_barrier(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  Duplicate(p.a, 1.0f, n);
  Adds(p.b, p.a, 1.0f, n);
}
extern "C" __global__ __aicore__ void scalar_reads_too_early(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  Duplicate(p.a, 1.0f, n);
  p.a.GetValue(0);
}
extern "C" __global__ __aicore__ void vector_reads_scalars_too_early(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  for (uint32_t i = 0; i < 8; ++i) p.a.SetValue(i, 1.0f);
  Adds(p.b, p.a, 1.0f, 8);
}
extern "C" __global__ __aicore__ void wait_without_set(GM_ADDR x, GM_ADDR y, uint32_t n) {
  WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
}
extern "C" __global__ __aicore__ void wait_for_another_event(GM_ADDR x, GM_ADDR y, uint32_t n) {
  SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
  WaitFlag<HardEvent::MTE2_V>(EVENT_ID1);
}
extern "C" __global__ __aicore__ void set_twice(GM_ADDR x, GM_ADDR y, uint32_t n) {
  SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
  SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
}
extern "C" __global__ __aicore__ void event_left_set(GM_ADDR x, GM_ADDR y, uint32_t n) {
  SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
}
extern "C" __global__ __aicore__ void atomic_left_on(GM_ADDR x, GM_ADDR y, uint32_t n) {
  SetAtomicAdd<float>();
}
extern "C" __global__ __aicore__ void adds_to_nothing(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  Duplicate(p.b, 1.0f, n);
  Hand<HardEvent::V_MTE3>();
  SetAtomicAdd<float>();
  DataCopy(p.y, p.b, n);
  SetAtomicNone();
}
// What was stored to global memory is loaded again before the store has ended.
extern "C" __global__ __aicore__ void load_after_store(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  Duplicate(p.b, 1.0f, n);
  Hand<HardEvent::V_MTE3>();
  DataCopy(p.y, p.b, n);
  DataCopy(p.a, p.y, n);
}
// Every core writes the same rows.
extern "C" __global__ __aicore__ void cores_write_the_same(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  Duplicate(p.b, 1.0f, n);
  Hand<HardEvent::V_MTE3>();
  DataCopy(p.y, p.b, n);
}
// Each core reads what the other one wrote; with a barrier in `exchange`, without one in
// `exchange_without_sync`.
template <bool synchronised> __aicore__ inline void Exchange(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n);
  const uint32_t half = n / 2, mine = GetBlockIdx() * half, other = half - mine;
  Duplicate(p.b, static_cast<float>(GetBlockIdx()), half);
  Hand<HardEvent::V_MTE3>();
  DataCopy(p.y[mine], p.b, half);
  if (synchronised) SyncAll();
  DataCopy(p.a, p.y[other], half);
}
extern "C" __global__ __aicore__ void exchange(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Exchange<true>(x, y, n);
}
extern "C" __global__ __aicore__ void exchange_without_sync(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Exchange<false>(x, y, n);
}
extern "C" __global__ __aicore__ void one_core_skips_the_barrier(GM_ADDR x, GM_ADDR y, uint32_t n) {
  if (GetBlockIdx() != 1) SyncAll();
}
