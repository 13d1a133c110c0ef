// The torch op of the paged decode kernel: schema, implementation on the NPU, Meta implementation.
#ifndef ATB_NO_MIXED // 310P: the barrier between its cores is another one
#include "launch.h"
#ifndef ATB_HOST_KERNELS
#include "atb_launchers.h"
#endif
#include "tiling/paged_decode.h"

namespace {
using namespace atb_ascend;
using at::Tensor;

void CheckPages(const Tensor &pages, const Tensor &q, const char *name) {
  TORCH_CHECK_VALUE(pages.dim() == 4 && pages.is_contiguous(), name, " has shape ", pages.sizes(),
                    "; allowed: dense (pages, kv_heads, page_size, head_dim)");
  TORCH_CHECK_TYPE(pages.scalar_type() == q.scalar_type(), name, " is ", pages.scalar_type(),
                   "; allowed: ", q.scalar_type());
}
void CheckInts(const Tensor &tensor, int64_t dims, int64_t batch, const char *name) {
  TORCH_CHECK_VALUE(tensor.dim() == dims && tensor.size(0) == batch && tensor.is_contiguous(), name,
                    " has shape ", tensor.sizes(), "; allowed: dense, ", dims, " dimensions, the first ",
                    batch);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, name, " is ", tensor.scalar_type(), "; allowed: int32");
}

// out (batch, heads, value_dim), and lse (heads, batch) in float.
std::tuple<Tensor, Tensor> PagedDecodeMeta(const Tensor &q, const Tensor &k_pages, const Tensor &v_pages,
                                           const Tensor &block_table, const Tensor &kv_lengths, double,
                                           double, int64_t, int64_t) {
  DtypeOf(q, "q");
  TORCH_CHECK_VALUE(q.dim() == 3 && (q.size(2) <= 1 || q.stride(2) == 1) &&
                        (q.size(1) <= 1 || q.stride(1) == q.size(2)),
                    "q has shape ", q.sizes(), " and strides ", q.strides(),
                    "; allowed: (batch, heads, head_dim) with dense heads");
  CheckPages(k_pages, q, "k_pages");
  CheckPages(v_pages, q, "v_pages");
  TORCH_CHECK_VALUE(k_pages.size(3) == q.size(2), "k_pages has head size ", k_pages.size(3),
                    "; allowed: ", q.size(2));
  TORCH_CHECK_VALUE(k_pages.sizes().slice(0, 3) == v_pages.sizes().slice(0, 3), "v_pages has shape ",
                    v_pages.sizes(), "; k_pages has ", k_pages.sizes());
  CheckInts(block_table, 2, q.size(0), "block_table");
  CheckInts(kv_lengths, 1, q.size(0), "kv_lengths");
  return {at::empty({q.size(0), q.size(1), v_pages.size(3)}, q.options()),
          at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat))};
}
std::tuple<Tensor, Tensor> PagedDecode(const Tensor &q, const Tensor &k_pages, const Tensor &v_pages,
                                       const Tensor &block_table, const Tensor &kv_lengths, double scale,
                                       double softcap, int64_t left, int64_t max_length) {
  auto result =
      PagedDecodeMeta(q, k_pages, v_pages, block_table, kv_lengths, scale, softcap, left, max_length);
  if (std::get<0>(result).numel() == 0) return result;
  PagedDecodeShape shape;
  shape.batch = q.size(0);
  shape.heads = q.size(1);
  shape.kv_heads = k_pages.size(1);
  shape.head_dim = q.size(2);
  shape.value_dim = v_pages.size(3);
  shape.page_size = k_pages.size(2);
  shape.pages = k_pages.size(0);
  shape.max_blocks = block_table.size(1);
  shape.q_step = q.size(0) > 1 ? q.stride(0) : q.size(1) * q.size(2);
  shape.max_length = max_length < 0 ? block_table.size(1) * k_pages.size(2) : max_length;
  shape.left = left;
  PagedDecodeTiling tiling;
  Accept(TilePagedDecode(DeviceSoc().soc, DtypeOf(q, "q"), shape, static_cast<float>(scale),
                         static_cast<float>(softcap), &tiling),
         "ascend_paged_decode");
  // Freed when this returns, and reused in stream order alone: what is queued behind the kernel.
  const Tensor work = at::empty({PagedDecodeWorkspace(tiling) / 4}, q.options().dtype(at::kFloat));
  Launch(ATB_KERNEL(paged_decode), q, tiling, In(q), In(k_pages), In(v_pages), In(block_table),
         In(kv_lengths), Out(std::get<0>(result)), Out(std::get<1>(result)), Work(work));
  return result;
}
} // namespace

TORCH_LIBRARY_FRAGMENT(atb_modules, m) {
  m.def(
      "ascend_paged_decode(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor kv_lengths, "
      "float scale, float softcap=0.0, int left=-1, int max_length=-1) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(atb_modules, PrivateUse1, m) {
  m.impl("ascend_paged_decode", &PagedDecode);
}
TORCH_LIBRARY_IMPL(atb_modules, Meta, m) {
  m.impl("ascend_paged_decode", &PagedDecodeMeta);
}
#endif
