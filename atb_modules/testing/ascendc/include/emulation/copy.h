// Moves between global memory and the unified buffer (MTE2 in, MTE3 out), and inside the unified buffer (V).
#pragma once
#include "tensor.h"

namespace AscendC {

// Lengths and strides in blocks of 32 bytes.
struct DataCopyParams {
  uint16_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;
};
// blockLen in bytes; strides in bytes on the side of global memory, in blocks of 32 bytes on the other.
struct DataCopyExtParams {
  uint16_t blockCount = 1;
  uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};
template <typename T> struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue{};
};

namespace emulation {

constexpr size_t RoundUp32(size_t bytes) {
  return (bytes + 31) / 32 * 32;
}

// Adds (or copies) `count` elements to global memory.
template <typename T> inline void Store(T *to, const T *from, size_t count, const std::string &atomic) {
  if (atomic.empty()) {
    std::memcpy(to, from, count * sizeof(T));
    return;
  }
  const char wanted = std::is_same_v<T, float> ? 'f' : std::is_same_v<T, half> ? 'h' : kIsBf16<T> ? 'b' : 'i';
  Require(atomic[0] == wanted && atomic.substr(1) == std::to_string(sizeof(T)),
          "a write with SetAtomicAdd moves another type than SetAtomicAdd was given");
  for (size_t i = 0; i < count; ++i) {
    if constexpr (std::is_integral_v<T>)
      to[i] = static_cast<T>(to[i] + from[i]);
    else
      to[i] = static_cast<T>(ToFloat(to[i]) + ToFloat(from[i]));
  }
}

// `rows` runs of `bytes` each: from global memory into a local tensor.
template <typename T>
inline void CopyIn(const LocalTensor<T> &to, const GlobalTensor<T> &from, const char *op, size_t rows,
                   size_t bytes, size_t global_step, size_t local_step) {
  auto &core = Self();
  RequireType<T>();
  core.Begin(MTE2, op);
  const size_t end = rows == 0 ? 0 : (rows - 1) * local_step + bytes;
  RequireOperand(to, static_cast<int64_t>((end + sizeof(T) - 1) / sizeof(T)), op);
  for (size_t row = 0; row < rows; ++row) {
    const auto source = from[row * global_step / sizeof(T)];
    source.Check(bytes / sizeof(T));
    core.ReadGlobal(source.Raw(), bytes, source.region());
    core.Write(to.place(), to.offset() + row * local_step, bytes);
    if (bytes) std::memcpy(reinterpret_cast<uint8_t *>(to.Raw()) + row * local_step, source.Raw(), bytes);
  }
  core.Note(to.place(), to.offset(), rows * bytes);
}

// And back.
template <typename T>
inline void CopyOut(const GlobalTensor<T> &to, const LocalTensor<T> &from, const char *op, size_t rows,
                    size_t bytes, size_t global_step, size_t local_step) {
  auto &core = Self();
  RequireType<T>();
  Require(from.place() == UB,
          "only the unified buffer is copied to global memory; L0C leaves through Fixpipe");
  core.Begin(MTE3, op);
  const size_t end = rows == 0 ? 0 : (rows - 1) * local_step + bytes;
  RequireOperand(from, static_cast<int64_t>((end + sizeof(T) - 1) / sizeof(T)), op);
  for (size_t row = 0; row < rows; ++row) {
    const auto target = to[row * global_step / sizeof(T)];
    target.Check(bytes / sizeof(T));
    core.Read(from.place(), from.offset() + row * local_step, bytes);
    core.WriteGlobal(target.Raw(), bytes, !core.atomic.empty(), target.region());
    Store(target.Raw(),
          reinterpret_cast<const T *>(reinterpret_cast<const uint8_t *>(from.Raw()) + row * local_step),
          bytes / sizeof(T), core.atomic);
  }
  core.Note(from.place(), from.offset(), rows * bytes);
}

// The fields of the instruction: at most 4095 runs, each of at most 65535 blocks (DataCopy) or 2097151 bytes.
inline void RequireRuns(size_t runs, size_t length, size_t most) {
  if (runs < 1 || runs > 4095) Fail("a copy has 1 to 4095 runs, given " + std::to_string(runs));
  if (length > most)
    Fail("a run of a copy is at most " + std::to_string(most) + " long, given " + std::to_string(length));
}
inline void RequireBlocks(size_t bytes, const char *op) {
  if (bytes % 32 != 0)
    Fail(std::string(op) + ": " + std::to_string(bytes) +
         " bytes are not a multiple of 32; DataCopyPad moves other lengths");
  Require(bytes != 0, "DataCopy of no bytes");
}
inline void RequirePads() {
  Require(Self().launch.limits.Pads(), "this SoC has no DataCopyPad: lengths must be multiples of 32 bytes");
}
template <typename T> inline void RequireWhole(size_t bytes, const char *op) {
  if (bytes % sizeof(T) != 0)
    Fail(std::string(op) + ": the length or stride is not a whole number of elements");
}

} // namespace emulation

template <typename T>
inline void DataCopy(const LocalTensor<T> &to, const GlobalTensor<T> &from, uint32_t count) {
  emulation::RequireBlocks(count * sizeof(T), "DataCopy");
  emulation::CopyIn(to, from, "DataCopy", 1, count * sizeof(T), 0, 0);
}
template <typename T>
inline void DataCopy(const GlobalTensor<T> &to, const LocalTensor<T> &from, uint32_t count) {
  emulation::RequireBlocks(count * sizeof(T), "DataCopy");
  emulation::CopyOut(to, from, "DataCopy", 1, count * sizeof(T), 0, 0);
}
template <typename T>
inline void DataCopy(const LocalTensor<T> &to, const GlobalTensor<T> &from, const DataCopyParams &p) {
  const size_t bytes = p.blockLen * 32ul;
  emulation::RequireRuns(p.blockCount, p.blockLen, 65535);
  emulation::RequireBlocks(bytes, "DataCopy");
  emulation::CopyIn(to, from, "DataCopy", p.blockCount, bytes, bytes + p.srcStride * 32ul,
                    bytes + p.dstStride * 32ul);
}
template <typename T>
inline void DataCopy(const GlobalTensor<T> &to, const LocalTensor<T> &from, const DataCopyParams &p) {
  const size_t bytes = p.blockLen * 32ul;
  emulation::RequireRuns(p.blockCount, p.blockLen, 65535);
  emulation::RequireBlocks(bytes, "DataCopy");
  emulation::CopyOut(to, from, "DataCopy", p.blockCount, bytes, bytes + p.dstStride * 32ul,
                     bytes + p.srcStride * 32ul);
}

template <typename T>
inline void DataCopyPad(const LocalTensor<T> &to, const GlobalTensor<T> &from, const DataCopyExtParams &p,
                        const DataCopyPadExtParams<T> &pad) {
  emulation::RequirePads();
  emulation::RequireRuns(p.blockCount, p.blockLen, 2097151);
  const size_t left = pad.leftPadding * sizeof(T), right = pad.rightPadding * sizeof(T);
  emulation::Require(left <= 32 && right <= 32, "DataCopyPad pads by at most 32 bytes on each side");
  emulation::RequireWhole<T>(p.blockLen, "DataCopyPad");
  emulation::RequireWhole<T>(p.srcStride, "DataCopyPad");
  const size_t line = emulation::RoundUp32(left + p.blockLen + right) + p.dstStride * 32ul;
  if (left == 0) {
    emulation::CopyIn(to, from, "DataCopyPad", p.blockCount, p.blockLen, p.blockLen + size_t{p.srcStride},
                      line);
  } else {
    emulation::Require(pad.isPad, "DataCopyPad: leftPadding without isPad leaves unknown values");
    emulation::Require(p.blockCount == 1, "the emulation pads the left side of one row alone");
    emulation::CopyIn(
        LocalTensor<T>(to.place(), to.offset() + left, to.GetSize() - pad.leftPadding, to.GetPosition()),
        from, "DataCopyPad", 1, p.blockLen, 0, 0);
  }
  if (!pad.isPad) return;
  auto &core = emulation::Self();
  for (size_t row = 0; row < p.blockCount; ++row)
    for (size_t side = 0; side < 2; ++side) {
      const size_t count = side == 0 ? pad.leftPadding : pad.rightPadding;
      const size_t start = row * line + (side == 0 ? 0 : left + p.blockLen);
      core.Write(to.place(), to.offset() + start, count * sizeof(T), true);
      for (size_t i = 0; i < count; ++i) to.Raw()[start / sizeof(T) + i] = pad.paddingValue;
    }
}
template <typename T>
inline void DataCopyPad(const GlobalTensor<T> &to, const LocalTensor<T> &from, const DataCopyExtParams &p) {
  emulation::RequirePads();
  emulation::RequireRuns(p.blockCount, p.blockLen, 2097151);
  emulation::RequireWhole<T>(p.blockLen, "DataCopyPad");
  emulation::RequireWhole<T>(p.dstStride, "DataCopyPad");
  emulation::CopyOut(to, from, "DataCopyPad", p.blockCount, p.blockLen, p.blockLen + size_t{p.dstStride},
                     emulation::RoundUp32(p.blockLen) + p.srcStride * 32ul);
}

// Inside the unified buffer: an instruction of the vector pipe. To L1: one run of blocks (cube_3510.h).
template <typename T>
inline void DataCopy(const LocalTensor<T> &to, const LocalTensor<T> &from, uint32_t count) {
  using namespace emulation;
  RequireBlocks(count * sizeof(T), "DataCopy");
  if (to.place() == L1)
    return DataCopy(to, from, DataCopyParams{1, static_cast<uint16_t>(count * sizeof(T) / 32), 0, 0});
  Require(to.place() == UB && from.place() == UB,
          "the emulation copies between local tensors of the unified buffer");
  Self().Begin(V, "DataCopy");
  ReadOperand(from, count, "DataCopy");
  WriteOperand(to, count, "DataCopy");
  std::memmove(to.Raw(), from.Raw(), count * sizeof(T));
}

} // namespace AscendC
