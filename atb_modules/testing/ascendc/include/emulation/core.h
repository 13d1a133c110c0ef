// The state of one emulated core, and the rules that every instruction is held to.
//
// A kernel runs in program order on one thread a core, and each instruction belongs to a pipe. Pipes run
// beside each other on the device, so a result may be used by another pipe only after a hand-over. This is
// checked with vector clocks: a pipe knows of another pipe's instructions up to the last event (or queue)
// that it waited for, and every access to a place must know of the accesses before it that conflict.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "types.h"

namespace AscendC::emulation {

enum Pipe : uint8_t { S, V, M, MTE1, MTE2, MTE3, FIX, kPipes };
enum Place : uint8_t { UB, L1, L0A, L0B, L0C, kPlaces, GLOBAL = kPlaces };
enum class CoreType : uint8_t { Vector, Cube };
enum class KernelType : int32_t { Vector, Cube, Mix11, Mix12 };
enum class Access : int32_t { In, Out, InOut, Work };

const char *NameOf(Pipe pipe);
const char *NameOf(Place place);

// A broken hardware rule. The launch stops and hands the sentence to the caller.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Another core has failed: the thread unwinds without a message of its own.
struct Stopped {};

[[noreturn]] void Fail(const std::string &sentence);
inline void Require(bool holds, const char *sentence) {
  if (!holds) Fail(sentence);
}

// What a pipe knows: of each pipe, up to which instruction its effects are visible.
struct Clock {
  std::array<uint32_t, kPipes> own{};
  std::vector<uint32_t> others; // core * kPipes + pipe; empty while nothing of another core is known
  void Join(const Clock &other);
  uint32_t Of(size_t core, size_t pipe) const { return others.empty() ? 0 : others[core * kPipes + pipe]; }
};

// One on-chip memory: its bytes, which of them were written, and the last accesses to every 32-byte block.
// Agents are the pipes of the cores that reach it: of one core, or of a cube core and its vector cores.
struct Memory {
  struct Block {
    uint32_t write = 0;
    uint32_t writer = 0; // an agent
  };
  Place place = UB;
  size_t capacity = 0, used = 0, peak = 0;
  size_t first_core = 0, agents = kPipes; // agent: (core - first_core) * kPipes + pipe
  std::vector<uint8_t> data, written;
  std::vector<Block> blocks;
  std::vector<uint32_t> reads; // of every block, the last read of every agent
  void Touch();                // allocates on first use, poisoned with NaN
};

// One tensor of global memory, as the launch registered it.
struct Region {
  uint8_t *base = nullptr;
  size_t bytes = 0;
  uint32_t element = 1;
  Access access = Access::In;
  uint64_t read = 0, written = 0;
  std::vector<uint64_t> writer, reader; // (agent + 1) << 32 | instruction, for every element
};

struct TraceRow {
  int32_t core, pipe, place, region;
  int64_t offset, bytes, region_offset;
  char op[32];
};

// A buffer of a queue: its state, and what the pipe that gave it away had done by then.
struct QueueBuffer {
  enum State : uint8_t { Free, Allocated, Enqueued, Dequeued };
  size_t offset = 0, bytes = 0;
  State state = Free;
  Clock filled, freed;
};
struct Queue {
  TPosition position = TPosition::VECIN;
  Pipe source = MTE2, target = V;
  Place place = UB;
  int depth = 1;
  std::vector<QueueBuffer> buffers;
  std::vector<size_t> fifo;
  size_t cursor = 0; // the buffer that is given next
};
// A row of the map of a memory: which buffer lies where.
struct MapRow {
  int32_t core, place, position, queue, buffer;
  int64_t offset, bytes;
};

struct Event {
  bool set = false;
  Clock clock;
};

struct Launch;

class Core {
public:
  Core(Launch &launch, size_t index, CoreType type, int64_t block, int64_t sub_block);

  // Starts an instruction on a pipe; the accesses that follow belong to it.
  void Begin(Pipe pipe, const char *op);
  void Read(Place place, size_t offset, size_t bytes, bool in_order = false);
  void Write(Place place, size_t offset, size_t bytes, bool in_order = false);
  // `region`: the tensor that the pointer was made from, where that is known; views of one memory overlap.
  void ReadGlobal(const void *address, size_t bytes, int32_t region = -1);
  void WriteGlobal(const void *address, size_t bytes, bool atomic, int32_t region = -1);
  int32_t RegionAt(const void *base) const;            // the tensor that begins there; -1: none
  void Note(Place place, size_t offset, size_t bytes); // a row of the trace

  Clock Snapshot(Pipe pipe) const; // what holds when everything issued on the pipe so far has ended
  void Learn(Pipe pipe, const Clock &clock);
  void Barrier(pipe_t pipe);
  void SetEvent(HardEvent event, int id);
  void WaitEvent(HardEvent event, int id);

  size_t Take(Place place, size_t bytes);                // space for a buffer
  void Poison(Place place, size_t offset, size_t bytes); // its contents are no longer anybody's
  void ReleaseAll();                                     // a pipe is destroyed: its queues must be empty
  void CheckEnd();

  // What a place is for this core: its own memory, or the L1 of the cube core that it writes to.
  Memory &At(Place place) { return place == L1 && cube != nullptr ? cube->memories[L1] : memories[place]; }

  Launch &launch;
  size_t index;
  CoreType type;
  int64_t block, sub_block;
  std::array<Memory, kPlaces> memories;
  Core *cube = nullptr; // of a vector core with a way to L1
  std::vector<Queue> queues;
  std::array<std::deque<Clock>, 32> cross; // of each flag, the sets that were not waited for
  std::string atomic; // the type that writes to global memory add in; empty: they replace
  std::array<std::array<Event, 8>, 64> events;
  std::array<uint8_t, 64> event_ids{};

private:
  Region &Find(const void *address, size_t bytes, const char *verb, int32_t region);
  bool Ended(const Memory &memory, size_t agent, uint32_t instruction) const;
  std::string Named(const Memory &memory, size_t agent) const;
  std::string Missing(const Memory &memory, size_t agent) const;
  Pipe pipe_ = S;
  const char *op_ = "";
  uint32_t epoch_ = 0;
  int32_t region_ = -1;
  int64_t region_offset_ = 0;
  std::array<uint32_t, kPipes> issued_{};
  std::array<Clock, kPipes> clocks_;
};

// What a launch is told and what it learns.
struct Limits {
  int64_t capacity[kPlaces];
  int32_t cube_cores, vector_cores, bfloat16;
  int32_t arch;                               // as __NPU_ARCH__: 2201 (910B, 910_93), 3510 (950), 2002 (310P)
  bool Apart() const { return arch != 2002; } // cube and vector cores apart
  bool Pads() const { return arch != 2002; }  // DataCopyPad and Gather exist
  bool ReachesL1() const { return arch == 3510; } // vector cores write the L1 of their cube core
};
struct Launch {
  Limits limits{};
  KernelType type = KernelType::Vector;
  int64_t blocks = 1;
  bool traced = true;
  std::vector<Region> regions;
  std::vector<TraceRow> trace;
  std::vector<MapRow> map;
  std::vector<std::unique_ptr<Core>> cores;
  // who has arrived at a flag that several cores set together: mode, flag, group -> one queue a member
  std::map<std::array<int64_t, 3>, std::vector<std::deque<Clock>>> arrivals;
  std::string error;
  class Scheduler *scheduler = nullptr;
};
void BlockUntilFlag(Core &core, int flag); // lets other cores run until the flag is set

extern thread_local Core *current;
inline Core &Self() {
  if (current == nullptr) Fail("an instruction of Ascend C was called outside a kernel");
  return *current;
}

Place PlaceOf(TPosition position);

} // namespace AscendC::emulation

namespace AscendC {
inline int64_t GetBlockIdx() {
  const auto &core = emulation::Self();
  const bool two =
      core.type == emulation::CoreType::Vector && core.launch.type == emulation::KernelType::Mix12;
  return two ? core.block * 2 + core.sub_block : core.block;
}
inline int64_t GetBlockNum() {
  return emulation::Self().launch.blocks;
}
inline int64_t GetSubBlockIdx() {
  return emulation::Self().sub_block;
}
inline int64_t GetSubBlockNum() {
  return emulation::Self().launch.type == emulation::KernelType::Mix12 ? 2 : 1;
}
inline int64_t GetTaskRation() {
  return GetSubBlockNum();
}
} // namespace AscendC

#define ASCEND_IS_AIC (::AscendC::emulation::Self().type == ::AscendC::emulation::CoreType::Cube)
#define ASCEND_IS_AIV (::AscendC::emulation::Self().type == ::AscendC::emulation::CoreType::Vector)

#define KERNEL_TYPE_AIV_ONLY ::AscendC::emulation::KernelType::Vector
#define KERNEL_TYPE_AIC_ONLY ::AscendC::emulation::KernelType::Cube
#define KERNEL_TYPE_MIX_AIV_1_0 ::AscendC::emulation::KernelType::Vector
#define KERNEL_TYPE_MIX_AIC_1_0 ::AscendC::emulation::KernelType::Cube
#define KERNEL_TYPE_MIX_AIC_1_1 ::AscendC::emulation::KernelType::Mix11
#define KERNEL_TYPE_MIX_AIC_1_2 ::AscendC::emulation::KernelType::Mix12
#define KERNEL_TASK_TYPE_DEFAULT(value)                                                                      \
  ::AscendC::emulation::Require(::AscendC::emulation::Self().launch.type == (value),                         \
                                "the kernel was launched as another type than it declares")
