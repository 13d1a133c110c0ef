// Flags between a cube core and the two vector cores of its block; `pipe` is that whose work is done, or
// which waits.
//
// On dav-2201 a flag is for all of them (mode 2): both vector cores set it before the cube core goes on. On
// dav-3510 each vector core has its own (mode 4): flag f of the second one is f + 16 on the cube core.
#pragma once
#include "kernel_operator.h"

namespace atb {
using namespace AscendC;

// On a vector core.
template <pipe_t pipe> __aicore__ inline void TellCube(uint16_t flag) {
#if __NPU_ARCH__ == 3510
  CrossCoreSetFlag<4, pipe>(flag);
#else
  CrossCoreSetFlag<2, pipe>(flag);
#endif
}
template <pipe_t pipe> __aicore__ inline void AwaitCube(uint16_t flag) {
#if __NPU_ARCH__ == 3510
  CrossCoreWaitFlag<4, pipe>(flag);
#else
  CrossCoreWaitFlag<2, pipe>(flag);
#endif
}

// On a cube core.
template <pipe_t pipe> __aicore__ inline void TellVectors(uint16_t flag) {
#if __NPU_ARCH__ == 3510
  CrossCoreSetFlag<4, pipe>(flag);
  CrossCoreSetFlag<4, pipe>(flag + 16);
#else
  CrossCoreSetFlag<2, pipe>(flag);
#endif
}
template <pipe_t pipe> __aicore__ inline void AwaitVectors(uint16_t flag) {
#if __NPU_ARCH__ == 3510
  CrossCoreWaitFlag<4, pipe>(flag);
  CrossCoreWaitFlag<4, pipe>(flag + 16);
#else
  CrossCoreWaitFlag<2, pipe>(flag);
#endif
}

} // namespace atb
