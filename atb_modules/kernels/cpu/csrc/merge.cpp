// Joins the results of two attentions over disjoint keys by their log-sum-exps, in place.
#include "table.h"
#include "threads.h"

namespace ATB_ISA {

// The row becomes own * row + others * other.
template <class T>
ATB_INLINE void mix_row(T *row, const T *other, int64_t head_dim, float own, float others) {
  int64_t i = 0;
  for (; i + W <= head_dim; i += W) store(row + i, load(row + i) * own + load(other + i) * others);
  if (i < head_dim) {
    const int64_t n = head_dim - i;
    store_part(row + i, load_part(row + i, n) * own + load_part(other + i, n) * others, n);
  }
}

template <class T> static void run(const atb_merge_args *a) {
  share_items(a->threads, a->batch * a->q_len, a->batch * a->q_len * a->heads * a->head_dim, [&](int64_t at) {
    const int64_t b = at / a->q_len, query = at % a->q_len;
    for (int64_t h = 0; h < a->heads; ++h) {
      float *lse = a->lse + (b * a->heads + h) * a->q_len + query;
      const float first = *lse, second = a->other_lse[lse - a->lse];
      if (second == -INF) continue; // nothing to add, and -inf minus -inf is no number
      // A NaN is in `low`, or in both, and from there in all that follows.
      const bool ahead = first > second;
      const float high = ahead ? first : second, low = ahead ? second : first;
      const float less = __builtin_expf(low - high), most = 1.0f / (1.0f + less);
      const int64_t row = (at * a->heads + h) * a->head_dim;
      mix_row((T *)a->out + row, (const T *)a->other + row, a->head_dim, ahead ? most : less * most,
              ahead ? less * most : most);
      *lse = high + __builtin_log1pf(less);
    }
  });
}

void merge(const atb_merge_args *a) {
  if (a->dtype == ATB_BF16)
    run<bf16>(a);
  else if (a->dtype == ATB_F16)
    run<f16>(a);
  else
    run<float>(a);
}

} // namespace ATB_ISA
