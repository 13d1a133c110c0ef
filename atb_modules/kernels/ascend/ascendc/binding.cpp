// torch ops of the vector kernels, named ascend_*: schemas, implementations on the NPU, and Meta
// implementations.
//
// The ops take dense tensors (rows may be apart where the schema's comment says so) and check what the kernel
// relies on; copies and gradients are the business of the Python above them. An empty tensor launches
// nothing.
#include "launch.h"
#ifndef ATB_HOST_KERNELS
#include "atb_launchers.h" // the aclrtlaunch_*.h of all kernels, collected by CMakeLists.txt
#endif
#include "tiling/gated.h"
#include "tiling/lse_merge.h"
#include "tiling/rms_norm.h"
#include "tiling/rms_norm_backward.h"
#include "tiling/rotary_append.h"

namespace {
using namespace atb_ascend;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void CheckLike(const Tensor &tensor, const Tensor &other, const char *name) {
  TORCH_CHECK_VALUE(tensor.sizes() == other.sizes(), name, " has shape ", tensor.sizes(),
                    "; allowed: ", other.sizes());
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), name, " is ", tensor.scalar_type(),
                   "; allowed: ", other.scalar_type());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " has strides ", tensor.strides(), "; allowed: dense");
}
void CheckRows(const Tensor &x, const OptionalTensor &weight) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.is_contiguous(), "x has shape ", x.sizes(), " and strides ",
                    x.strides(), "; allowed: dense (rows, width)");
  DtypeOf(x, "x");
  if (!weight) return;
  TORCH_CHECK_VALUE(weight->dim() == 1 && weight->size(0) == x.size(1) && weight->is_contiguous(),
                    "weight has shape ", weight->sizes(), "; allowed: dense (", x.size(1), ")");
  TORCH_CHECK_TYPE(weight->scalar_type() == x.scalar_type(), "weight is ", weight->scalar_type(),
                   "; allowed: ", x.scalar_type());
}
Tensor Stats(const Tensor &x, bool keep) {
  return at::empty({keep ? x.size(0) : 0}, x.options().dtype(at::kFloat));
}

std::tuple<Tensor, Tensor> RmsNormMeta(const Tensor &x, const OptionalTensor &weight, double, double, bool,
                                       bool keep) {
  CheckRows(x, weight);
  return {at::empty_like(x), Stats(x, keep)};
}
std::tuple<Tensor, Tensor> RmsNorm(const Tensor &x, const OptionalTensor &weight, double eps, double offset,
                                   bool cast_first, bool keep) {
  auto result = RmsNormMeta(x, weight, eps, offset, cast_first, keep);
  if (x.numel() == 0) return result;
  RmsNormTiling tiling;
  Accept(TileRmsNorm(DeviceSoc().soc, DtypeOf(x, "x"), x.size(0), x.size(1), false, weight.has_value(),
                     cast_first, keep, static_cast<float>(eps), static_cast<float>(offset), &tiling),
         "ascend_rms_norm");
  Launch(ATB_KERNEL(rms_norm), x, tiling, In(x), In(weight), Out(std::get<0>(result)),
         Out(std::get<1>(result)));
  return result;
}

std::tuple<Tensor, Tensor, Tensor> AddRmsNormMeta(const Tensor &x, const Tensor &residual,
                                                  const OptionalTensor &weight, double, double, bool,
                                                  bool keep) {
  CheckRows(x, weight);
  CheckLike(residual, x, "residual");
  return {at::empty_like(x), at::empty_like(x), Stats(x, keep)};
}
std::tuple<Tensor, Tensor, Tensor> AddRmsNorm(const Tensor &x, const Tensor &residual,
                                              const OptionalTensor &weight, double eps, double offset,
                                              bool cast_first, bool keep) {
  auto result = AddRmsNormMeta(x, residual, weight, eps, offset, cast_first, keep);
  if (x.numel() == 0) return result;
  RmsNormTiling tiling;
  Accept(TileRmsNorm(DeviceSoc().soc, DtypeOf(x, "x"), x.size(0), x.size(1), true, weight.has_value(),
                     cast_first, keep, static_cast<float>(eps), static_cast<float>(offset), &tiling),
         "ascend_add_rms_norm");
  Launch(ATB_KERNEL(add_rms_norm), x, tiling, In(x), In(residual), In(weight), Out(std::get<0>(result)),
         Out(std::get<1>(result)), Out(std::get<2>(result)));
  return result;
}

// The second result holds one row for each core, in float: their sum is the gradient of the weight.
std::tuple<Tensor, Tensor> RmsNormBackwardMeta(const Tensor &grad_y, const Tensor &x, const Tensor &rstd,
                                               const OptionalTensor &weight, const OptionalTensor &grad_sum,
                                               double) {
  CheckRows(x, weight);
  CheckLike(grad_y, x, "grad_y");
  if (grad_sum) CheckLike(*grad_sum, x, "grad_sum");
  TORCH_CHECK_VALUE(rstd.dim() == 1 && rstd.size(0) == x.size(0) && rstd.is_contiguous(), "rstd has shape ",
                    rstd.sizes(), "; allowed: dense (", x.size(0), ")");
  TORCH_CHECK_TYPE(rstd.scalar_type() == at::kFloat, "rstd is ", rstd.scalar_type(), "; allowed: float32");
  const int64_t blocks = weight ? AtbMin(x.size(0), DeviceSoc().soc.vector_cores) : 0;
  return {at::empty_like(x), at::empty({blocks, x.size(1)}, x.options().dtype(at::kFloat))};
}
std::tuple<Tensor, Tensor> RmsNormBackward(const Tensor &grad_y, const Tensor &x, const Tensor &rstd,
                                           const OptionalTensor &weight, const OptionalTensor &grad_sum,
                                           double offset) {
  auto result = RmsNormBackwardMeta(grad_y, x, rstd, weight, grad_sum, offset);
  if (x.numel() == 0) return result;
  RmsNormBackwardTiling tiling;
  Accept(TileRmsNormBackward(DeviceSoc().soc, DtypeOf(x, "x"), x.size(0), x.size(1), weight.has_value(),
                             grad_sum.has_value(), static_cast<float>(offset), &tiling),
         "ascend_rms_norm_backward");
  Launch(ATB_KERNEL(rms_norm_backward), x, tiling, In(grad_y), In(x), In(rstd), In(weight), In(grad_sum),
         Out(std::get<0>(result)), Out(std::get<1>(result)));
  return result;
}

int32_t GateOf(c10::string_view kind) {
  if (kind == "silu") return ATB_SILU;
  if (kind == "gelu_tanh") return ATB_GELU_TANH;
  TORCH_CHECK_VALUE(kind == "quick_gelu", "kind is ", std::string(kind),
                    "; allowed: silu, gelu_tanh, quick_gelu");
  return ATB_QUICK_GELU;
}
Tensor GatedMeta(const Tensor &gate, const Tensor &up, c10::string_view kind) {
  GateOf(kind);
  DtypeOf(gate, "gate");
  for (const auto &[tensor, name] : {std::pair{&gate, "gate"}, std::pair{&up, "up"}})
    TORCH_CHECK_VALUE(tensor->dim() == 2 && (tensor->size(1) <= 1 || tensor->stride(1) == 1), name,
                      " has shape ", tensor->sizes(), " and strides ", tensor->strides(),
                      "; allowed: (rows, width), dense rows");
  TORCH_CHECK_VALUE(up.sizes() == gate.sizes(), "up has shape ", up.sizes(), "; allowed: ", gate.sizes());
  TORCH_CHECK_TYPE(up.scalar_type() == gate.scalar_type(), "up is ", up.scalar_type(),
                   "; allowed: ", gate.scalar_type());
  return at::empty(gate.sizes(), gate.options());
}
Tensor GatedActivation(const Tensor &gate, const Tensor &up, c10::string_view kind) {
  Tensor out = GatedMeta(gate, up, kind);
  if (out.numel() == 0) return out;
  GatedTiling tiling;
  const int64_t width = gate.size(1);
  const auto step = [width](const Tensor &t) { return t.size(0) > 1 ? t.stride(0) : width; };
  Accept(TileGated(DeviceSoc().soc, DtypeOf(gate, "gate"), gate.size(0), width, step(gate), step(up),
                   GateOf(kind), &tiling),
         "ascend_gated_activation");
  Launch(ATB_KERNEL(gated), gate, tiling, In(gate), In(up), Out(out));
  return out;
}

void CheckHeads(const Tensor &x, const Tensor &q, const char *name) {
  TORCH_CHECK_VALUE(x.dim() == 3 && x.size(0) == q.size(0) && (x.size(2) <= 1 || x.stride(2) == 1) &&
                        (x.size(1) <= 1 || x.stride(1) == x.size(2)),
                    name, " has shape ", x.sizes(), " and strides ", x.strides(),
                    "; allowed: (tokens, heads, head_dim) with dense heads");
  TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type(), name, " is ", x.scalar_type(),
                   "; allowed: ", q.scalar_type());
}
void RotaryAppendMeta(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cos, const Tensor &sin,
                      const Tensor &k_pages, const Tensor &v_pages, const Tensor &slots, bool) {
  DtypeOf(q, "q");
  CheckHeads(q, q, "q");
  CheckHeads(k, q, "k");
  CheckHeads(v, q, "v");
  TORCH_CHECK_VALUE(k.size(2) == q.size(2), "k has head size ", k.size(2), "; allowed: ", q.size(2));
  TORCH_CHECK_VALUE(v.size(1) == k.size(1), "v has ", v.size(1), " heads; allowed: ", k.size(1));
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(0) == q.size(0) && cos.is_contiguous(), "cos has shape ",
                    cos.sizes(), "; allowed: dense (tokens, rotated pairs)");
  TORCH_CHECK_TYPE(cos.scalar_type() == at::kFloat, "cos is ", cos.scalar_type(), "; allowed: float32");
  CheckLike(sin, cos, "sin");
  for (const auto &[pages, x, name] :
       {std::tuple{&k_pages, &k, "k_pages"}, std::tuple{&v_pages, &v, "v_pages"}}) {
    TORCH_CHECK_VALUE(pages->dim() == 4 && pages->size(1) == x->size(1) && pages->size(3) == x->size(2) &&
                          pages->is_contiguous(),
                      name, " has shape ", pages->sizes(), "; allowed: dense (pages, ", x->size(1),
                      ", page_size, ", x->size(2), ")");
    TORCH_CHECK_TYPE(pages->scalar_type() == q.scalar_type(), name, " is ", pages->scalar_type(),
                     "; allowed: ", q.scalar_type());
  }
  TORCH_CHECK_VALUE(k_pages.size(0) == v_pages.size(0) && k_pages.size(2) == v_pages.size(2),
                    "v_pages has shape ", v_pages.sizes(), "; k_pages has ", k_pages.size(0), " pages of ",
                    k_pages.size(2), " tokens");
  TORCH_CHECK_VALUE(slots.dim() == 1 && slots.size(0) == q.size(0) && slots.is_contiguous(),
                    "slots has shape ", slots.sizes(), "; allowed: dense (", q.size(0), ")");
  TORCH_CHECK_TYPE(slots.scalar_type() == at::kInt || slots.scalar_type() == at::kLong, "slots is ",
                   slots.scalar_type(), "; allowed: int32, int64");
}
void RotaryAppend(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cos, const Tensor &sin,
                  const Tensor &k_pages, const Tensor &v_pages, const Tensor &slots, bool interleaved) {
  RotaryAppendMeta(q, k, v, cos, sin, k_pages, v_pages, slots, interleaved);
  if (q.size(0) == 0) return;
  RotaryAppendShape shape;
  shape.tokens = q.size(0);
  shape.heads = q.size(1);
  shape.kv_heads = k.size(1);
  shape.head_dim = q.size(2);
  shape.value_dim = v.size(2);
  shape.pairs = cos.size(1);
  shape.q_step = q.stride(0);
  shape.k_step = k.stride(0);
  shape.v_step = v.stride(0);
  shape.page_size = k_pages.size(2);
  shape.pages = k_pages.size(0);
  shape.interleaved = interleaved;
  shape.slots_int64 = slots.scalar_type() == at::kLong;
  RotaryAppendTiling tiling;
  Accept(TileRotaryAppend(DeviceSoc().soc, DtypeOf(q, "q"), shape, &tiling), "ascend_rotary_append");
  Launch(ATB_KERNEL(rotary_append), q, tiling, InOut(q), In(k), In(v), In(cos), In(sin), InOut(k_pages),
         InOut(v_pages), In(slots));
}

std::tuple<Tensor, Tensor> LseMergeMeta(const Tensor &outs, const Tensor &lses) {
  DtypeOf(outs, "outs");
  TORCH_CHECK_VALUE(outs.dim() == 3 && outs.is_contiguous(), "outs has shape ", outs.sizes(),
                    "; allowed: dense (parts, rows, width)");
  TORCH_CHECK_VALUE(
      lses.dim() == 2 && lses.size(0) == outs.size(0) && lses.size(1) == outs.size(1) && lses.is_contiguous(),
      "lses has shape ", lses.sizes(), "; allowed: dense (", outs.size(0), ", ", outs.size(1), ")");
  TORCH_CHECK_TYPE(lses.scalar_type() == at::kFloat, "lses is ", lses.scalar_type(), "; allowed: float32");
  return {at::empty({outs.size(1), outs.size(2)}, outs.options()), at::empty({lses.size(1)}, lses.options())};
}
std::tuple<Tensor, Tensor> LseMerge(const Tensor &outs, const Tensor &lses) {
  auto result = LseMergeMeta(outs, lses);
  if (std::get<0>(result).numel() == 0) return result;
  LseMergeTiling tiling;
  Accept(
      TileLseMerge(DeviceSoc().soc, DtypeOf(outs, "outs"), outs.size(0), outs.size(1), outs.size(2), &tiling),
      "ascend_lse_merge");
  Launch(ATB_KERNEL(lse_merge), outs, tiling, In(outs), In(lses), Out(std::get<0>(result)),
         Out(std::get<1>(result)));
  return result;
}
} // namespace

TORCH_LIBRARY_FRAGMENT(atb_modules, m) {
  m.def(
      "ascend_rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, bool cast_first=False, "
      "bool keep_rstd=True) -> (Tensor, Tensor)");
  m.def("ascend_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, "
        "bool cast_first=False, bool keep_rstd=True) -> (Tensor, Tensor, Tensor)");
  m.def(
      "ascend_rms_norm_backward(Tensor grad_y, Tensor x, Tensor rstd, Tensor? weight, Tensor? grad_sum=None, "
      "float weight_offset=0.0) -> (Tensor, Tensor)");
  m.def("ascend_gated_activation(Tensor gate, Tensor up, str kind) -> Tensor");
  m.def("ascend_rotary_append(Tensor(a!) q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(b!) k_pages, "
        "Tensor(c!) v_pages, Tensor slots, bool interleaved=False) -> ()");
  m.def("ascend_lse_merge(Tensor outs, Tensor lses) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(atb_modules, PrivateUse1, m) {
  m.impl("ascend_rms_norm", &RmsNorm);
  m.impl("ascend_add_rms_norm", &AddRmsNorm);
  m.impl("ascend_rms_norm_backward", &RmsNormBackward);
  m.impl("ascend_gated_activation", &GatedActivation);
  m.impl("ascend_rotary_append", &RotaryAppend);
  m.impl("ascend_lse_merge", &LseMerge);
}
TORCH_LIBRARY_IMPL(atb_modules, Meta, m) {
  m.impl("ascend_rms_norm", &RmsNormMeta);
  m.impl("ascend_add_rms_norm", &AddRmsNormMeta);
  m.impl("ascend_rms_norm_backward", &RmsNormBackwardMeta);
  m.impl("ascend_gated_activation", &GatedMeta);
  m.impl("ascend_rotary_append", &RotaryAppendMeta);
  m.impl("ascend_lse_merge", &LseMergeMeta);
}
