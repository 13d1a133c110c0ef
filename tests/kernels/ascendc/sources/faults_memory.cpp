// Small kernels, each with one fault of memory or of a queue.
#include "kernel_operator.h"
using namespace AscendC;

struct Parts {
  TPipe pipe;
  TQue<TPosition::VECIN, 2> in;
  TQue<TPosition::VECOUT, 2> out;
  TBuf<TPosition::VECCALC> work;
  GlobalTensor<float> x, y;
  uint32_t n;
  __aicore__ inline Parts(GM_ADDR source, GM_ADDR target, uint32_t count, uint32_t room) : n(count) {
    x.SetGlobalBuffer((__gm__ float *)source, n);
    y.SetGlobalBuffer((__gm__ float *)target, n);
    pipe.InitBuffer(in, 2, room * sizeof(float));
    pipe.InitBuffer(out, 1, room * sizeof(float));
    pipe.InitBuffer(work, room * sizeof(float));
  }
  __aicore__ inline LocalTensor<float> Load(uint32_t count) {
    LocalTensor<float> a = in.AllocTensor<float>();
    DataCopyPad(a, x, DataCopyExtParams{1, uint32_t(count * sizeof(float)), 0, 0, 0},
                DataCopyPadExtParams<float>{});
    in.EnQue(a);
    return in.DeQue<float>();
  }
  __aicore__ inline void Store(LocalTensor<float> b, uint32_t count) {
    out.EnQue(b);
    b = out.DeQue<float>();
    DataCopyPad(y, b, DataCopyExtParams{1, uint32_t(count * sizeof(float)), 0, 0, 0});
    out.FreeTensor(b);
  }
};

extern "C" __global__ __aicore__ void correct(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n), b = p.out.AllocTensor<float>();
  Adds(b, a, 1.0f, n);
  p.in.FreeTensor(a);
  p.Store(b, n);
}
extern "C" __global__ __aicore__ void ub_overflow(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 16384);
}
extern "C" __global__ __aicore__ void misaligned_operand(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n), b = p.out.AllocTensor<float>();
  Adds(b, a[1], 1.0f, n - 1);
}
extern "C" __global__ __aicore__ void misaligned_copy(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.in.AllocTensor<float>();
  DataCopy(a[4], p.x, 8);
}
extern "C" __global__ __aicore__ void copy_of_40_bytes(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.in.AllocTensor<float>();
  DataCopy(a, p.x, 10);
}
// The tail is rounded up to whole blocks, past the end of the tensor.
extern "C" __global__ __aicore__ void tail_past_the_end(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  GlobalTensor<float> whole;
  whole.SetGlobalBuffer((__gm__ float *)x);
  LocalTensor<float> a = p.in.AllocTensor<float>();
  DataCopy(a, whole, (n + 7) / 8 * 8);
}
extern "C" __global__ __aicore__ void past_the_global_buffer(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  p.x.SetGlobalBuffer((__gm__ float *)x, n / 2);
  p.Load(n);
}
extern "C" __global__ __aicore__ void tail_stored_past_the_end(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  const uint32_t whole = (n + 7) / 8 * 8;
  p.y.SetGlobalBuffer((__gm__ float *)y);
  LocalTensor<float> b = p.out.AllocTensor<float>();
  Duplicate(b, 0.0f, whole);
  p.Store(b, whole);
}
extern "C" __global__ __aicore__ void uninitialised_read(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n), b = p.out.AllocTensor<float>();
  Add(b, a, p.work.Get<float>(), n);
}
// What DataCopyPad leaves behind the tail of a row is unknown.
extern "C" __global__ __aicore__ void reads_the_padding(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n), b = p.out.AllocTensor<float>();
  Adds(b, a, 1.0f, (n + 7) / 8 * 8);
}
// A buffer that comes back from the queue holds nothing.
extern "C" __global__ __aicore__ void reads_a_recycled_buffer(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> b = p.out.AllocTensor<float>();
  Duplicate(b, 1.0f, n);
  p.Store(b, n);
  b = p.out.AllocTensor<float>();
  Adds(b, b, 1.0f, n);
}
extern "C" __global__ __aicore__ void count_past_the_tensor(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> b = p.out.AllocTensor<float>();
  Duplicate(b, 0.0f, 1025);
}
extern "C" __global__ __aicore__ void writes_the_input(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(y, x, n, 1024);
  LocalTensor<float> b = p.out.AllocTensor<float>();
  Duplicate(b, 0.0f, n);
  p.Store(b, n);
}
extern "C" __global__ __aicore__ void reads_the_output(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(y, x, n, 1024);
  p.Load(n);
}
extern "C" __global__ __aicore__ void small_work_tensor(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n), b = p.out.AllocTensor<float>();
  ReduceSum(b, a, p.work.Get<float>(8), n);
}
extern "C" __global__ __aicore__ void double_free(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n);
  p.in.FreeTensor(a);
  p.in.FreeTensor(a);
}
extern "C" __global__ __aicore__ void leak(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  p.Load(n);
}
extern "C" __global__ __aicore__ void left_in_the_queue(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> b = p.out.AllocTensor<float>();
  Duplicate(b, 0.0f, n);
  p.out.EnQue(b);
}
extern "C" __global__ __aicore__ void dequeue_of_nothing(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  p.in.DeQue<float>();
}
extern "C" __global__ __aicore__ void alloc_of_a_third_buffer(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  p.Load(n);
  p.Load(n);
  p.Load(n);
}
extern "C" __global__ __aicore__ void enqueued_twice(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n);
  p.in.EnQue(a);
}
extern "C" __global__ __aicore__ void foreign_tensor(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n);
  p.out.FreeTensor(a);
}
extern "C" __global__ __aicore__ void nine_buffers(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 64);
  TQue<TPosition::VECIN, 2> more;
  p.pipe.InitBuffer(more, 7, 64);
}
extern "C" __global__ __aicore__ void queue_before_init(GM_ADDR x, GM_ADDR y, uint32_t n) {
  TQue<TPosition::VECIN, 1> queue;
  queue.AllocTensor<float>();
}
extern "C" __global__ __aicore__ void too_many_runs(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 64);
  LocalTensor<float> a = p.in.AllocTensor<float>();
  DataCopyPad(a, p.x, DataCopyExtParams{4096, 4, 0, 0, 0}, DataCopyPadExtParams<float>{});
}
// The buffers leave 4 KiB of the unified buffer, Select needs 8.
extern "C" __global__ __aicore__ void select_without_room(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  TBuf<TPosition::VECCALC> rest;
  p.pipe.InitBuffer(rest, (192 - 16 - 4) * 1024);
  LocalTensor<float> a = p.Load(960), b = p.out.AllocTensor<float>();
  CompareScalar(p.work.Get<uint8_t>(), a, 0.0f, CMPMODE::LT, 960);
  PipeBarrier<PIPE_V>();
  Select(b, p.work.Get<uint8_t>(), a, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 960);
  p.in.FreeTensor(a);
  p.Store(b, 960);
}
extern "C" __global__ __aicore__ void reads_what_is_free(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n), b = p.out.AllocTensor<float>();
  p.in.FreeTensor(a);
  Adds(b, a, 1.0f, n);
  p.Store(b, n);
}
extern "C" __global__ __aicore__ void result_over_a_part(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n);
  Adds(a[8], a, 1.0f, n - 8);
}
extern "C" __global__ __aicore__ void widened_in_place(GM_ADDR x, GM_ADDR y, uint32_t n) {
  Parts p(x, y, n, 1024);
  LocalTensor<float> a = p.Load(n);
  LocalTensor<half> h = a.ReinterpretCast<half>();
  Cast(h, a, RoundMode::CAST_RINT, n); // narrower from the same byte on: allowed
  PipeBarrier<PIPE_V>();
  Cast(a, h, RoundMode::CAST_NONE, n);
}
