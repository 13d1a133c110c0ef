// Keys and values appended to int8 pages: every page and head has the scale that its largest value needs.
#include "append_codes.h"
#include "convert.h"
#include "rotate.h"
#include "threads.h"

namespace ATB_ISA {

// The tensors of keys or of values.
struct Side {
  const void *x;
  int64_t token, head;
  int8_t *pages;
  float *scales;
  const float *cos, *sin; // null: not rotated
};

// codes = x / scale for n values; a scale of zero means that all of them are zero.
static void write_codes(const float *x, float scale, int64_t n, int8_t *codes) {
  const vf by = set1(scale > 0.0f ? scale : 1.0f);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(codes + i, load(x + i) / by);
  if (i < n) store_part(codes + i, load_part(x + i, n - i) / by, n - i);
}

static void round_again(int8_t *codes, float ratio, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(codes + i, load(codes + i) * ratio);
  if (i < n) store_part(codes + i, load_part(codes + i, n - i) * ratio, n - i);
}

static float largest(const float *x, int64_t n) {
  vf top = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) top = vmax((vf)((vu)load(x + i) & 0x7fffffffu), top);
  if (i < n) top = vmax((vf)((vu)load_part(x + i, n - i) & 0x7fffffffu), top);
  return max(top);
}

// The tokens [first, end) of one head: those that are written lie in one page, in rising slots; space holds
// head_dim floats for each of them.
static void write_run(const atb_append_args *a, const Side &side, int64_t h, int64_t first, int64_t end,
                      float *space) {
  const int64_t d = a->head_dim, page = a->slots[first] / a->page_size, held = a->slots[first] % a->page_size;
  float *row = space;
  for (int64_t t = first; t < end; ++t) {
    if (a->slots[t] < 0) continue;
    const int64_t at = t * side.token + h * side.head;
    read_floats((const char *)side.x + at * element_size(a->dtype), a->dtype, d, row);
    if (side.cos)
      rotate_head<false>(row, row, side.cos + t * a->half, side.sin + t * a->half, a->half, d,
                         a->interleaved);
    row += d;
  }
  float *scale = side.scales + page * a->kv_heads + h;
  int8_t *codes = side.pages + (page * a->kv_heads + h) * a->page_size * d;
  const float before = held ? *scale : 0.0f, needed = largest(space, row - space) / 127.0f;
  const float after = needed > before ? needed : before;
  if (after > before && held) round_again(codes, before / after, held * d);
  row = space;
  for (int64_t t = first; t < end; ++t) {
    if (a->slots[t] < 0) continue;
    write_codes(row, after, d, codes + a->slots[t] % a->page_size * d);
    row += d;
  }
  *scale = after;
}

// The end of the run that begins with token `first`: up to a slot in another page, or one that does not rise.
static int64_t run_end(const atb_append_args *a, int64_t first) {
  int64_t last = a->slots[first], t = first + 1;
  for (; t < a->tokens; ++t) {
    const int64_t slot = a->slots[t];
    if (slot < 0) continue;
    if (slot <= last || slot / a->page_size != last / a->page_size) break;
    last = slot;
  }
  return t;
}

int64_t codes_space(const atb_append_args *a) {
  return min64(a->page_size, a->tokens) * a->head_dim + W;
}

void append_codes(const atb_append_args *a, int thread, int count, float *space) {
  const Side keys = {a->k, a->k_token, a->k_head, (int8_t *)a->k_pages, a->k_scales, a->cos, a->sin};
  const Side values = {a->v, a->v_token, a->v_head, (int8_t *)a->v_pages, a->v_scales, nullptr, nullptr};
  const Range mine = share(2 * a->kv_heads, thread, count);
  for (int64_t item = mine.begin; item < mine.end; ++item)
    for (int64_t t = 0, end; t < a->tokens; t = end) {
      end = a->slots[t] < 0 ? t + 1 : run_end(a, t);
      if (a->slots[t] >= 0) write_run(a, item % 2 ? values : keys, item / 2, t, end, space);
    }
}

} // namespace ATB_ISA
