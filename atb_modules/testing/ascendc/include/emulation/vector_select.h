// Comparison, selection and gathering in the unified buffer.
#pragma once
#include "vector.h"

namespace AscendC {

namespace emulation {

template <typename T> inline bool Compared(T x, T y, CMPMODE mode) {
  switch (mode) {
  case CMPMODE::LT:
    return x < y;
  case CMPMODE::GT:
    return x > y;
  case CMPMODE::EQ:
    return x == y;
  case CMPMODE::LE:
    return x <= y;
  case CMPMODE::GE:
    return x >= y;
  default:
    return x != y;
  }
}
template <typename T, typename U, typename Right>
inline void CompareWith(const LocalTensor<U> &dst, const LocalTensor<T> &src, CMPMODE mode, uint32_t count,
                        const char *op, const Right &right) {
  static_assert(sizeof(U) == 1, "the mask of a comparison is a tensor of bytes");
  Require(count * sizeof(T) % 256 == 0, "a comparison takes a multiple of 256 bytes");
  ReadOperand(src, count, op);
  WriteOperand(dst, (count + 7) / 8, op);
  for (uint32_t i = 0; i < count; i += 8) {
    uint8_t bits = 0;
    for (uint32_t bit = 0; bit < 8 && i + bit < count; ++bit)
      bits |= static_cast<uint8_t>(Compared<T>(src.Raw()[i + bit], right(i + bit), mode) << bit);
    dst.Raw()[i / 8] = static_cast<U>(bits);
  }
}

} // namespace emulation

// One bit an element, 1 where the comparison holds.
template <typename T, typename U>
inline void Compare(const LocalTensor<U> &dst, const LocalTensor<T> &src0, const LocalTensor<T> &src1,
                    CMPMODE mode, uint32_t count) {
  ATB_NO_BF16(Compare);
  emulation::Self().Begin(emulation::V, "Compare");
  emulation::ReadOperand(src1, count, "Compare");
  const T *other = src1.Raw();
  emulation::CompareWith(dst, src0, mode, count, "Compare", [other](uint32_t i) { return other[i]; });
}
template <typename T, typename U>
inline void CompareScalar(const LocalTensor<U> &dst, const LocalTensor<T> &src, const T scalar, CMPMODE mode,
                          uint32_t count) {
  ATB_NO_BF16(CompareScalar);
  emulation::Self().Begin(emulation::V, "CompareScalar");
  emulation::CompareWith(dst, src, mode, count, "CompareScalar", [scalar](uint32_t) { return scalar; });
}

namespace emulation {
// The vector cores of dav-2201 keep the mask of a selection behind the kernel's buffers.
inline void RequireScratch() {
  const Memory &memory = Self().memories[UB];
  if (Self().launch.limits.arch == 2201 && memory.used + 8192 > memory.capacity)
    Fail("Select needs 8192 bytes of UB that no buffer has; the buffers take " + std::to_string(memory.used) +
         " of " + std::to_string(memory.capacity));
}
} // namespace emulation

// src0 where the bit is 1, elsewhere the scalar (or src1).
template <typename T, typename U>
inline void Select(const LocalTensor<T> &dst, const LocalTensor<U> &mask, const LocalTensor<T> &src0,
                   T scalar, SELMODE mode, uint32_t count) {
  ATB_NO_BF16(Select);
  emulation::Require(mode == SELMODE::VSEL_TENSOR_SCALAR_MODE,
                     "Select with a scalar takes VSEL_TENSOR_SCALAR_MODE");
  emulation::RequireScratch();
  emulation::Self().Begin(emulation::V, "Select");
  emulation::ReadOperand(mask, (count + 8 * sizeof(U) - 1) / (8 * sizeof(U)), "Select");
  emulation::ReadOperand(src0, count, "Select");
  emulation::WriteOperand(dst, count, "Select");
  const auto *bits = reinterpret_cast<const uint8_t *>(mask.Raw());
  for (uint32_t i = 0; i < count; ++i) dst.Raw()[i] = bits[i / 8] >> (i % 8) & 1 ? src0.Raw()[i] : scalar;
}
template <typename T, typename U>
inline void Select(const LocalTensor<T> &dst, const LocalTensor<U> &mask, const LocalTensor<T> &src0,
                   const LocalTensor<T> &src1, SELMODE mode, uint32_t count) {
  ATB_NO_BF16(Select);
  emulation::Require(mode == SELMODE::VSEL_TENSOR_TENSOR_MODE,
                     "Select of two tensors takes VSEL_TENSOR_TENSOR_MODE");
  emulation::RequireScratch();
  emulation::Self().Begin(emulation::V, "Select");
  emulation::ReadOperand(mask, (count + 8 * sizeof(U) - 1) / (8 * sizeof(U)), "Select");
  emulation::ReadOperand(src0, count, "Select");
  emulation::ReadOperand(src1, count, "Select");
  emulation::WriteOperand(dst, count, "Select");
  const auto *bits = reinterpret_cast<const uint8_t *>(mask.Raw());
  for (uint32_t i = 0; i < count; ++i)
    dst.Raw()[i] = bits[i / 8] >> (i % 8) & 1 ? src0.Raw()[i] : src1.Raw()[i];
}

// dst[i] = src at byte base + offset[i]
template <typename T>
inline void Gather(const LocalTensor<T> &dst, const LocalTensor<T> &src, const LocalTensor<uint32_t> &offset,
                   const uint32_t base, const uint32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather takes elements of 16 or 32 bits");
  using namespace emulation;
  Require(Self().launch.limits.Pads(), "this SoC has no Gather with 32-bit offsets");
  Self().Begin(V, "Gather");
  ReadOperand(offset, count, "Gather");
  RequireOperand(src, 0, "Gather");
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t at = uint64_t{base} + offset.Raw()[i];
    Require(at % sizeof(T) == 0, "Gather: an offset is not aligned to the element");
    Require(at + sizeof(T) <= src.GetSize() * sizeof(T), "Gather: an offset lies past the end of the source");
    Self().Read(src.place(), src.offset() + at, sizeof(T));
  }
  WriteOperand(dst, count, "Gather");
  for (uint32_t i = 0; i < count; ++i) dst.Raw()[i] = src.Raw()[(base + offset.Raw()[i]) / sizeof(T)];
}

} // namespace AscendC
