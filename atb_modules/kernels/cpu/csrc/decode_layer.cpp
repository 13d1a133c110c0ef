// One whole decoder layer for a few rows of one token: one parallel region, a barrier between its phases.
//
// Small vectors (norms, rotated queries, the merged attention output) are computed by every thread for
// itself, which is cheaper than another barrier; the weight matrices are shared out by rows, so each is read
// once, by one thread.
#include "convert.h"
#include "gemv.h"
#include "paged_group.h"
#include "rotate.h"
#include "table.h"

namespace ATB_ISA {

// Where everything lies in the workspace, in floats.
struct Layout {
  int64_t qkv_width, attention_width, private_width, barrier, qkv, projected, activated, down, partials, own,
      total;

  explicit Layout(const atb_decode_args *a) {
    const int64_t group = a->heads / a->kv_heads, slots = a->batch * a->kv_heads + a->threads;
    qkv_width = (a->heads + 2 * a->kv_heads) * a->head_dim;
    attention_width = a->heads * a->head_dim;
    const int64_t widest = max64(max64(a->hidden_size, attention_width), a->intermediate_size);
    // A thread's own memory: the residual stream, the input of a product plain and arranged, queries of one
    // group.
    private_width = a->batch * (padded(a->hidden_size) + 2 * padded(widest)) +
                    group * vector_padded(a->head_dim) + 2 * padded(a->head_dim);
    private_width = (private_width + 63) / 64 * 64;
    int64_t at = 0;
    const auto take = [&at](int64_t n) {
      const int64_t here = at;
      at += (n + 31) / 32 * 32;
      return here;
    };
    barrier = take(32);
    qkv = take(a->batch * qkv_width);
    projected = take(a->batch * a->hidden_size);
    activated = take(a->batch * a->intermediate_size);
    down = take(a->batch * a->hidden_size);
    partials = take(slots * group * (vector_padded(a->head_dim) + 2));
    own = take(a->threads * private_width);
    total = at;
  }
};

static void rms_norm(const float *x, const float *weight, float *out, int64_t n, float eps, float offset) {
  vf a = {}, b = {};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const vf p = load(x + i), q = load(x + i + W);
    a += p * p;
    b += q * q;
  }
  float total = sum(a + b);
  for (; i < n; ++i) total += x[i] * x[i];
  const float inverse = 1.0f / __builtin_sqrtf(total / n + eps);
  for (i = 0; i + W <= n; i += W) {
    const vf y = load(x + i) * inverse;
    store(out + i, weight ? y * (load(weight + i) + offset) : y);
  }
  for (; i < n; ++i) out[i] = x[i] * inverse * (weight ? weight[i] + offset : 1.0f);
}

static void activate_product(float *gate, const float *up, int64_t n, int kind) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t count = min64(W, n - i);
    const vf g = count == W ? load(gate + i) : load_part(gate + i, count);
    const vf u = count == W ? load(up + i) : load_part(up + i, count);
    vf y;
    switch (kind) {
    case ATB_SILU:
      y = activate<ATB_SILU>(g);
      break;
    case ATB_GELU:
      y = activate<ATB_GELU>(g);
      break;
    case ATB_GELU_TANH:
      y = activate<ATB_GELU_TANH>(g);
      break;
    default:
      y = activate<ATB_RELU2>(g);
    }
    y = y * u;
    if (count == W)
      store(gate + i, y);
    else
      store_part(gate + i, y, count);
  }
}

// The work of one thread of the region.
struct Worker {
  const atb_decode_args *a;
  const Layout &at;
  int thread, count;
  float *residual, *plain, *arranged, *queries;

  Worker(const atb_decode_args *args, const Layout &layout, int thread_index, int thread_count)
      : a(args), at(layout), thread(thread_index), count(thread_count) {
    const int64_t widest = max64(max64(a->hidden_size, at.attention_width), a->intermediate_size);
    residual = a->workspace + at.own + thread * at.private_width;
    plain = residual + a->batch * padded(a->hidden_size);
    arranged = plain + a->batch * padded(widest);
    queries = arranged + a->batch * padded(widest);
  }

  float *shared(int64_t offset) const { return a->workspace + offset; }
  void meet() const { ((Barrier *)shared(at.barrier))->wait(count); }
  float *stream(int64_t b) const { return residual + b * padded(a->hidden_size); }

  // Columns [begin, end) of out = arranged input (width k) times weight, plus bias.
  void product(const void *weight, const float *bias, int64_t k, int64_t begin, int64_t end, float *out,
               int64_t out_stride) const {
    gemv(arranged, a->batch, padded(k), weight, a->weight_dtype, k, k, begin, end, bias, out, out_stride);
  }

  void arrange_input(int64_t k) const {
    for (int64_t b = 0; b < a->batch; ++b)
      arrange(plain + b * padded(k), arranged + b * padded(k), k, a->weight_dtype);
  }

  void norm_input(const float *weight) const {
    const int64_t h = a->hidden_size;
    for (int64_t b = 0; b < a->batch; ++b)
      rms_norm(stream(b), weight, plain + b * padded(h), h, a->eps, a->weight_offset);
    arrange_input(h);
  }

  void project_qkv() const {
    for (int64_t b = 0; b < a->batch; ++b)
      memcpy(stream(b), a->hidden + b * a->hidden_size, a->hidden_size * sizeof(float));
    norm_input(a->attn_norm);
    const Range mine = share(at.qkv_width, thread, count);
    product(a->qkv_weight, a->qkv_bias, a->hidden_size, mine.begin, mine.end, shared(at.qkv), at.qkv_width);
  }

  // Normalised (optional), rotated, scaled copy of one head of the projection; out (head_dim) float32.
  void finish_head(const float *x, const float *norm, int64_t b, float scale, float *out) const {
    const int64_t d = a->head_dim;
    float *normed = queries + (a->heads / a->kv_heads) * vector_padded(d);
    if (norm) {
      rms_norm(x, norm, normed, d, a->eps, a->weight_offset);
      x = normed;
    }
    rotate_head<false>(x, out, a->cos + b * a->half, a->sin + b * a->half, a->half, d, a->interleaved);
    for (int64_t i = 0; i < d; ++i) out[i] *= scale;
  }

  void append_token(int64_t b, int64_t h) const {
    const int64_t slot = a->slots[b], d = a->head_dim, size = element_size(a->page_dtype);
    if (slot < 0) return;
    const float *k = shared(at.qkv) + b * at.qkv_width + (a->heads + h) * d, *v = k + a->kv_heads * d;
    float *rotated = queries + (a->heads / a->kv_heads) * vector_padded(d) + padded(d);
    const int64_t to = ((slot / a->page_size * a->kv_heads + h) * a->page_size + slot % a->page_size) * d;
    finish_head(k, a->k_norm, b, 1.0f, rotated);
    write_floats(rotated, d, (char *)a->k_pages + to * size, a->page_dtype);
    write_floats(v, d, (char *)a->v_pages + to * size, a->page_dtype);
  }

  void attend(const PagedKeys &keys) const {
    const int64_t group = keys.group(), stride = vector_padded(a->head_dim);
    attend_share(keys, a->page_dtype, thread, count, shared(at.partials),
                 [&](int64_t b, int64_t h, bool owns_last) {
                   if (owns_last) append_token(b, h);
                   memset(queries, 0, group * stride * sizeof(float));
                   for (int64_t g = 0; g < group; ++g)
                     finish_head(shared(at.qkv) + b * at.qkv_width + (h * group + g) * a->head_dim, a->q_norm,
                                 b, a->scale, queries + g * stride);
                   return (const float *)queries;
                 });
  }

  void project_output(const PagedKeys &keys) const {
    for (int64_t b = 0; b < a->batch; ++b)
      for (int64_t h = 0; h < a->kv_heads; ++h)
        combine(keys, count, shared(at.partials), b, h,
                plain + b * padded(at.attention_width) + h * keys.group() * a->head_dim, nullptr);
    arrange_input(at.attention_width);
    const Range mine = share(a->hidden_size, thread, count);
    product(a->o_weight, a->o_bias, at.attention_width, mine.begin, mine.end, shared(at.projected),
            a->hidden_size);
  }

  // Adds a branch's output, normed if the layer is a sandwich, to this thread's copy of the residual stream.
  void add_branch(const float *branch, const float *post_norm) const {
    const int64_t h = a->hidden_size;
    for (int64_t b = 0; b < a->batch; ++b) {
      const float *y = branch + b * h;
      if (post_norm) {
        rms_norm(y, post_norm, plain, h, a->eps, a->weight_offset);
        y = plain;
      }
      float *x = stream(b);
      for (int64_t i = 0; i < h; ++i) x[i] += y[i];
    }
  }

  void gate_and_up() const {
    add_branch(shared(at.projected), a->attn_post_norm);
    norm_input(a->mlp_norm);
    const int64_t width = a->intermediate_size;
    float *gate = shared(at.activated);
    const Range mine = share(width, thread, count);
    product(a->gate_up_weight, a->gate_up_bias, a->hidden_size, mine.begin, mine.end, gate, width);
    // The norm's input is used up: its memory holds this thread's part of the second half of the product. It
    // fits, because the plain input is as wide as the widest of all.
    const int64_t stride = padded(max64(max64(a->hidden_size, at.attention_width), width)),
                  first = width + mine.begin;
    product(a->gate_up_weight, a->gate_up_bias, a->hidden_size, first, width + mine.end, plain - first,
            stride);
    for (int64_t b = 0; b < a->batch; ++b)
      activate_product(gate + b * width + mine.begin, plain + b * stride, mine.end - mine.begin,
                       a->activation);
  }

  void project_down() const {
    const int64_t k = a->intermediate_size, h = a->hidden_size;
    for (int64_t b = 0; b < a->batch; ++b)
      arrange(shared(at.activated) + b * k, arranged + b * padded(k), k, a->weight_dtype);
    const Range mine = share(h, thread, count);
    float *down = shared(at.down);
    product(a->down_weight, a->down_bias, k, mine.begin, mine.end, down, h);
    if (!a->mlp_post_norm) {
      for (int64_t b = 0; b < a->batch; ++b)
        for (int64_t i = mine.begin; i < mine.end; ++i) a->hidden[b * h + i] = stream(b)[i] + down[b * h + i];
      return;
    }
    meet();
    add_branch(down, a->mlp_post_norm);
    for (int64_t b = 0; b < a->batch; ++b)
      memcpy(a->hidden + b * h + mine.begin, stream(b) + mine.begin, (mine.end - mine.begin) * sizeof(float));
  }

  void run(const PagedKeys &keys) const {
    project_qkv();
    meet();
    attend(keys);
    meet();
    project_output(keys);
    meet();
    gate_and_up();
    meet();
    project_down();
  }
};

void decode_layer(const atb_decode_args *a) {
  const Layout layout(a);
  const PagedKeys keys = {a->k_pages, a->v_pages,  a->block_table, a->kv_lengths, a->batch,
                          a->heads,   a->kv_heads, a->head_dim,    a->page_size,  a->max_blocks,
                          a->left,    a->softcap,  nullptr,        a->sinks};
  *(Barrier *)(a->workspace + layout.barrier) = Barrier();
  on_threads(a->threads, [&](int thread, int count) { Worker(a, layout, thread, count).run(keys); });
}

int64_t decode_workspace(const atb_decode_args *a) {
  return Layout(a).total;
}

} // namespace ATB_ISA
