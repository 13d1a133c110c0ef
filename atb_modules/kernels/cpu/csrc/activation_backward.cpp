// Gradients of gated activations, with a factor a row: one pass over what the eager formulas read many times.
#include "simd.h"
#include "table.h"
#include "threads.h"

namespace ATB_ISA {

struct ValueSlope {
  vf value, slope;
};
// The logistic function and its complement, neither as a difference of near numbers.
struct Logistic {
  vf of, rest;
};
ATB_INLINE Logistic logistic(vf x) {
  const vf t = exp((vf)((vu)x | 0x80000000u)), whole = 1.0f / (1.0f + t), part = t * whole;
  return {x > 0.0f ? whole : (x == x ? part : x), x > 0.0f ? part : (x == x ? whole : x)};
}
// act(x) and act'(x).
template <int KIND> ATB_INLINE ValueSlope activate_both(vf x) {
  if (KIND == ATB_SILU) {
    const Logistic s = logistic(x);
    const vf value = x * s.of;
    return {value, s.of + value * s.rest};
  }
  if (KIND == ATB_GELU) {
    const vf magnitude = (vf)((vu)x & 0x7fffffffu),
             tail = 0.5f * erfc_positive(magnitude * 0.70710678118654752f);
    const vf below = x > 0.0f ? 1.0f - tail : tail;
    return {x > 0.0f ? x - x * tail : x * tail, below + x * 0.39894228040143268f * exp(-0.5f * x * x)};
  }
  if (KIND == ATB_GELU_TANH) {
    const Logistic s = logistic(1.5957691216057308f * (x + 0.044715f * x * x * x));
    const vf bend = s.of * s.rest; // 0 where the cube may have overflown
    const vf more = x * bend * (1.5957691216057308f * (1.0f + 0.134145f * x * x));
    return {x * s.of, bend == 0.0f ? s.of : s.of + more};
  }
  const vf positive = x > 0.0f ? x : (x == x ? (vf){} : x);
  return {positive * positive, 2.0f * positive};
}

template <class T, int KIND> static void run_rows(const atb_gated_backward_args *a) {
  share_items(a->threads, a->rows, a->rows * a->width * 8, [&](int64_t row) {
    const T *grad = (const T *)a->grad + row * a->grad_stride,
            *gate = (const T *)a->gate + row * a->gate_stride;
    const T *up = a->up ? (const T *)a->up + row * a->up_stride : nullptr;
    T *d_gate = (T *)a->d_gate + row * a->d_gate_stride;
    T *d_up = up ? (T *)a->d_up + row * a->d_up_stride : nullptr;
    T *out = a->out ? (T *)a->out + row * a->out_stride : nullptr;
    const vf factor = set1(a->factors ? a->factors[row] : 1.0f);
    vf total = {};
    const auto step = [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
      const vf g = get(grad + i), u = up ? get(up + i) : set1(1.0f);
      const ValueSlope act = activate_both<KIND>(get(gate + i));
      const vf hidden = act.value * u, weighted = g * factor;
      total += g * hidden;
      if (out) put(out + i, hidden);
      put(d_gate + i, weighted * u * act.slope);
      if (up) put(d_up + i, weighted * act.value);
    };
    int64_t i = 0;
    for (; i + W <= a->width; i += W)
      step(i, [](const T *p) { return load(p); }, [](T *p, vf v) { store(p, v); });
    if (i < a->width) {
      const int64_t n = a->width - i;
      step(i, [n](const T *p) { return load_part(p, n); }, [n](T *p, vf v) { store_part(p, v, n); });
    }
    if (a->d_factors) a->d_factors[row] = sum(total);
  });
}

template <class T> static void run_kind(const atb_gated_backward_args *a) {
  switch (a->kind) {
  case ATB_SILU:
    return run_rows<T, ATB_SILU>(a);
  case ATB_GELU:
    return run_rows<T, ATB_GELU>(a);
  case ATB_GELU_TANH:
    return run_rows<T, ATB_GELU_TANH>(a);
  default:
    return run_rows<T, ATB_RELU2>(a);
  }
}

void gated_backward(const atb_gated_backward_args *a) {
  if (a->dtype == ATB_BF16)
    run_kind<bf16>(a);
  else if (a->dtype == ATB_F16)
    run_kind<f16>(a);
  else
    run_kind<float>(a);
}

} // namespace ATB_ISA
