// Attention over dense keys, forward, as one mixed kernel: q (batch, heads, q_len, head_dim), k and v (batch,
// kv_heads, kv_len, dim) -> out (batch, heads, q_len, value_dim) and lse (batch, heads, q_len) in float.
//
// A block takes tiles of queries of one head, and for each the tiles of keys that any of its queries sees.
// The cube core multiplies queries and keys into a slot of scores; the two vector cores, half the rows each,
// make weights of them (online softmax, in float) for the cube core to multiply with the values; the vector
// cores gather the products. Each step is handed over by a flag, with two slots of everything:
//
//   cube:   S0  S1  O0  S2  O1  S3  O2 ...      S: scores, O: weights times values
//   vector:     P0      P1 A0   P2 A1 ...       P: softmax, A: accumulate
//
// so that the scores of the next tile are computed while the vector cores work on this one. No slot needs a
// flag to be free: S(t + 2) follows O(t), which waited for P(t); P(t + 2) follows A(t), which waited for
// O(t); O(t + 2) waits for P(t + 2), which follows A(t).
//
// Query i stands at key position i + kv_len - q_len (bottom right). A query that sees no key gives 0 and
// -inf.
#include "flash_attention_cube.h"
#include "flash_attention_rows.h"

namespace {
using namespace AscendC;

template <typename T>
__aicore__ inline void Run(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR out, GM_ADDR lse, GM_ADDR work,
                           const FlashAttentionTiling &tiling) {
  TPipe pipe;
  if ASCEND_IS_AIV {
    atb::FlashRows<T> rows(&pipe, tiling);
    rows.Process(v, out, lse, work);
  }
  if ASCEND_IS_AIC {
    atb::FlashCube<T> products(&pipe, tiling);
    products.Process(q, k, v, work);
  }
}
} // namespace

extern "C" __global__ __aicore__ void atb_flash_attention_half(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR out,
                                                               GM_ADDR lse, GM_ADDR work,
                                                               FlashAttentionTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Run<half>(q, k, v, out, lse, work, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_flash_attention_bfloat16(GM_ADDR q, GM_ADDR k, GM_ADDR v,
                                                                   GM_ADDR out, GM_ADDR lse, GM_ADDR work,
                                                                   FlashAttentionTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Run<bfloat16_t>(q, k, v, out, lse, work, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_flash_attention_float(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR out,
                                                                GM_ADDR lse, GM_ADDR work,
                                                                FlashAttentionTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Run<float>(q, k, v, out, lse, work, tiling);
}
