// Host emulation of the Ascend C kernel API: kernel sources compile unchanged with g++ and run core by core
// on the CPU.
//
// Written from the public documentation of the API. What the documentation forbids is a fault that says the
// rule: capacity of the on-chip memories, alignment, bounds, the queue protocol, hand-over between pipes,
// waits that hang, and reads of memory that nobody wrote. Modelled are the generations dav-2201 (910B,
// 910_93) and dav-3510 (950); of dav-2002 (310P) the vector side alone.
#pragma once
#include "emulation/copy.h"
#include "emulation/core.h"
#include "emulation/cube.h"
#include "emulation/cube_3510.h"
#include "emulation/cube_out.h"
#include "emulation/queue.h"
#include "emulation/reduce.h"
#include "emulation/sync.h"
#include "emulation/tensor.h"
#include "emulation/types.h"
#include "emulation/vector.h"
#include "emulation/vector_select.h"
