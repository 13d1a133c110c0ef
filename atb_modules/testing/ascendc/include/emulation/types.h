// The words of the API: scalar types, pipes, events, positions, rounding modes.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__
#define GM_ADDR uint8_t *

using half = _Float16;

// The upper half of a float; it has no arithmetic, as on the device.
struct bfloat16_t {
  uint16_t bits = 0;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    if ((wide & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((wide >> 16) | 0x40u);
      return;
    }
    bits = static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

enum pipe_t {
  PIPE_S = 0,
  PIPE_V,
  PIPE_M,
  PIPE_MTE1,
  PIPE_MTE2,
  PIPE_MTE3,
  PIPE_ALL,
  PIPE_MTE4,
  PIPE_MTE5,
  PIPE_V2,
  PIPE_FIX
};

constexpr int EVENT_ID0 = 0, EVENT_ID1 = 1, EVENT_ID2 = 2, EVENT_ID3 = 3, EVENT_ID4 = 4, EVENT_ID5 = 5,
              EVENT_ID6 = 6, EVENT_ID7 = 7;

namespace AscendC {

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, LCM };
using QuePosition = TPosition;
using TEventID = int8_t;

enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class SELMODE { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

// Every event between two pipes, with the pipe that sets it and the pipe that waits for it.
// clang-format off
#define ATB_HARD_EVENTS(EVENT) \
  EVENT(MTE2, MTE1) EVENT(MTE1, MTE2) EVENT(MTE1, M) EVENT(M, MTE1) EVENT(MTE2, V) EVENT(V, MTE2) \
  EVENT(MTE3, V) EVENT(V, MTE3) EVENT(M, V) EVENT(V, M) EVENT(V, V) EVENT(MTE3, MTE1) EVENT(MTE1, MTE3) \
  EVENT(MTE1, V) EVENT(V, MTE1) EVENT(MTE2, M) EVENT(M, MTE2) EVENT(M, FIX) EVENT(FIX, M) \
  EVENT(MTE3, MTE2) EVENT(MTE2, MTE3) EVENT(S, V) EVENT(V, S) EVENT(S, MTE2) EVENT(MTE2, S) EVENT(S, MTE3) \
  EVENT(MTE3, S) EVENT(M, S) EVENT(S, M) EVENT(FIX, MTE2) EVENT(MTE2, FIX) EVENT(FIX, S) EVENT(S, FIX) \
  EVENT(FIX, MTE1) EVENT(MTE1, FIX) EVENT(FIX, V) EVENT(FIX, MTE3)
// clang-format on

enum class HardEvent : uint8_t {
#define ATB_EVENT(from, to) from##_##to,
  ATB_HARD_EVENTS(ATB_EVENT)
#undef ATB_EVENT
};

// Floating or integer width as the vector unit sees it.
template <typename T> constexpr bool kIsBf16 = std::is_same_v<T, bfloat16_t>;
template <typename T> constexpr uint32_t kPerBlock = 32 / sizeof(T);
template <typename T> constexpr uint32_t kPerRepeat = 256 / sizeof(T);

template <typename T> inline float ToFloat(T value) {
  return static_cast<float>(value);
}

} // namespace AscendC
