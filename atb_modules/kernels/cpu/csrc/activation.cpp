// Gated activations: act(gate) * up over rows.
#include "stream.h"
#include "table.h"
#include "threads.h"

namespace ATB_ISA {

template <class T, int KIND, bool STREAM> static void run_rows(const atb_gated_args *a) {
  share_items(a->threads, a->rows, a->rows * a->width * 4, [&](int64_t row) {
    const T *gate = (const T *)a->gate + row * a->gate_stride, *up = (const T *)a->up + row * a->up_stride;
    T *out = (T *)a->out + row * a->out_stride;
    int64_t i = 0;
    for (; i + W <= a->width; i += W) put<STREAM>(out + i, activate<KIND>(load(gate + i)) * load(up + i));
    if (i < a->width) {
      const int64_t n = a->width - i;
      store_part(out + i, activate<KIND>(load_part(gate + i, n)) * load_part(up + i, n), n);
    }
    if (STREAM) stream_fence();
  });
}

template <class T, int KIND> static void run(const atb_gated_args *a) {
  if (may_stream((const T *)a->out, a->rows * a->width, a->out_stride, a->gate) && a->out != a->up)
    run_rows<T, KIND, true>(a);
  else
    run_rows<T, KIND, false>(a);
}

template <class T> static void run_kind(const atb_gated_args *a) {
  switch (a->kind) {
  case ATB_SILU:
    return run<T, ATB_SILU>(a);
  case ATB_GELU:
    return run<T, ATB_GELU>(a);
  case ATB_GELU_TANH:
    return run<T, ATB_GELU_TANH>(a);
  default:
    return run<T, ATB_RELU2>(a);
  }
}

void gated(const atb_gated_args *a) {
  if (a->dtype == ATB_BF16)
    run_kind<bf16>(a);
  else if (a->dtype == ATB_F16)
    run_kind<f16>(a);
  else
    run_kind<float>(a);
}

} // namespace ATB_ISA
