// LocalTensor: a piece of an on-chip memory. GlobalTensor: a piece of global memory.
#pragma once
#include "core.h"
#include <algorithm>

namespace AscendC {

template <typename T> class LocalTensor {
public:
  using PrimType = T;
  LocalTensor() = default;
  LocalTensor(emulation::Place place, size_t offset, uint32_t size, TPosition position)
      : place_(place), position_(position), size_(size), offset_(offset) {}
  // `size` elements at a byte of the memory behind a position, without a pipe: "the start is aligned to 32
  // bytes", and start and length "do not exceed the memory".
  LocalTensor(TPosition position, uint32_t address, uint32_t size)
      : place_(emulation::PlaceOf(position)), position_(position), size_(size), offset_(address) {
    emulation::Require(address % 32 == 0, "a LocalTensor by address starts at a multiple of 32 bytes");
    emulation::Require(address + size * sizeof(T) <= emulation::Self().At(place_).capacity,
                       "a LocalTensor by address lies past the end of its memory");
  }

  uint32_t GetSize() const { return size_; }
  uint32_t GetLength() const { return size_ * sizeof(T); }
  TPosition GetPosition() const { return position_; }
  LocalTensor operator[](uint32_t offset) const {
    emulation::Require(offset <= size_, "the offset lies past the end of the LocalTensor");
    return {place_, offset_ + offset * sizeof(T), size_ - offset, position_};
  }
  template <typename U> LocalTensor<U> ReinterpretCast() const {
    return {place_, offset_, static_cast<uint32_t>(size_ * sizeof(T) / sizeof(U)), position_};
  }
  T GetValue(uint32_t index) const {
    auto &core = emulation::Self();
    emulation::Require(index < size_, "GetValue reads past the end of the LocalTensor");
    core.Begin(emulation::S, "GetValue");
    core.Read(place_, offset_ + index * sizeof(T), sizeof(T));
    core.Note(place_, offset_ + index * sizeof(T), sizeof(T));
    return Raw()[index];
  }
  T operator()(uint32_t index) const { return GetValue(index); }
  void SetValue(uint32_t index, T value) const {
    auto &core = emulation::Self();
    emulation::Require(index < size_, "SetValue writes past the end of the LocalTensor");
    core.Begin(emulation::S, "SetValue");
    core.Write(place_, offset_ + index * sizeof(T), sizeof(T));
    core.Note(place_, offset_ + index * sizeof(T), sizeof(T));
    Raw()[index] = value;
  }

  // The emulation's own doors.
  T *Raw() const {
    auto &memory = emulation::Self().At(place_);
    memory.Touch();
    return reinterpret_cast<T *>(memory.data.data() + offset_);
  }
  emulation::Place place() const { return place_; }
  size_t offset() const { return offset_; }

private:
  emulation::Place place_ = emulation::UB;
  TPosition position_ = TPosition::VECCALC;
  uint32_t size_ = 0;
  size_t offset_ = 0;
};

template <typename T> class GlobalTensor {
public:
  using PrimType = T;
  void SetGlobalBuffer(T *address, uint64_t size = ~0ull) {
    emulation::Require(reinterpret_cast<uintptr_t>(address) % sizeof(T) == 0,
                       "SetGlobalBuffer: the address is not aligned to the element");
    address_ = address;
    size_ = size;
    region_ = emulation::Self().RegionAt(address);
  }
  uint64_t GetSize() const { return size_; }
  GlobalTensor operator[](uint64_t offset) const {
    emulation::Require(size_ == ~0ull || offset <= size_, "the offset lies past the end of the GlobalTensor");
    GlobalTensor rest;
    rest.address_ = address_ + offset;
    rest.size_ = size_ == ~0ull ? size_ : size_ - offset;
    rest.region_ = region_;
    return rest;
  }
  const T *GetPhyAddr() const { return address_; }
  T GetValue(uint64_t index) const {
    auto &core = emulation::Self();
    Check(index + 1);
    core.Begin(emulation::S, "GetValue");
    core.ReadGlobal(address_ + index, sizeof(T), region_);
    core.Note(emulation::GLOBAL, 0, sizeof(T));
    return address_[index];
  }

  // The emulation's own doors.
  T *Raw() const { return address_; }
  int32_t region() const { return region_; }
  void Check(uint64_t end) const {
    emulation::Require(size_ == ~0ull || end <= size_,
                       "the access lies past the size given to SetGlobalBuffer");
  }

private:
  T *address_ = nullptr;
  uint64_t size_ = 0;
  int32_t region_ = -1;
};

namespace emulation {

template <typename T> inline void RequireType() {
  if constexpr (kIsBf16<T>) Require(Self().launch.limits.bfloat16, "this SoC has no bfloat16");
}

// An operand of an instruction that reads (or writes) `count` elements from the start of the tensor.
template <typename T>
inline void RequireOperand(const LocalTensor<T> &tensor, int64_t count, const char *op,
                           size_t alignment = 32) {
  if (count < 0 || static_cast<uint64_t>(count) > tensor.GetSize())
    Fail(std::string(op) + ": the count of " + std::to_string(count) + " exceeds the tensor of " +
         std::to_string(tensor.GetSize()) + " elements");
  if (tensor.offset() % alignment != 0)
    Fail(std::string(op) + ": the operand starts at byte " + std::to_string(tensor.offset()) +
         ", which is not aligned to " + std::to_string(alignment) + " bytes");
}
template <typename T>
inline void ReadOperand(const LocalTensor<T> &tensor, int64_t count, const char *op, size_t alignment = 32) {
  RequireType<T>();
  RequireOperand(tensor, count, op, alignment);
  Self().Read(tensor.place(), tensor.offset(), count * sizeof(T));
}
// On dav-3510 vector instructions are calls of register programs: "where count or repeatTime is 0 it is not
// guaranteed that the interface is a NOP".
inline void RequireSome(int64_t count, const char *op) {
  if (count == 0 && Self().launch.limits.arch == 3510)
    Fail(std::string(op) + ": dav-3510 does not promise to do nothing for a count or a repeat of 0");
}
template <typename T>
inline void WriteOperand(const LocalTensor<T> &tensor, int64_t count, const char *op, size_t alignment = 32) {
  RequireSome(count, op);
  RequireType<T>();
  RequireOperand(tensor, count, op, alignment);
  Self().Write(tensor.place(), tensor.offset(), count * sizeof(T));
  Self().Note(tensor.place(), tensor.offset(), count * sizeof(T));
}
// Operand and result of an instruction are the same elements, or apart: the unit reads ahead of what it
// writes. A result of narrower elements may start where its operand does.
template <typename D, typename S>
inline void RequireApart(const LocalTensor<D> &dst, const LocalTensor<S> &src, int64_t count,
                         const char *op) {
  const size_t to = dst.offset(), from = src.offset(), n = static_cast<size_t>(std::max<int64_t>(count, 0));
  if (dst.place() != src.place() || to >= from + n * sizeof(S) || from >= to + n * sizeof(D)) return;
  if (to == from && sizeof(D) <= sizeof(S)) return;
  Fail(std::string(op) + ": the result from byte " + std::to_string(to) +
       " lies over a part of the operand from byte " + std::to_string(from));
}

} // namespace emulation
} // namespace AscendC
