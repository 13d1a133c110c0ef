// Runs a kernel on all cores, one thread each, and reports what it did. Behind a C interface for ctypes.
//
// One core runs at a time and hands over where it waits for another, so a launch is repeatable and a set of
// cores that all wait is known to hang.
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

#include "emulation/entry.h"

namespace AscendC::emulation {

static std::vector<Entry> &Entries() {
  static std::vector<Entry> entries;
  return entries;
}
void Register(const Entry &entry) {
  Entries().push_back(entry);
}

class Scheduler {
public:
  explicit Scheduler(Launch &launch)
      : launch_(launch), state_(launch.cores.size()), flag_(launch.cores.size(), -1) {}

  void Run(const std::function<void()> &kernel) {
    std::vector<std::thread> threads(launch_.cores.size());
    for (;;) {
      bool any = false, all_done = true;
      for (size_t i = 0; i < threads.size() && launch_.error.empty(); ++i) {
        if (state_[i] == Done) continue;
        all_done = false;
        if (state_[i] == Blocked && launch_.cores[i]->cross[flag_[i]].empty()) continue;
        any = true;
        if (state_[i] == New) threads[i] = std::thread([this, i, &kernel] { Body(i, kernel); });
        Resume(i);
      }
      if (all_done || !launch_.error.empty()) break;
      if (!any) launch_.error = Hang();
    }
    for (size_t i = 0; i < threads.size(); ++i) {
      if (state_[i] == Blocked) Resume(i);
      if (threads[i].joinable()) threads[i].join();
    }
  }

  void Block(Core &core, int flag) {
    std::unique_lock<std::mutex> lock(mutex_);
    state_[core.index] = Blocked;
    flag_[core.index] = flag;
    turn_ = -1;
    changed_.notify_all();
    changed_.wait(lock, [&] { return turn_ == static_cast<int64_t>(core.index); });
    state_[core.index] = Running;
    if (!launch_.error.empty()) throw Stopped{};
  }

private:
  enum State { New, Running, Blocked, Done };

  void Resume(size_t i) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (state_[i] == New) state_[i] = Running;
    turn_ = static_cast<int64_t>(i);
    changed_.notify_all();
    changed_.wait(lock, [&] { return turn_ == -1; });
  }

  void Body(size_t i, const std::function<void()> &kernel) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return turn_ == static_cast<int64_t>(i); });
    }
    Core &core = *launch_.cores[i];
    current = &core;
    std::string error;
    try {
      kernel();
      core.CheckEnd();
    } catch (const Fault &fault) {
      error = std::string(core.type == CoreType::Cube ? "cube core of block " : "vector core of block ") +
              std::to_string(core.block) + ": " + fault.what();
    } catch (const Stopped &) {
    }
    current = nullptr;
    for (Memory &memory : core.memories) {
      memory.data = {};
      memory.written = {};
      memory.blocks = {};
      memory.reads = {};
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (!error.empty() && launch_.error.empty()) launch_.error = error;
    state_[i] = Done;
    turn_ = -1;
    changed_.notify_all();
  }

  std::string Hang() const {
    std::string waiting;
    for (size_t i = 0; i < state_.size(); ++i)
      if (state_[i] == Blocked) {
        const Core &core = *launch_.cores[i];
        return std::string(core.type == CoreType::Cube ? "cube" : "vector") + " core of block " +
               std::to_string(core.block) + ": CrossCoreWaitFlag(" + std::to_string(flag_[i]) +
               ") waits for a flag that no core sets: it would hang";
      }
    return "the launch would hang";
  }

  Launch &launch_;
  std::vector<State> state_;
  std::vector<int> flag_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t turn_ = -1;
};

void BlockUntilFlag(Core &core, int flag) {
  core.launch.scheduler->Block(core, flag);
}

static void AddCores(Launch &launch) {
  for (int64_t block = 0; block < launch.blocks; ++block) {
    const auto add = [&](CoreType type, int64_t sub) {
      launch.cores.push_back(std::make_unique<Core>(launch, launch.cores.size(), type, block, sub));
    };
    const size_t first = launch.cores.size();
    if (launch.type != KernelType::Vector) add(CoreType::Cube, 0);
    if (launch.type != KernelType::Cube) add(CoreType::Vector, 0);
    if (launch.type == KernelType::Mix12) add(CoreType::Vector, 1);
    if (launch.cores[first]->type != CoreType::Cube || !launch.limits.ReachesL1()) continue;
    launch.cores[first]->memories[L1].agents = (launch.cores.size() - first) * kPipes;
    for (size_t i = first + 1; i < launch.cores.size(); ++i)
      launch.cores[i]->cube = launch.cores[first].get();
  }
}

static std::string CheckBlocks(const Launch &launch) {
  const bool vector_only = launch.type == KernelType::Vector;
  if (launch.blocks < 1) return "a launch has at least one block";
  if (!vector_only && !launch.limits.Apart()) return "the cube side of this SoC is not modelled";
  const int64_t most = vector_only ? launch.limits.vector_cores : launch.limits.cube_cores;
  if (launch.blocks > most)
    return "a launch of " + std::to_string(launch.blocks) + " blocks on " + std::to_string(most) +
           " cores: the emulation holds a launch to the cores of the SoC";
  return "";
}

} // namespace AscendC::emulation

using namespace AscendC::emulation;

extern "C" {

struct atb_tensor {
  void *data;
  int64_t bytes;
  int32_t element, access;
};

#define ATB_EXPORT __attribute__((visibility("default")))

ATB_EXPORT void *atb_emulation_launch(const char *kernel, const Limits *limits, int64_t blocks,
                                      int32_t traced, const atb_tensor *tensors, int32_t tensor_count,
                                      const uint8_t *arguments, const int64_t *argument_sizes,
                                      int32_t argument_count) {
  auto *launch = new Launch;
  launch->limits = *limits;
  launch->blocks = blocks;
  launch->traced = traced != 0;
  const Entry *entry = nullptr;
  for (const Entry &it : Entries())
    if (std::strcmp(it.name, kernel) == 0) entry = &it;
  if (entry == nullptr) {
    launch->error = std::string("the library has no kernel ") + kernel;
    return launch;
  }
  launch->type = entry->type;
  launch->error = CheckBlocks(*launch);
  if (!launch->error.empty()) return launch;
  for (int32_t i = 0; i < tensor_count; ++i) {
    Region region;
    region.base = static_cast<uint8_t *>(tensors[i].data);
    region.bytes = static_cast<size_t>(tensors[i].bytes);
    region.element = static_cast<uint32_t>(tensors[i].element);
    region.access = static_cast<Access>(tensors[i].access);
    if (region.access != Access::In) {
      region.writer.assign(region.bytes / region.element, 0);
      region.reader.assign(region.bytes / region.element, 0);
    }
    launch->regions.push_back(std::move(region));
  }
  AddCores(*launch);
  Scheduler scheduler(*launch);
  launch->scheduler = &scheduler;
  const Arguments given{arguments, argument_sizes, argument_count};
  scheduler.Run([&] { entry->call(given); });
  launch->scheduler = nullptr;
  return launch;
}

ATB_EXPORT const char *atb_emulation_error(const void *launch) {
  return static_cast<const Launch *>(launch)->error.c_str();
}
// Of tensor i: bytes read, bytes written, elements that nobody wrote.
ATB_EXPORT void atb_emulation_tensor(const void *launch, int32_t i, int64_t *out) {
  const Region &region = static_cast<const Launch *>(launch)->regions[i];
  out[0] = static_cast<int64_t>(region.read);
  out[1] = static_cast<int64_t>(region.written);
  out[2] = 0;
  for (const uint64_t cell : region.writer) out[2] += cell == 0;
}
ATB_EXPORT int64_t atb_emulation_cores(const void *launch) {
  return static_cast<int64_t>(static_cast<const Launch *>(launch)->cores.size());
}
// Of core i: whether it is a cube core, its block, and the peak of each on-chip memory.
ATB_EXPORT void atb_emulation_core(const void *launch, int64_t i, int64_t *out) {
  const Core &core = *static_cast<const Launch *>(launch)->cores[i];
  out[0] = core.type == CoreType::Cube;
  out[1] = core.block;
  for (size_t place = 0; place < kPlaces; ++place)
    out[2 + place] = static_cast<int64_t>(core.memories[place].peak);
}
ATB_EXPORT int64_t atb_emulation_trace(const void *launch, const void **rows) {
  const auto &trace = static_cast<const Launch *>(launch)->trace;
  *rows = trace.data();
  return static_cast<int64_t>(trace.size());
}
ATB_EXPORT int64_t atb_emulation_map(const void *launch, const void **rows) {
  const auto &map = static_cast<const Launch *>(launch)->map;
  *rows = map.data();
  return static_cast<int64_t>(map.size());
}
ATB_EXPORT void atb_emulation_free(void *launch) {
  delete static_cast<Launch *>(launch);
}
}
