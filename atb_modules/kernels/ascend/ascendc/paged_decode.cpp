// Attention of one query token a sequence over a paged cache: q (batch, heads, head_dim), pages (pages,
// kv_heads, page_size, dim), block_table (batch, max_blocks) and kv_lengths (batch) in int32 -> out (batch,
// heads, value_dim) and lse (heads, batch) in float.
//
// A unit of work is a part of the keys of one sequence and one head of keys; the query heads of the group
// share what is read, so each live key and value crosses the bus once. Keys travel a tile at a time, out of
// as many pages as it spans; the tile after this one is on its way while this one is computed. The softmax is
// online, in float. A sequence in one part goes straight to the result; the parts of longer ones go to the
// workspace with their log-sum-exps and are merged after all cores have met. A sequence without keys gives 0
// and -inf.
#include "tiling/paged_decode.h"
#include "paged_decode_parts.h"
#include "paged_decode_tile.h"

namespace {
using namespace AscendC;

template <typename T> class PagedDecode {
public:
  __aicore__ inline PagedDecode(TPipe *pipe, const PagedDecodeTiling &tiling)
      : t_(tiling), tile_(pipe, tiling), cursor_(tiling) {
    pipe->InitBuffer(in_q_, 2, t_.group * t_.head_dim * sizeof(T));
    pipe->InitBuffer(in_k_, 2, t_.tile * t_.head_dim * sizeof(T));
    pipe->InitBuffer(in_v_, 2, t_.tile * t_.value_dim * sizeof(T));
    pipe->InitBuffer(out_, 1, t_.group * (t_.value_dim + 8) * sizeof(float));
  }

  __aicore__ inline void Process(const atb::PagedArguments &a) {
    const uint64_t places = uint64_t(t_.pages) * t_.kv_heads * t_.page_size;
    q_.SetGlobalBuffer((__gm__ T *)a.q, uint64_t(t_.batch - 1) * t_.q_step + t_.heads * t_.head_dim);
    k_.SetGlobalBuffer((__gm__ T *)a.k_pages, places * t_.head_dim);
    v_.SetGlobalBuffer((__gm__ T *)a.v_pages, places * t_.value_dim);
    table_.SetGlobalBuffer((__gm__ int32_t *)a.block_table, uint64_t(t_.batch) * t_.max_blocks);
    result_.SetGlobalBuffer((__gm__ T *)a.out, uint64_t(t_.batch) * t_.heads * t_.value_dim);
    lse_.SetGlobalBuffer((__gm__ float *)a.lse, uint64_t(t_.batch) * t_.heads);
    work_.SetGlobalBuffer((__gm__ float *)a.work,
                          uint64_t(t_.parts) * t_.batch * t_.heads * (t_.value_dim + 8));
    cursor_.Start(a.kv_lengths);
    atb::PagedTile now = cursor_.Next();
    Load(now);
    while (now.live) {
      const atb::PagedTile next = cursor_.Next();
      Load(next);
      Compute(now);
      now = next;
    }
  }

private:
  __aicore__ inline void Load(const atb::PagedTile &tile) {
    if (!tile.live) return;
    if (tile.first) {
      LocalTensor<T> q = in_q_.template AllocTensor<T>();
      DataCopy(q, q_[uint64_t(tile.batch) * t_.q_step + tile.head * t_.group * t_.head_dim],
               t_.group * t_.head_dim);
      in_q_.EnQue(q);
    }
    if (tile.count == 0) return;
    LocalTensor<T> k = in_k_.template AllocTensor<T>(), v = in_v_.template AllocTensor<T>();
    for (uint32_t done = 0; done < tile.count;) {
      const uint32_t at = tile.start + done, place = at % t_.page_size;
      const uint32_t run = atb::Least(t_.page_size - place, tile.count - done);
      const uint64_t page =
          uint64_t(table_.GetValue(uint64_t(tile.batch) * t_.max_blocks + at / t_.page_size));
      const uint64_t row = (page * t_.kv_heads + tile.head) * t_.page_size + place;
      DataCopy(k[done * t_.head_dim], k_[row * t_.head_dim], run * t_.head_dim);
      DataCopy(v[done * t_.value_dim], v_[row * t_.value_dim], run * t_.value_dim);
      done += run;
    }
    in_k_.EnQue(k);
    in_v_.EnQue(v);
  }

  __aicore__ inline void Compute(const atb::PagedTile &tile) {
    if (tile.first) {
      LocalTensor<T> q = in_q_.template DeQue<T>();
      tile_.Begin(q);
      in_q_.FreeTensor(q);
    }
    if (tile.count != 0) {
      LocalTensor<T> k = in_k_.template DeQue<T>();
      tile_.Scores(k, tile.count);
      in_k_.FreeTensor(k);
      tile_.Softmax(tile.count);
      LocalTensor<T> v = in_v_.template DeQue<T>();
      tile_.Values(v, tile.count);
      in_v_.FreeTensor(v);
    }
    if (tile.last) Finish(tile);
  }

  __aicore__ inline void Finish(const atb::PagedTile &tile) {
    const uint64_t head = uint64_t(tile.head) * t_.group, width = t_.value_dim + 8;
    LocalTensor<float> out = out_.template AllocTensor<float>();
    if (tile.parts > 1) {
      tile_.Finish(out, t_.value_dim + 8);
      tile_.FinishLse(out[t_.value_dim], t_.value_dim / 8 + 1);
      out_.EnQue(out);
      out = out_.template DeQue<float>();
      DataCopy(work_[((uint64_t(tile.part) * t_.batch + tile.batch) * t_.heads + head) * width], out,
               t_.group * (t_.value_dim + 8));
    } else {
      LocalTensor<float> lse = out[t_.group * t_.value_dim];
      tile_.FinishNarrow(out.template ReinterpretCast<T>());
      tile_.FinishLse(lse, 1);
      out_.EnQue(out);
      out = out_.template DeQue<float>();
      atb::StoreHeads(result_, lse_, out.template ReinterpretCast<T>(), lse, t_, tile.batch, tile.head);
    }
    out_.FreeTensor(out);
  }

  PagedDecodeTiling t_;
  atb::PagedTileMath<T> tile_;
  atb::PagedCursor cursor_;
  TQue<TPosition::VECIN, 2> in_q_, in_k_, in_v_;
  TQue<TPosition::VECOUT, 1> out_;
  GlobalTensor<T> q_, k_, v_, result_;
  GlobalTensor<int32_t> table_;
  GlobalTensor<float> lse_, work_;
};

template <typename T>
__aicore__ inline void Run(const atb::PagedArguments &arguments, const PagedDecodeTiling &tiling) {
  TPipe pipe;
  {
    PagedDecode<T> kernel(&pipe, tiling);
    kernel.Process(arguments);
  }
  if (tiling.parts == 1) return;
  pipe.Reset();
  SyncAll();
  atb::PagedMerge<T> merge(&pipe, tiling);
  merge.Process(arguments);
}
} // namespace

extern "C" __global__ __aicore__ void atb_paged_decode_half(GM_ADDR q, GM_ADDR k_pages, GM_ADDR v_pages,
                                                            GM_ADDR block_table, GM_ADDR kv_lengths,
                                                            GM_ADDR out, GM_ADDR lse, GM_ADDR work,
                                                            PagedDecodeTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  Run<half>({q, k_pages, v_pages, block_table, kv_lengths, out, lse, work}, tiling);
}
#ifndef ATB_NO_BFLOAT16
extern "C" __global__ __aicore__ void atb_paged_decode_bfloat16(GM_ADDR q, GM_ADDR k_pages, GM_ADDR v_pages,
                                                                GM_ADDR block_table, GM_ADDR kv_lengths,
                                                                GM_ADDR out, GM_ADDR lse, GM_ADDR work,
                                                                PagedDecodeTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  Run<bfloat16_t>({q, k_pages, v_pages, block_table, kv_lengths, out, lse, work}, tiling);
}
#endif
extern "C" __global__ __aicore__ void atb_paged_decode_float(GM_ADDR q, GM_ADDR k_pages, GM_ADDR v_pages,
                                                             GM_ADDR block_table, GM_ADDR kv_lengths,
                                                             GM_ADDR out, GM_ADDR lse, GM_ADDR work,
                                                             PagedDecodeTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  Run<float>({q, k_pages, v_pages, block_table, kv_lengths, out, lse, work}, tiling);
}
