// Runs every kernel over odd sizes on every instruction set: the program of the ASan and UBSan build.
//
// Buffers are allocated to the element, so that a read or write past the end is seen. Values are only checked
// to be finite; the Python tests check what they are.
#include "atb_cpu.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

namespace {

uint32_t state = 1;
float draw() {
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / 8388608.0f - 1.0f;
}

int size_of(int dtype) {
  return dtype == ATB_F32 ? 4 : (dtype == ATB_I8 ? 1 : 2);
}

// n random elements of a dtype; 1.0 and its neighbours in the 16-bit formats have the same top bits for all
// uses here.
std::vector<uint8_t> tensor(int64_t n, int dtype) {
  std::vector<uint8_t> bytes(n * size_of(dtype));
  for (int64_t i = 0; i < n; ++i) {
    const float x = draw();
    if (dtype == ATB_F32) {
      memcpy(&bytes[i * 4], &x, 4);
    } else if (dtype == ATB_I8) {
      bytes[i] = (uint8_t)(int8_t)(x * 127.0f);
    } else {
      uint32_t bits;
      memcpy(&bits, &x, 4);
      uint16_t half = (uint16_t)(bits >> 16);
      if (dtype == ATB_F16) half = (uint16_t)((half & 0x8000) | 0x3400 | (half & 0x3ff));
      memcpy(&bytes[i * 2], &half, 2);
    }
  }
  return bytes;
}

std::vector<float> floats(int64_t n) {
  std::vector<float> values(n);
  for (float &x : values) x = draw();
  return values;
}

void require_finite(const float *x, int64_t n, const char *what) {
  for (int64_t i = 0; i < n; ++i)
    if (!isfinite(x[i])) {
      fprintf(stderr, "%s: element %ld is not finite\n", what, (long)i);
      exit(1);
    }
}

// Outputs large enough to be streamed, with rows that are whole vectors and rows that are not.
void large_rows_of(int dtype, int threads) {
  for (int64_t width : {512, 515}) {
    const int64_t rows = (int64_t(8) << 20) / (width * size_of(dtype)) + 1;
    auto x = tensor(rows * width, dtype), y = tensor(rows * width, dtype), weight = tensor(width, dtype);
    std::vector<uint8_t> out(x.size()), sum(x.size());
    atb_norm_args n = {x.data(), y.data(), weight.data(), nullptr, out.data(), sum.data(), rows,
                       width,    width,    width,         1e-5f,   0.0f,       dtype,      dtype,
                       1,        0,        threads};
    atb_norm(&n);
    const std::vector<uint8_t> keep(rows * width, 1);
    n.keep = keep.data(), n.keep_scale = 1.25f;
    atb_norm(&n);
    n.residual = nullptr, n.keep = nullptr;
    n.scale = x.data(), n.shift = y.data(), n.scale_stride = n.shift_stride = width, n.group = 7;
    atb_norm(&n);
    const atb_gated_args g = {x.data(), y.data(), out.data(), rows,     width,  width,
                              width,    width,    dtype,      ATB_SILU, threads};
    atb_gated_activation(&g);
    const auto angles = floats(rows * (width / 4));
    const atb_rotary_args r = {x.data(),  out.data(), angles.data(), angles.data(), rows,  2,
                               width / 2, width / 4,  width,         width / 2,     width, width / 2,
                               dtype,     0,          threads};
    atb_rotary(&r);
  }
}

void rows_of(int dtype, int threads) {
  for (int64_t width : {1, 7, 16, 33, 577}) {
    const int64_t rows = 5;
    auto x = tensor(rows * width, dtype), y = tensor(rows * width, dtype), weight = tensor(width, dtype);
    std::vector<uint8_t> out(x.size()), sum(x.size());
    for (int layer_norm = 0; layer_norm < 2; ++layer_norm) {
      atb_norm_args n = {x.data(), y.data(),   weight.data(), weight.data(), out.data(), sum.data(), rows,
                         width,    width,      width,         1e-5f,         1.0f,       dtype,      dtype,
                         1,        layer_norm, threads};
      atb_norm(&n);
      const std::vector<uint8_t> keep(rows * width, 1);
      n.keep = keep.data(), n.keep_scale = 1.25f;
      atb_norm(&n);
      n.residual = n.weight = n.bias = nullptr, n.keep = nullptr;
      atb_norm(&n);
      n.scale = x.data(), n.shift = y.data(), n.scale_stride = n.shift_stride = width, n.group = 2;
      atb_norm(&n);
    }
    for (int kind = 0; kind < 4; ++kind) {
      const atb_gated_args g = {x.data(), y.data(), out.data(), rows, width,  width,
                                width,    width,    dtype,      kind, threads};
      atb_gated_activation(&g);
      std::vector<uint8_t> d_gate(x.size()), d_up(x.size());
      const std::vector<float> factors(rows, 0.5f);
      std::vector<float> d_factors(rows);
      atb_gated_backward_args b = {x.data(),      y.data(),    x.data(),   factors.data(),
                                   d_gate.data(), d_up.data(), out.data(), d_factors.data(),
                                   rows,          width,       width,      width,
                                   width,         width,       width,      width,
                                   dtype,         kind,        threads};
      atb_gated_backward(&b);
      b.up = nullptr, b.factors = nullptr, b.d_up = nullptr, b.out = nullptr, b.d_factors = nullptr;
      atb_gated_backward(&b);
    }
    for (int weights = 0; weights < 3; ++weights)
      for (int64_t count : {1, 3, 17}) {
        auto input = tensor(count * width, dtype), matrix = tensor(9 * width, weights),
             bias = tensor(9, weights);
        std::vector<uint8_t> result(count * 9 * size_of(dtype));
        const atb_linear_args l = {
            input.data(), matrix.data(), bias.data(), result.data(), count,   9,       width,
            width,        width,         9,           dtype,         weights, weights, threads};
        atb_linear(&l);
      }
  }
}

void heads_of(int dtype, int page_dtype, int threads) {
  for (int64_t dim : {8, 20, 64}) {
    const int64_t tokens = 6, heads = 3, half = dim / 2 - 1, page = 4;
    auto q = tensor(tokens * heads * dim, dtype), k = q, v = q;
    auto k_pages = tensor(3 * heads * page * dim, page_dtype), v_pages = k_pages;
    const auto cos = floats(tokens * half), sin = floats(tokens * half);
    std::vector<float> k_scales(3 * heads, 0.01f), v_scales = k_scales;
    const int64_t slots[tokens] = {0, 11, -1, 5, 6, 7};
    for (int interleaved = 0; interleaved < 2; ++interleaved) {
      const atb_rotary_args r = {k.data(),    v.data(), cos.data(), sin.data(),  tokens,
                                 heads,       dim,      half,       heads * dim, dim,
                                 heads * dim, dim,      dtype,      interleaved, threads};
      atb_rotary(&r);
      const atb_append_args a = {q.data(),
                                 k.data(),
                                 v.data(),
                                 cos.data(),
                                 sin.data(),
                                 k_pages.data(),
                                 v_pages.data(),
                                 k_scales.data(),
                                 v_scales.data(),
                                 slots,
                                 tokens,
                                 heads,
                                 heads,
                                 dim,
                                 half,
                                 page,
                                 heads * dim,
                                 dim,
                                 heads * dim,
                                 dim,
                                 heads * dim,
                                 dim,
                                 dtype,
                                 page_dtype,
                                 interleaved,
                                 threads};
      atb_append(&a);
    }
  }
}

void dense(int dtype, int threads) {
  for (int64_t dim : {5, 20, 64})
    for (int64_t q_len : {1, 9, 70})
      for (int64_t kv_len : {0, 3, 131, 600}) {
        const int64_t heads = 4, kv_heads = 2;
        auto q = tensor(heads * q_len * dim, dtype), k = tensor(kv_heads * kv_len * dim, dtype), v = k;
        auto mask = tensor(q_len * kv_len, ATB_F32);
        const auto slopes = floats(heads), sinks = floats(heads);
        std::vector<uint8_t> out(q.size());
        std::vector<float> lse(heads * q_len);
        atb_attention_args a = {};
        a.q = q.data(), a.k = k.data(), a.v = v.data(), a.out = out.data(), a.lse = lse.data();
        a.batch = 1, a.heads = heads, a.kv_heads = kv_heads, a.q_len = q_len, a.kv_len = kv_len,
        a.head_dim = dim;
        a.q_strides[1] = q_len * dim, a.q_strides[2] = dim;
        a.k_strides[1] = a.v_strides[1] = kv_len * dim, a.k_strides[2] = a.v_strides[2] = dim;
        a.scale = 0.5f, a.dtype = dtype, a.threads = threads, a.left = a.right = -1;
        for (a.causal = 0; a.causal < 3; ++a.causal) atb_attention(&a);
        a.threads = 3; // divides no count of blocks: the keys are split
        atb_attention(&a);
        a.threads = threads;
        a.causal = 1, a.left = 6, a.softcap = 3.0f, a.slopes = slopes.data(), a.sinks = sinks.data();
        a.mask = mask.data(), a.mask_strides[2] = kv_len, a.mask_strides[3] = 1;
        atb_attention(&a);
        require_finite(lse.data(), lse.size(), "dense attention"); // the sinks keep every row finite
        std::vector<int32_t> reach(q_len * 5);
        for (int64_t i = 0; i < q_len;
             ++i) { // beyond both ends too: the kernel keeps to the keys that there are
          const int32_t at = (int32_t)(i + kv_len - q_len);
          const int32_t row[5] = {-3, 2, at - 5, at + 9, at};
          memcpy(reach.data() + i * 5, row, sizeof row);
        }
        const int64_t edge = 16, across = (kv_len + edge - 1) / edge;
        std::vector<uint8_t> live(heads * ((q_len + edge - 1) / edge) * across);
        for (size_t i = 0; i < live.size(); ++i) live[i] = i % 3 != 0;
        a.reach = reach.data(), a.blocks = live.data(), a.block_size = edge;
        a.block_strides[1] = (int64_t)live.size() / heads;
        atb_attention(&a);
        require_finite(lse.data(), lse.size(), "sparse attention");
        auto d_out = tensor(heads * q_len * dim, dtype);
        const auto d_lse = floats(heads * q_len);
        std::vector<float> d_q(heads * q_len * dim), d_k(2 * kv_heads * kv_len * dim), d_v = d_k;
        for (int64_t splits : {1, 2}) {
          const atb_attention_backward_args g = {a,          d_out.data(), d_lse.data(), d_q.data(),
                                                 d_k.data(), d_v.data(),   splits};
          atb_attention_backward(&g);
          require_finite(d_q.data(), d_q.size(), "gradient of attention");
        }
      }
}

void merged(int dtype, int threads) {
  const int64_t batch = 2, heads = 3;
  for (int64_t q_len : {1, 70})
    for (int64_t dim : {20, 64, 129}) {
      auto out = tensor(batch * q_len * heads * dim, dtype), other = out;
      auto lse = floats(batch * heads * q_len), other_lse = floats(lse.size());
      for (size_t i = 0; i < lse.size(); i += 3) other_lse[i] = -INFINITY;
      for (size_t i = 1; i < lse.size(); i += 3) lse[i] = -INFINITY;
      const atb_merge_args a = {out.data(), lse.data(), other.data(), other_lse.data(), batch, heads,
                                q_len,      dim,        dtype,        threads};
      atb_merge_attention(&a);
      require_finite(lse.data(), lse.size(), "merged attention");
    }
}

void paged(int dtype, int page_dtype, int threads) {
  const int64_t batch = 3, page = 8, blocks = 6;
  const int32_t lengths[batch] = {1, 43, 20};
  std::vector<int32_t> table(batch * blocks);
  for (size_t i = 0; i < table.size(); ++i) table[i] = (int32_t)(table.size() - 1 - i);
  for (int64_t dim : {20, 64})
    for (int64_t group : {1, 5})
      for (const std::vector<int32_t> &cu :
           {std::vector<int32_t>{0, 1, 2, 3}, {0, 1, 1, 2}, {0, 0, 43, 45}}) {
        const int64_t kv_heads = 2, heads = kv_heads * group, total = cu.back();
        auto q = tensor(total * heads * dim, dtype);
        auto k = tensor(batch * blocks * kv_heads * page * dim, page_dtype), v = k;
        const auto slopes = floats(heads), sinks = floats(heads);
        const std::vector<float> scales(batch * blocks * kv_heads, 0.01f);
        std::vector<uint8_t> out(q.size());
        std::vector<float> lse(heads * total);
        atb_paged_args a = {q.data(),     k.data(),   v.data(),  scales.data(), scales.data(),
                            table.data(), lengths,    cu.data(), sinks.data(),  slopes.data(),
                            out.data(),   lse.data(), batch,     heads,         kv_heads,
                            dim,          page,       blocks,    total,         heads * dim,
                            dim,          -1,         -1,        0.3f,          0.0f,
                            dtype,        page_dtype, 1,         threads};
        atb_paged_attention(&a);
        a.left = 9, a.softcap = 2.0f;
        atb_paged_attention(&a);
        require_finite(lse.data(), lse.size(), "paged attention");
      }
}

void decode(int weight_dtype, int page_dtype, int threads) {
  const int64_t hidden = 40, inner = 56, heads = 6, kv_heads = 2, page = 8, blocks = 3;
  for (int64_t dim : {12, 32})
    for (int64_t batch : {1, 3}) {
      const int64_t width = (heads + 2 * kv_heads) * dim, half = dim / 2;
      auto qkv = tensor(width * hidden, weight_dtype), o = tensor(hidden * heads * dim, weight_dtype);
      auto gate_up = tensor(2 * inner * hidden, weight_dtype), down = tensor(hidden * inner, weight_dtype);
      const auto qkv_bias = floats(width), o_bias = floats(hidden), up_bias = floats(2 * inner),
                 norm = floats(hidden);
      const auto head_norm = floats(dim), sinks = floats(heads), cos = floats(batch * half),
                 sin = floats(batch * half);
      auto k = tensor(batch * blocks * kv_heads * page * dim, page_dtype), v = k;
      auto x = floats(batch * hidden);
      std::vector<int32_t> table(batch * blocks), lengths(batch);
      std::vector<int64_t> slots(batch);
      for (int64_t b = 0; b < batch; ++b) {
        lengths[b] = (int32_t)(b * 9 + 2);
        for (int64_t i = 0; i < blocks; ++i) table[b * blocks + i] = (int32_t)(b * blocks + i);
        slots[b] = (b * blocks + (lengths[b] - 1) / page) * page + (lengths[b] - 1) % page;
      }
      atb_decode_args a = {};
      a.qkv_weight = qkv.data(), a.o_weight = o.data(), a.gate_up_weight = gate_up.data(),
      a.down_weight = down.data();
      a.attn_norm = a.mlp_norm = norm.data();
      a.k_pages = k.data(), a.v_pages = v.data(), a.hidden = x.data(), a.cos = cos.data(), a.sin = sin.data();
      a.slots = slots.data(), a.block_table = table.data(), a.kv_lengths = lengths.data();
      a.batch = batch, a.hidden_size = hidden, a.intermediate_size = inner, a.heads = heads,
      a.kv_heads = kv_heads;
      a.head_dim = dim, a.half = half, a.page_size = page, a.max_blocks = blocks, a.left = -1;
      a.eps = 1e-5f, a.scale = 0.2f, a.weight_dtype = weight_dtype, a.page_dtype = page_dtype,
      a.threads = threads;
      std::vector<float> workspace(atb_decode_workspace(&a));
      a.workspace = workspace.data();
      atb_decode_layer(&a);
      a.qkv_bias = qkv_bias.data(), a.o_bias = a.down_bias = o_bias.data(), a.gate_up_bias = up_bias.data();
      a.attn_post_norm = a.mlp_post_norm = norm.data(), a.q_norm = a.k_norm = head_norm.data(),
      a.sinks = sinks.data();
      a.left = 5, a.softcap = 4.0f, a.interleaved = 1, a.activation = ATB_GELU;
      atb_decode_layer(&a);
      require_finite(x.data(), x.size(), "decode layer");
    }
}

} // namespace

int main() {
  for (int isa = ATB_BASELINE; isa <= ATB_AVX512; ++isa) {
    if (atb_select_isa(isa) != 0) continue;
    for (int threads : {1, 2})
      for (int dtype = 0; dtype < 3; ++dtype) {
        rows_of(dtype, threads);
        large_rows_of(dtype, threads);
        dense(dtype, threads);
        merged(dtype, threads);
        for (int pages = 0; pages < 4; ++pages) {
          heads_of(dtype, pages, threads);
          paged(dtype, pages, threads);
          if (pages != ATB_I8) decode(dtype, pages, threads);
        }
      }
    printf("instruction set %d: all kernels ran\n", isa);
  }
  return 0;
}
