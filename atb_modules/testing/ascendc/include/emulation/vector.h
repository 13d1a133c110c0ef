// Element-wise instructions of the vector pipe: the forms over the first `count` elements, and over repeats
// with a mask.
#pragma once
#include <algorithm>
#include <cmath>

#include "tensor.h"

namespace AscendC {

struct BinaryRepeatParams {
  uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1, dstRepStride = 8, src0RepStride = 8,
          src1RepStride = 8;
  BinaryRepeatParams() = default;
  BinaryRepeatParams(uint8_t dst_block, uint8_t src0_block, uint8_t src1_block, uint8_t dst, uint8_t src0,
                     uint8_t src1)
      : dstBlkStride(dst_block), src0BlkStride(src0_block), src1BlkStride(src1_block), dstRepStride(dst),
        src0RepStride(src0), src1RepStride(src1) {}
};
struct UnaryRepeatParams {
  uint16_t dstBlkStride = 1, srcBlkStride = 1;
  uint8_t dstRepStride = 8, srcRepStride = 8;
  UnaryRepeatParams() = default;
  UnaryRepeatParams(uint16_t dst_block, uint16_t src_block, uint8_t dst, uint8_t src)
      : dstBlkStride(dst_block), srcBlkStride(src_block), dstRepStride(dst), srcRepStride(src) {}
};

namespace emulation {

// Where element `lane` of repeat `repeat` lies, counted in elements from the tensor's start.
template <typename T>
inline size_t At(uint32_t repeat, uint32_t lane, uint32_t block_stride, uint32_t repeat_stride) {
  constexpr uint32_t per = kPerBlock<T>;
  return (size_t{repeat} * repeat_stride + lane / per * block_stride) * per + lane % per;
}
// Records the access of one operand of a masked instruction, a block at a time.
template <typename T>
inline void Masked(const LocalTensor<T> &t, bool write, uint64_t mask, uint8_t repeats, uint32_t block_stride,
                   uint32_t repeat_stride, const char *op) {
  RequireType<T>();
  if (mask == 0 || mask > kPerRepeat<T>)
    Fail(std::string(op) + ": the mask must be 1 to 256 bytes of elements");
  RequireSome(repeats, op);
  const size_t last =
      At<T>(repeats ? repeats - 1u : 0u, static_cast<uint32_t>(mask) - 1, block_stride, repeat_stride);
  RequireOperand(t, static_cast<int64_t>(repeats ? last + 1 : 0), op);
  for (uint32_t r = 0; r < repeats; ++r)
    for (uint32_t lane = 0; lane < mask; lane += kPerBlock<T>) {
      const size_t bytes = std::min<size_t>(kPerBlock<T>, mask - lane) * sizeof(T);
      const size_t offset = t.offset() + At<T>(r, lane, block_stride, repeat_stride) * sizeof(T);
      if (write)
        Self().Write(t.place(), offset, bytes);
      else
        Self().Read(t.place(), offset, bytes);
    }
  if (write) Self().Note(t.place(), t.offset(), repeats * mask * sizeof(T));
}

} // namespace emulation

#define ATB_NO_BF16(name) static_assert(!kIsBf16<T>, #name " has no bfloat16_t form: Cast to float first")

#define ATB_BINARY(name, expression)                                                                         \
  template <typename T>                                                                                      \
  inline void name(const LocalTensor<T> &dst, const LocalTensor<T> &src0, const LocalTensor<T> &src1,        \
                   const int32_t &count) {                                                                   \
    ATB_NO_BF16(name);                                                                                       \
    emulation::Self().Begin(emulation::V, #name);                                                            \
    emulation::ReadOperand(src0, count, #name);                                                              \
    emulation::ReadOperand(src1, count, #name);                                                              \
    emulation::WriteOperand(dst, count, #name);                                                              \
    emulation::RequireApart(dst, src0, count, #name);                                                        \
    emulation::RequireApart(dst, src1, count, #name);                                                        \
    const T *a = src0.Raw(), *b = src1.Raw();                                                                \
    T *out = dst.Raw();                                                                                      \
    for (int32_t i = 0; i < count; ++i) {                                                                    \
      const T x = a[i], y = b[i];                                                                            \
      out[i] = static_cast<T>(expression);                                                                   \
    }                                                                                                        \
  }                                                                                                          \
  template <typename T>                                                                                      \
  inline void name(const LocalTensor<T> &dst, const LocalTensor<T> &src0, const LocalTensor<T> &src1,        \
                   uint64_t mask, const uint8_t repeats, const BinaryRepeatParams &p) {                      \
    ATB_NO_BF16(name);                                                                                       \
    emulation::Self().Begin(emulation::V, #name);                                                            \
    emulation::Masked(src0, false, mask, repeats, p.src0BlkStride, p.src0RepStride, #name);                  \
    emulation::Masked(src1, false, mask, repeats, p.src1BlkStride, p.src1RepStride, #name);                  \
    emulation::Masked(dst, true, mask, repeats, p.dstBlkStride, p.dstRepStride, #name);                      \
    for (uint32_t r = 0; r < repeats; ++r)                                                                   \
      for (uint32_t lane = 0; lane < mask; ++lane) {                                                         \
        const T x = src0.Raw()[emulation::At<T>(r, lane, p.src0BlkStride, p.src0RepStride)];                 \
        const T y = src1.Raw()[emulation::At<T>(r, lane, p.src1BlkStride, p.src1RepStride)];                 \
        dst.Raw()[emulation::At<T>(r, lane, p.dstBlkStride, p.dstRepStride)] = static_cast<T>(expression);   \
      }                                                                                                      \
  }
ATB_BINARY(Add, x + y)
ATB_BINARY(Sub, x - y)
ATB_BINARY(Mul, x *y)
ATB_BINARY(Div, x / y)
ATB_BINARY(Max, x > y ? x : y)
ATB_BINARY(Min, x < y ? x : y)

#define ATB_SCALAR(name, expression)                                                                         \
  template <typename T>                                                                                      \
  inline void name(const LocalTensor<T> &dst, const LocalTensor<T> &src, const T &y, const int32_t &count) { \
    ATB_NO_BF16(name);                                                                                       \
    emulation::Self().Begin(emulation::V, #name);                                                            \
    emulation::ReadOperand(src, count, #name);                                                               \
    emulation::WriteOperand(dst, count, #name);                                                              \
    emulation::RequireApart(dst, src, count, #name);                                                         \
    const T *a = src.Raw();                                                                                  \
    T *out = dst.Raw();                                                                                      \
    for (int32_t i = 0; i < count; ++i) {                                                                    \
      const T x = a[i];                                                                                      \
      out[i] = static_cast<T>(expression);                                                                   \
    }                                                                                                        \
  }                                                                                                          \
  template <typename T>                                                                                      \
  inline void name(const LocalTensor<T> &dst, const LocalTensor<T> &src, const T &y, uint64_t mask,          \
                   const uint8_t repeats, const UnaryRepeatParams &p) {                                      \
    ATB_NO_BF16(name);                                                                                       \
    emulation::Self().Begin(emulation::V, #name);                                                            \
    emulation::Masked(src, false, mask, repeats, p.srcBlkStride, p.srcRepStride, #name);                     \
    emulation::Masked(dst, true, mask, repeats, p.dstBlkStride, p.dstRepStride, #name);                      \
    for (uint32_t r = 0; r < repeats; ++r)                                                                   \
      for (uint32_t lane = 0; lane < mask; ++lane) {                                                         \
        const T x = src.Raw()[emulation::At<T>(r, lane, p.srcBlkStride, p.srcRepStride)];                    \
        dst.Raw()[emulation::At<T>(r, lane, p.dstBlkStride, p.dstRepStride)] = static_cast<T>(expression);   \
      }                                                                                                      \
  }
ATB_SCALAR(Adds, x + y)
ATB_SCALAR(Muls, x *y)
ATB_SCALAR(Maxs, x > y ? x : y)
ATB_SCALAR(Mins, x < y ? x : y)

#define ATB_UNARY(name, expression)                                                                          \
  template <typename T>                                                                                      \
  inline void name(const LocalTensor<T> &dst, const LocalTensor<T> &src, const int32_t &count) {             \
    ATB_NO_BF16(name);                                                                                       \
    emulation::Self().Begin(emulation::V, #name);                                                            \
    emulation::ReadOperand(src, count, #name);                                                               \
    emulation::WriteOperand(dst, count, #name);                                                              \
    emulation::RequireApart(dst, src, count, #name);                                                         \
    const T *a = src.Raw();                                                                                  \
    T *out = dst.Raw();                                                                                      \
    for (int32_t i = 0; i < count; ++i) {                                                                    \
      const float x = ToFloat(a[i]);                                                                         \
      out[i] = static_cast<T>(expression);                                                                   \
    }                                                                                                        \
  }                                                                                                          \
  template <typename T>                                                                                      \
  inline void name(const LocalTensor<T> &dst, const LocalTensor<T> &src, uint64_t mask,                      \
                   const uint8_t repeats, const UnaryRepeatParams &p) {                                      \
    ATB_NO_BF16(name);                                                                                       \
    emulation::Self().Begin(emulation::V, #name);                                                            \
    emulation::Masked(src, false, mask, repeats, p.srcBlkStride, p.srcRepStride, #name);                     \
    emulation::Masked(dst, true, mask, repeats, p.dstBlkStride, p.dstRepStride, #name);                      \
    for (uint32_t r = 0; r < repeats; ++r)                                                                   \
      for (uint32_t lane = 0; lane < mask; ++lane) {                                                         \
        const float x = ToFloat(src.Raw()[emulation::At<T>(r, lane, p.srcBlkStride, p.srcRepStride)]);       \
        dst.Raw()[emulation::At<T>(r, lane, p.dstBlkStride, p.dstRepStride)] = static_cast<T>(expression);   \
      }                                                                                                      \
  }
ATB_UNARY(Exp, std::exp(x))
ATB_UNARY(Ln, std::log(x))
ATB_UNARY(Abs, std::fabs(x))
ATB_UNARY(Sqrt, std::sqrt(x))
ATB_UNARY(Rsqrt, 1.0f / std::sqrt(x))
ATB_UNARY(Reciprocal, 1.0f / x)
ATB_UNARY(Relu, x > 0.0f ? x : 0.0f)

// dst += src * scalar
template <typename T, typename U>
inline void Axpy(const LocalTensor<T> &dst, const LocalTensor<U> &src, const U &scalar,
                 const int32_t &count) {
  ATB_NO_BF16(Axpy);
  static_assert(std::is_same_v<T, U> || (std::is_same_v<T, float> && std::is_same_v<U, half>),
                "Axpy takes operands of one type, or half into float");
  emulation::Self().Begin(emulation::V, "Axpy");
  emulation::ReadOperand(src, count, "Axpy");
  emulation::ReadOperand(dst, count, "Axpy");
  emulation::WriteOperand(dst, count, "Axpy");
  emulation::RequireApart(dst, src, count, "Axpy");
  for (int32_t i = 0; i < count; ++i)
    dst.Raw()[i] = static_cast<T>(dst.Raw()[i] + static_cast<T>(src.Raw()[i]) * static_cast<T>(scalar));
}

// dst += src0 * src1, over repeats with a mask
template <typename T>
inline void MulAddDst(const LocalTensor<T> &dst, const LocalTensor<T> &src0, const LocalTensor<T> &src1,
                      uint64_t mask, const uint8_t repeats, const BinaryRepeatParams &p) {
  ATB_NO_BF16(MulAddDst);
  emulation::Self().Begin(emulation::V, "MulAddDst");
  emulation::Masked(src0, false, mask, repeats, p.src0BlkStride, p.src0RepStride, "MulAddDst");
  emulation::Masked(src1, false, mask, repeats, p.src1BlkStride, p.src1RepStride, "MulAddDst");
  emulation::Masked(dst, false, mask, repeats, p.dstBlkStride, p.dstRepStride, "MulAddDst");
  emulation::Masked(dst, true, mask, repeats, p.dstBlkStride, p.dstRepStride, "MulAddDst");
  for (uint32_t r = 0; r < repeats; ++r)
    for (uint32_t lane = 0; lane < mask; ++lane) {
      const T x = src0.Raw()[emulation::At<T>(r, lane, p.src0BlkStride, p.src0RepStride)];
      const T y = src1.Raw()[emulation::At<T>(r, lane, p.src1BlkStride, p.src1RepStride)];
      T &sum = dst.Raw()[emulation::At<T>(r, lane, p.dstBlkStride, p.dstRepStride)];
      sum = static_cast<T>(sum + x * y);
    }
}

template <typename T> inline void Duplicate(const LocalTensor<T> &dst, const T &value, const int32_t &count) {
  emulation::Self().Begin(emulation::V, "Duplicate");
  emulation::WriteOperand(dst, count, "Duplicate");
  for (int32_t i = 0; i < count; ++i) dst.Raw()[i] = value;
}

// first, first + step, ...: as many as count
template <typename T>
inline void ArithProgression(const LocalTensor<T> &dst, const T first, const T step, const int32_t count) {
  emulation::Self().Begin(emulation::V, "ArithProgression");
  emulation::WriteOperand(dst, count, "ArithProgression");
  for (int32_t i = 0; i < count; ++i) dst.Raw()[i] = static_cast<T>(first + static_cast<T>(i) * step);
}
template <typename T> inline void CreateVecIndex(const LocalTensor<T> &dst, const T &first, uint32_t count) {
  ArithProgression<T>(dst, first, static_cast<T>(1), static_cast<int32_t>(count));
}

// Each of 8 elements of a repeat fills a block of 32 bytes.
struct BrcbRepeatParams {
  uint16_t dstBlkStride = 1, dstRepStride = 8;
};
template <typename T>
inline void Brcb(const LocalTensor<T> &dst, const LocalTensor<T> &src, const uint8_t repeats,
                 const BrcbRepeatParams &p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb takes elements of 16 or 32 bits");
  emulation::Self().Begin(emulation::V, "Brcb");
  emulation::ReadOperand(src, repeats * 8, "Brcb");
  emulation::Masked(dst, true, kPerRepeat<T>, repeats, p.dstBlkStride, p.dstRepStride, "Brcb");
  for (uint32_t r = 0; r < repeats; ++r)
    for (uint32_t lane = 0; lane < kPerRepeat<T>; ++lane)
      dst.Raw()[emulation::At<T>(r, lane, p.dstBlkStride, p.dstRepStride)] =
          src.Raw()[r * 8 + lane / kPerBlock<T>];
}

namespace emulation {
inline float Rounded(float x, RoundMode mode) {
  switch (mode) {
  case RoundMode::CAST_FLOOR:
    return std::floor(x);
  case RoundMode::CAST_CEIL:
    return std::ceil(x);
  case RoundMode::CAST_ROUND:
    return std::round(x);
  case RoundMode::CAST_TRUNC:
    return std::trunc(x);
  default:
    return std::nearbyint(x);
  }
}
template <typename D, typename S> constexpr bool kCasts() {
  constexpr bool to_float = std::is_same_v<D, float>, from_float = std::is_same_v<S, float>;
  constexpr bool to_half = std::is_same_v<D, half>, from_half = std::is_same_v<S, half>;
  constexpr bool to_int = std::is_same_v<D, int32_t>, from_int = std::is_same_v<S, int32_t>;
  return (to_float && (from_half || kIsBf16<S> || from_int || from_float)) ||
         (from_float && (to_half || kIsBf16<D> || to_int)) ||
         (from_half && (to_int || std::is_same_v<D, int8_t>)) ||
         (to_half && (std::is_same_v<S, int8_t> || std::is_same_v<S, uint8_t>)) || (kIsBf16<S> && to_int);
}
} // namespace emulation

template <typename D, typename S>
inline void Cast(const LocalTensor<D> &dst, const LocalTensor<S> &src, const RoundMode &mode,
                 const uint32_t count) {
  static_assert(emulation::kCasts<D, S>(), "Cast has no form between these two types");
  using emulation::Require;
  emulation::Self().Begin(emulation::V, "Cast");
  if constexpr (kIsBf16<D>)
    Require(mode != RoundMode::CAST_NONE && mode != RoundMode::CAST_ODD,
            "Cast from float to bfloat16_t needs a round mode");
  if constexpr (std::is_integral_v<D>)
    Require(mode != RoundMode::CAST_NONE, "Cast to an integer needs a round mode");
  if constexpr (sizeof(D) > sizeof(S) && !std::is_integral_v<D>)
    Require(mode == RoundMode::CAST_NONE, "Cast to a wider type takes CAST_NONE");
  emulation::ReadOperand(src, count, "Cast");
  emulation::WriteOperand(dst, count, "Cast");
  emulation::RequireApart(dst, src, count, "Cast");
  const bool nearest =
      mode == RoundMode::CAST_RINT || mode == RoundMode::CAST_NONE || std::is_same_v<D, float>;
  if constexpr (!std::is_integral_v<D>)
    Require(nearest || std::is_integral_v<S>, "the emulation rounds to floating types to nearest alone");
  for (uint32_t i = 0; i < count; ++i) {
    if constexpr (std::is_integral_v<D>)
      dst.Raw()[i] = static_cast<D>(emulation::Rounded(ToFloat(src.Raw()[i]), mode));
    else if constexpr (std::is_same_v<D, S>)
      dst.Raw()[i] = static_cast<D>(emulation::Rounded(src.Raw()[i], mode));
    else
      dst.Raw()[i] = static_cast<D>(ToFloat(src.Raw()[i]));
  }
}

// Over repeats with a mask, which counts elements of the wider of the two types; steps in blocks of 32 bytes.
template <typename D, typename S>
inline void Cast(const LocalTensor<D> &dst, const LocalTensor<S> &src, const RoundMode &mode,
                 const uint64_t mask, const uint8_t repeats, const UnaryRepeatParams &p) {
  static_assert(emulation::kCasts<D, S>(), "Cast has no form between these two types");
  static_assert(!std::is_integral_v<D> && !std::is_same_v<D, S>,
                "the emulated Cast over repeats takes two floating types");
  using namespace emulation;
  Self().Begin(V, "Cast");
  Require(sizeof(D) < sizeof(S) ? mode == RoundMode::CAST_RINT : mode == RoundMode::CAST_NONE,
          "Cast over repeats: CAST_RINT to a narrower type, CAST_NONE to a wider one");
  Require(mask <= 64, "Cast over repeats: the mask is at most 64, the wider elements of 256 bytes");
  Masked(src, false, mask, repeats, p.srcBlkStride, p.srcRepStride, "Cast");
  Masked(dst, true, mask, repeats, p.dstBlkStride, p.dstRepStride, "Cast");
  for (uint32_t r = 0; r < repeats; ++r)
    for (uint32_t lane = 0; lane < mask; ++lane)
      dst.Raw()[At<D>(r, lane, p.dstBlkStride, p.dstRepStride)] =
          static_cast<D>(ToFloat(src.Raw()[At<S>(r, lane, p.srcBlkStride, p.srcRepStride)]));
}

} // namespace AscendC
