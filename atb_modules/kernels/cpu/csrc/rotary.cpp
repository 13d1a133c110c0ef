// Rotary embedding, alone and together with the append of keys and values to the pages.
#include "rotate.h"
#include "table.h"
#include "threads.h"

namespace ATB_ISA {

template <class T> static void run(const atb_rotary_args *a) {
  share_items(a->threads, a->tokens, a->tokens * a->heads * a->head_dim, [&](int64_t t) {
    for (int64_t h = 0; h < a->heads; ++h)
      rotate_head((const T *)a->x + t * a->x_token + h * a->x_head, (T *)a->out + t * a->out_token + h * a->out_head,
                  a->cos + t * a->half, a->sin + t * a->half, a->half, a->head_dim, a->interleaved);
  });
}

void rotary(const atb_rotary_args *a) {
  if (a->dtype == ATB_BF16)
    run<bf16>(a);
  else if (a->dtype == ATB_F16)
    run<f16>(a);
  else
    run<float>(a);
}

template <class T, class P> static void run_append(const atb_append_args *a) {
  const int64_t elements = a->tokens * (a->heads + 2 * a->kv_heads) * a->head_dim;
  share_items(a->threads, a->tokens, elements, [&](int64_t t) {
    const float *cos = a->cos ? a->cos + t * a->half : nullptr, *sin = a->cos ? a->sin + t * a->half : nullptr;
    const int64_t half = a->cos ? a->half : 0;
    if (a->q)
      for (int64_t h = 0; h < a->heads; ++h) {
        T *q = (T *)a->q + t * a->q_token + h * a->q_head;
        rotate_head((const T *)q, q, cos, sin, half, a->head_dim, a->interleaved);
      }
    const int64_t slot = a->slots[t];
    if (slot < 0) return;
    const int64_t page = slot / a->page_size, offset = slot % a->page_size;
    for (int64_t h = 0; h < a->kv_heads; ++h) {
      const int64_t at = ((page * a->kv_heads + h) * a->page_size + offset) * a->head_dim;
      rotate_head((const T *)a->k + t * a->k_token + h * a->k_head, (P *)a->k_pages + at, cos, sin, half, a->head_dim,
                  a->interleaved);
      rotate_head((const T *)a->v + t * a->v_token + h * a->v_head, (P *)a->v_pages + at, cos, sin, 0, a->head_dim,
                  false);
    }
  });
}

template <class T> static void append_pages(const atb_append_args *a) {
  if (a->page_dtype == ATB_BF16)
    run_append<T, bf16>(a);
  else if (a->page_dtype == ATB_F16)
    run_append<T, f16>(a);
  else
    run_append<T, float>(a);
}

void append(const atb_append_args *a) {
  if (a->dtype == ATB_BF16)
    append_pages<bf16>(a);
  else if (a->dtype == ATB_F16)
    append_pages<f16>(a);
  else
    append_pages<float>(a);
}

} // namespace ATB_ISA
