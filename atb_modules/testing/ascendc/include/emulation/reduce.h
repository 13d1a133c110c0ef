// Reductions of the vector pipe: over a whole tensor, over each repeat (256 bytes), over each block (32
// bytes).
#pragma once
#include "vector.h"

namespace AscendC {

enum class ReduceOrder { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

namespace emulation {

enum class Fold { Sum, Max, Min };

// The hardware adds the elements of a repeat as a tree of neighbours.
template <Fold fold, typename T> inline T Reduced(const T *values, size_t count) {
  if (count == 1) return values[0];
  T tree[256 / sizeof(T)];
  std::copy(values, values + count, tree);
  while (count > 1) {
    for (size_t i = 0; i < count / 2; ++i) {
      const T a = tree[2 * i], b = tree[2 * i + 1];
      tree[i] = fold == Fold::Sum   ? static_cast<T>(a + b)
                : fold == Fold::Max ? (b > a ? b : a)
                                    : (b < a ? b : a);
    }
    if (count % 2) tree[count / 2] = tree[count - 1];
    count = (count + 1) / 2;
  }
  return tree[0];
}

// The work tensor of a reduction holds one result (an index beside it, for maxima) of every repeat.
template <typename T> inline uint32_t WorkSize(int32_t count, uint32_t each) {
  const uint32_t repeats = (static_cast<uint32_t>(count) + kPerRepeat<T> - 1) / kPerRepeat<T>;
  return (repeats * each + kPerBlock<T> - 1) / kPerBlock<T> * kPerBlock<T>;
}

template <Fold fold, typename T>
inline void ReduceWhole(const LocalTensor<T> &dst, const LocalTensor<T> &src, const LocalTensor<T> &work,
                        int32_t count, const char *op) {
  ATB_NO_BF16(Reduce);
  Require(count > 0, "a reduction over no elements");
  const uint32_t needed = WorkSize<T>(count, fold == Fold::Sum ? 1 : 2);
  if (work.GetSize() < needed)
    Fail(std::string(op) + ": the work tensor has " + std::to_string(work.GetSize()) + " elements, " +
         std::to_string(needed) + " are needed");
  Self().Begin(V, op);
  ReadOperand(src, count, op);
  RequireOperand(work, needed, op);
  Self().Write(work.place(), work.offset(), needed * sizeof(T));
  WriteOperand(dst, 1, op, sizeof(T));
  T total{};
  for (int32_t start = 0; start < count; start += kPerRepeat<T>) {
    const int32_t n = std::min<int32_t>(kPerRepeat<T>, count - start);
    const T pair[2] = {total, Reduced<fold>(src.Raw() + start, n)};
    total = start == 0 ? pair[1] : Reduced<fold>(pair, 2);
  }
  dst.Raw()[0] = total;
}

template <Fold fold, typename T>
inline void ReduceRepeats(const LocalTensor<T> &dst, const LocalTensor<T> &src, int32_t mask, int32_t repeats,
                          int32_t dst_step, int32_t block_stride, int32_t repeat_stride, uint32_t results,
                          const char *op) {
  ATB_NO_BF16(Reduce);
  if (repeats < 0 || repeats > 255) Fail(std::string(op) + ": at most 255 repeats in one instruction");
  Self().Begin(V, op);
  Masked(src, false, mask, static_cast<uint8_t>(repeats), block_stride, repeat_stride, op);
  RequireOperand(dst, repeats == 0 ? 0 : (repeats - 1) * dst_step + static_cast<int64_t>(results), op,
                 sizeof(T));
  for (int32_t r = 0; r < repeats; ++r) {
    for (uint32_t part = 0; part < results; ++part) {
      const uint32_t first = results == 1 ? 0 : part * kPerBlock<T>;
      const uint32_t last = results == 1 ? mask : std::min<uint32_t>(mask, first + kPerBlock<T>);
      if (first >= last) continue;
      T lanes[256 / sizeof(T)];
      for (uint32_t lane = first; lane < last; ++lane)
        lanes[lane - first] = src.Raw()[At<T>(r, lane, block_stride, repeat_stride)];
      const size_t to = size_t(r) * dst_step + part;
      Self().Write(dst.place(), dst.offset() + to * sizeof(T), sizeof(T), true);
      dst.Raw()[to] = Reduced<fold>(lanes, last - first);
    }
  }
  Self().Note(dst.place(), dst.offset(), size_t(repeats) * results * sizeof(T));
}

} // namespace emulation

template <typename T>
inline void ReduceSum(const LocalTensor<T> &dst, const LocalTensor<T> &src, const LocalTensor<T> &work,
                      const int32_t count) {
  emulation::ReduceWhole<emulation::Fold::Sum>(dst, src, work, count, "ReduceSum");
}
template <typename T>
inline void ReduceMax(const LocalTensor<T> &dst, const LocalTensor<T> &src, const LocalTensor<T> &work,
                      const int32_t count, bool with_index = false) {
  emulation::Require(!with_index, "the emulation has ReduceMax without the index alone");
  emulation::ReduceWhole<emulation::Fold::Max>(dst, src, work, count, "ReduceMax");
}
template <typename T>
inline void ReduceMin(const LocalTensor<T> &dst, const LocalTensor<T> &src, const LocalTensor<T> &work,
                      const int32_t count, bool with_index = false) {
  emulation::Require(!with_index, "the emulation has ReduceMin without the index alone");
  emulation::ReduceWhole<emulation::Fold::Min>(dst, src, work, count, "ReduceMin");
}
// One sum for each repeat, dst_step elements apart.
template <typename T>
inline void WholeReduceSum(const LocalTensor<T> &dst, const LocalTensor<T> &src, const int32_t mask,
                           const int32_t repeats, const int32_t dst_step, const int32_t block_stride,
                           const int32_t repeat_stride) {
  emulation::ReduceRepeats<emulation::Fold::Sum>(dst, src, mask, repeats, dst_step, block_stride,
                                                 repeat_stride, 1, "WholeReduceSum");
}
template <typename T>
inline void WholeReduceMax(const LocalTensor<T> &dst, const LocalTensor<T> &src, const int32_t mask,
                           const int32_t repeats, const int32_t dst_step, const int32_t block_stride,
                           const int32_t repeat_stride, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
  emulation::Require(order == ReduceOrder::ORDER_ONLY_VALUE,
                     "the emulation has WholeReduceMax for values alone");
  emulation::ReduceRepeats<emulation::Fold::Max>(dst, src, mask, repeats, dst_step, block_stride,
                                                 repeat_stride, 1, "WholeReduceMax");
}
// One result for each block of 32 bytes; dst_step in units of eight results.
template <typename T>
inline void BlockReduceSum(const LocalTensor<T> &dst, const LocalTensor<T> &src, const int32_t repeats,
                           const int32_t mask, const int32_t dst_step, const int32_t block_stride,
                           const int32_t repeat_stride) {
  emulation::ReduceRepeats<emulation::Fold::Sum>(dst, src, mask, repeats, dst_step * 8, block_stride,
                                                 repeat_stride, 8, "BlockReduceSum");
}
template <typename T>
inline void BlockReduceMax(const LocalTensor<T> &dst, const LocalTensor<T> &src, const int32_t repeats,
                           const int32_t mask, const int32_t dst_step, const int32_t block_stride,
                           const int32_t repeat_stride) {
  emulation::ReduceRepeats<emulation::Fold::Max>(dst, src, mask, repeats, dst_step * 8, block_stride,
                                                 repeat_stride, 8, "BlockReduceMax");
}

} // namespace AscendC
