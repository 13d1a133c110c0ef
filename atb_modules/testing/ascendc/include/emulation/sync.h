// Events between the pipes of a core, and flags between cores.
#pragma once
#include "core.h"

namespace AscendC {

template <HardEvent event> inline void SetFlag(int32_t id) {
  emulation::Self().SetEvent(event, id);
}
template <HardEvent event> inline void WaitFlag(int32_t id) {
  emulation::Self().WaitEvent(event, id);
}
template <pipe_t pipe> inline void PipeBarrier() {
  emulation::Self().Barrier(pipe);
}

namespace emulation {
constexpr int kSyncAllFlag = 14; // the emulation's own
void SetCross(Core &core, int mode, pipe_t pipe, int flag);
void WaitCross(Core &core, pipe_t pipe, int flag);
} // namespace emulation

// Mode 0: all cores of a kind; 1: the two vector cores of a block; 2: a cube core and its vector cores; 4, on
// dav-3510: a cube core and one of its vector cores, the second of which has the cube core's flags 16 to 26.
template <uint8_t mode, pipe_t pipe> inline void CrossCoreSetFlag(uint16_t flag) {
  static_assert(mode <= 2 || mode == 4, "CrossCoreSetFlag: the mode is 0, 1, 2 or 4");
  static_assert(pipe != PIPE_S && pipe != PIPE_ALL,
                "CrossCoreSetFlag takes a pipe other than PIPE_S and PIPE_ALL");
  emulation::SetCross(emulation::Self(), mode, pipe, flag);
}
template <uint8_t mode, pipe_t pipe> inline void CrossCoreWaitFlag(uint16_t flag) {
  static_assert(mode <= 2 || mode == 4, "CrossCoreWaitFlag: the mode is 0, 1, 2 or 4");
  emulation::WaitCross(emulation::Self(), pipe, flag);
}
inline void CrossCoreWaitFlag(uint16_t flag) {
  emulation::WaitCross(emulation::Self(), PIPE_ALL, flag);
}

// Every vector core waits for every other.
template <bool vector_only = true> inline void SyncAll() {
  auto &core = emulation::Self();
  emulation::Require(core.type == emulation::CoreType::Vector,
                     "SyncAll<true> is called by vector cores alone");
  core.Barrier(PIPE_ALL);
  emulation::SetCross(core, 0, PIPE_MTE3, emulation::kSyncAllFlag);
  emulation::WaitCross(core, PIPE_ALL, emulation::kSyncAllFlag);
}

// Writes to global memory add to what is there until SetAtomicNone.
template <typename T> inline void SetAtomicAdd() {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, int32_t> ||
                    std::is_same_v<T, int16_t> || std::is_same_v<T, int8_t> || kIsBf16<T>,
                "SetAtomicAdd takes float, half, bfloat16_t, int32_t, int16_t or int8_t");
  auto &core = emulation::Self();
  core.Begin(emulation::S, "SetAtomicAdd");
  core.Note(emulation::GLOBAL, 0, 0);
  core.atomic = std::is_same_v<T, float> ? "f" : std::is_same_v<T, half> ? "h" : kIsBf16<T> ? "b" : "i";
  core.atomic += std::to_string(sizeof(T));
}
inline void SetAtomicNone() {
  auto &core = emulation::Self();
  core.Begin(emulation::S, "SetAtomicNone");
  core.Note(emulation::GLOBAL, 0, 0);
  core.atomic.clear();
}

} // namespace AscendC
