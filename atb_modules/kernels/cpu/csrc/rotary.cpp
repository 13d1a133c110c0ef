// Rotary embedding, alone and together with the append of keys and values to the pages.
#include "append_codes.h"
#include "convert.h"
#include "rotate.h"
#include "table.h"
#include "threads.h"
#include <stdlib.h>

namespace ATB_ISA {

template <class T, bool STREAM> static void run_heads(const atb_rotary_args *a) {
  share_items(a->threads, a->tokens, a->tokens * a->heads * a->head_dim, [&](int64_t t) {
    for (int64_t h = 0; h < a->heads; ++h)
      rotate_head<STREAM>((const T *)a->x + t * a->x_token + h * a->x_head,
                          (T *)a->out + t * a->out_token + h * a->out_head, a->cos + t * a->half,
                          a->sin + t * a->half, a->half, a->head_dim, a->interleaved);
    if (STREAM) stream_fence();
  });
}

template <class T> static void run(const atb_rotary_args *a) {
  const bool whole = a->half % W == 0 && a->head_dim % W == 0 && a->out_token % W == 0 && !a->interleaved;
  if (whole && may_stream((const T *)a->out, a->tokens * a->heads * a->head_dim, a->out_head, a->x))
    run_heads<T, true>(a);
  else
    run_heads<T, false>(a);
}

void rotary(const atb_rotary_args *a) {
  if (a->dtype == ATB_BF16)
    run<bf16>(a);
  else if (a->dtype == ATB_F16)
    run<f16>(a);
  else
    run<float>(a);
}

// One head through float32: read, rotate, write in the other dtype. space holds head_dim floats.
static void move_head(const void *x, int dtype, void *out, int out_dtype, const float *cos, const float *sin,
                      const atb_append_args *a, float *space) {
  read_floats(x, dtype, a->head_dim, space);
  if (cos) rotate_head<false>(space, space, cos, sin, a->half, a->head_dim, a->interleaved);
  write_floats(space, a->head_dim, out, out_dtype);
}

void append(const atb_append_args *a) {
  const int64_t elements = a->tokens * (a->heads + 2 * a->kv_heads) * a->head_dim;
  const int64_t size = element_size(a->dtype), page_size = element_size(a->page_dtype);
  const int threads = elements < SHARED_WORK ? 1 : (int)min64(a->threads, a->tokens);
  const bool codes = a->page_dtype == ATB_I8;
  const int64_t own = max64(a->head_dim + W, codes ? codes_space(a) : 0);
  float *memory = (float *)malloc(threads * own * sizeof(float));
  on_threads(threads, [&](int thread, int count) {
    float *space = memory + thread * own;
    const Range mine = share(a->tokens, thread, count);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      const float *cos = a->cos ? a->cos + t * a->half : nullptr,
                  *sin = a->cos ? a->sin + t * a->half : nullptr;
      for (int64_t h = 0; a->q && h < a->heads; ++h) {
        char *q = (char *)a->q + (t * a->q_token + h * a->q_head) * size;
        move_head(q, a->dtype, q, a->dtype, cos, sin, a, space);
      }
      const int64_t slot = a->slots[t];
      if (slot < 0 || codes) continue;
      const int64_t page = slot / a->page_size, offset = slot % a->page_size;
      for (int64_t h = 0; h < a->kv_heads; ++h) {
        const int64_t at = ((page * a->kv_heads + h) * a->page_size + offset) * a->head_dim * page_size;
        move_head((const char *)a->k + (t * a->k_token + h * a->k_head) * size, a->dtype,
                  (char *)a->k_pages + at, a->page_dtype, cos, sin, a, space);
        move_head((const char *)a->v + (t * a->v_token + h * a->v_head) * size, a->dtype,
                  (char *)a->v_pages + at, a->page_dtype, nullptr, nullptr, a, space);
      }
    }
    if (codes) append_codes(a, thread, count, space);
  });
  free(memory);
}

} // namespace ATB_ISA
