// torch ops of the kernels that run on cube and vector cores together: norm and product, flash attention.
#ifndef ATB_NO_MIXED // 310P has one kind of core
#include "launch.h"
#ifndef ATB_HOST_KERNELS
#include "atb_launchers.h"
#endif
#include "tiling/flash_attention.h"
#include "tiling/norm_matmul.h"

namespace {
using namespace atb_ascend;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

AtbCube DeviceCube() {
  const AtbSocRow &row = DeviceSoc();
  return {row.l1, row.l0a, row.l0b, row.l0c, row.arch};
}
Tensor Workspace(const Tensor &like, int64_t bytes) {
  // Freed when the op returns, and reused in stream order alone: by what is queued behind the kernel.
  return at::empty({(bytes + 3) / 4}, like.options().dtype(at::kFloat));
}
void CheckDense(const Tensor &tensor, const Tensor &like, int64_t dims, const char *name,
                const char *allowed) {
  TORCH_CHECK_VALUE(tensor.dim() == dims && tensor.is_contiguous(), name, " has shape ", tensor.sizes(),
                    " and strides ", tensor.strides(), "; allowed: dense ", allowed);
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, " is ", tensor.scalar_type(),
                   "; allowed: ", like.scalar_type());
}

Tensor NormMatmulMeta(const Tensor &x, const OptionalTensor &norm_weight, const Tensor &weight, double,
                      double, bool) {
  DtypeOf(x, "x");
  CheckDense(x, x, 2, "x", "(rows, width)");
  CheckDense(weight, x, 2, "weight", "(columns, width)");
  TORCH_CHECK_VALUE(weight.size(1) == x.size(1), "weight has shape ", weight.sizes(), "; allowed: (columns, ",
                    x.size(1), ")");
  if (norm_weight) {
    CheckDense(*norm_weight, x, 1, "norm_weight", "(width)");
    TORCH_CHECK_VALUE(norm_weight->size(0) == x.size(1), "norm_weight has shape ", norm_weight->sizes(),
                      "; allowed: (", x.size(1), ")");
  }
  return at::empty({x.size(0), weight.size(0)}, x.options());
}
Tensor NormMatmul(const Tensor &x, const OptionalTensor &norm_weight, const Tensor &weight, double eps,
                  double offset, bool cast_first) {
  Tensor out = NormMatmulMeta(x, norm_weight, weight, eps, offset, cast_first);
  if (out.numel() == 0) return out;
  const int32_t dtype = DtypeOf(x, "x");
  NormMatmulTiling tiling;
  Accept(TileNormMatmul(DeviceSoc().soc, DeviceCube(), dtype, x.size(0), x.size(1), weight.size(0),
                        norm_weight.has_value(), cast_first, static_cast<float>(eps),
                        static_cast<float>(offset), &tiling),
         "ascend_norm_matmul");
  const Tensor work = Workspace(x, NormMatmulWorkspace(tiling, dtype));
  Launch(ATB_KERNEL(norm_matmul), x, tiling, In(x), In(norm_weight), In(weight), Out(out), Work(work));
  return out;
}

// out (batch, heads, q_len, value_dim), and lse (batch, heads, q_len) in float.
std::tuple<Tensor, Tensor> FlashAttentionMeta(const Tensor &q, const Tensor &k, const Tensor &v, double,
                                              double, int64_t, int64_t) {
  DtypeOf(q, "q");
  CheckDense(q, q, 4, "q", "(batch, heads, q_len, head_dim)");
  CheckDense(k, q, 4, "k", "(batch, kv_heads, kv_len, head_dim)");
  CheckDense(v, q, 4, "v", "(batch, kv_heads, kv_len, value_dim)");
  TORCH_CHECK_VALUE(k.size(0) == q.size(0) && k.size(3) == q.size(3), "k has shape ", k.sizes(), "; q has ",
                    q.sizes());
  TORCH_CHECK_VALUE(v.sizes().slice(0, 3) == k.sizes().slice(0, 3), "v has shape ", v.sizes(), "; k has ",
                    k.sizes());
  return {at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options()),
          at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat))};
}
std::tuple<Tensor, Tensor> FlashAttention(const Tensor &q, const Tensor &k, const Tensor &v, double scale,
                                          double softcap, int64_t left, int64_t right) {
  auto result = FlashAttentionMeta(q, k, v, scale, softcap, left, right);
  if (std::get<0>(result).numel() == 0) return result;
  const int32_t dtype = DtypeOf(q, "q");
  FlashAttentionTiling tiling;
  Accept(TileFlashAttention(DeviceSoc().soc, DeviceCube(), dtype, q.size(0), q.size(1), k.size(1), q.size(2),
                            k.size(2), q.size(3), v.size(3), left, right, static_cast<float>(scale),
                            static_cast<float>(softcap), &tiling),
         "ascend_flash_attention");
  const Tensor work = Workspace(q, FlashWorkspace(tiling, dtype));
  Launch(ATB_KERNEL(flash_attention), q, tiling, In(q), In(k), In(v), Out(std::get<0>(result)),
         Out(std::get<1>(result)), Work(work));
  return result;
}
} // namespace

TORCH_LIBRARY_FRAGMENT(atb_modules, m) {
  m.def(
      "ascend_norm_matmul(Tensor x, Tensor? norm_weight, Tensor weight, float eps, float weight_offset=0.0, "
      "bool cast_first=False) -> Tensor");
  m.def("ascend_flash_attention(Tensor q, Tensor k, Tensor v, float scale, float softcap=0.0, int left=-1, "
        "int right=-1) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(atb_modules, PrivateUse1, m) {
  m.impl("ascend_norm_matmul", &NormMatmul);
  m.impl("ascend_flash_attention", &FlashAttention);
}
TORCH_LIBRARY_IMPL(atb_modules, Meta, m) {
  m.impl("ascend_norm_matmul", &NormMatmulMeta);
  m.impl("ascend_flash_attention", &FlashAttentionMeta);
}
#endif
