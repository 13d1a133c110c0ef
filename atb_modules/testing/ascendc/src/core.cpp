// Instructions, events and barriers of a core: what each pipe knows of the others.
#include <algorithm>
#include <cstring>

#include "emulation/core.h"
#include "emulation/sync.h"

namespace AscendC::emulation {

namespace {
struct EventPipes {
  Pipe from, to;
  const char *name;
};
const EventPipes kEvents[] = {
#define ATB_EVENT(from, to) {from, to, #from "_" #to},
    ATB_HARD_EVENTS(ATB_EVENT)
#undef ATB_EVENT
};

Pipe PipeOf(pipe_t pipe) {
  if (pipe == PIPE_FIX) return FIX;
  if (pipe > PIPE_MTE3) Fail("this pipe is not modelled");
  return static_cast<Pipe>(pipe);
}
} // namespace

void Clock::Join(const Clock &other) {
  for (size_t i = 0; i < kPipes; ++i) own[i] = std::max(own[i], other.own[i]);
  if (other.others.empty()) return;
  if (others.empty()) {
    others = other.others;
    return;
  }
  for (size_t i = 0; i < others.size(); ++i) others[i] = std::max(others[i], other.others[i]);
}

Core::Core(Launch &parent, size_t number, CoreType kind, int64_t block_index, int64_t sub_index)
    : launch(parent), index(number), type(kind), block(block_index), sub_block(sub_index) {
  for (size_t place = 0; place < kPlaces; ++place) {
    memories[place].place = static_cast<Place>(place);
    memories[place].first_core = number;
    memories[place].capacity = static_cast<size_t>(parent.limits.capacity[place]);
  }
}

void Core::Begin(Pipe pipe, const char *op) {
  if (pipe == V && type != CoreType::Vector)
    Fail(std::string(op) + " runs on a vector core, this is a cube core");
  pipe_ = pipe;
  op_ = op;
  region_ = -1;
  region_offset_ = 0;
  epoch_ = ++issued_[pipe];
  if (pipe == S) {
    clocks_[S].own[S] = epoch_;
    return;
  }
  // An instruction is issued by the scalar unit: it knows what that has waited for, not what that has
  // written.
  const uint32_t scalar = clocks_[pipe].own[S];
  const Clock &issuer = clocks_[S];
  for (size_t i = 0; i < kPipes; ++i) clocks_[pipe].own[i] = std::max(clocks_[pipe].own[i], issuer.own[i]);
  clocks_[pipe].own[S] = scalar;
  if (!issuer.others.empty()) {
    Clock foreign;
    foreign.others = issuer.others;
    clocks_[pipe].Join(foreign);
  }
}

void Core::Note(Place place, size_t offset, size_t bytes) {
  if (!launch.traced) return;
  TraceRow row{static_cast<int32_t>(index), pipe_,          place, region_, static_cast<int64_t>(offset),
               static_cast<int64_t>(bytes), region_offset_, {}};
  std::strncpy(row.op, op_, sizeof row.op - 1);
  launch.trace.push_back(row);
}

Clock Core::Snapshot(Pipe pipe) const {
  Clock clock = clocks_[pipe];
  clock.own[pipe] = issued_[pipe];
  return clock;
}

void Core::Learn(Pipe pipe, const Clock &clock) {
  clocks_[pipe].Join(clock);
  if (clock.others.empty()) return;
  for (size_t i = 0; i < kPipes; ++i)
    clocks_[pipe].own[i] = std::max(clocks_[pipe].own[i], clock.Of(index, i));
}

void Core::Barrier(pipe_t pipe) {
  if (pipe != PIPE_ALL) {
    const Pipe one = PipeOf(pipe);
    Begin(one, "PipeBarrier");
    clocks_[one].own[one] = issued_[one];
    Note(GLOBAL, 0, 0);
    return;
  }
  Begin(S, "PipeBarrier");
  Clock all;
  for (size_t i = 0; i < kPipes; ++i) all.Join(Snapshot(static_cast<Pipe>(i)));
  for (auto &clock : clocks_) clock.Join(all);
  Note(GLOBAL, 0, 0);
}

void Core::SetEvent(HardEvent event, int id) {
  const EventPipes &pipes = kEvents[static_cast<size_t>(event)];
  if (id < 0 || id > 7) Fail(std::string("SetFlag ") + pipes.name + ": the event is 0 to 7");
  Event &it = events[static_cast<size_t>(event)][id];
  if (it.set)
    Fail(std::string("SetFlag ") + pipes.name + " sets an event that is set and was not waited for");
  if (pipes.from != V || type == CoreType::Vector) Begin(pipes.from, "SetFlag");
  it.set = true;
  it.clock = Snapshot(pipes.from);
  Note(GLOBAL, static_cast<size_t>(event), 0);
}

void Core::WaitEvent(HardEvent event, int id) {
  const EventPipes &pipes = kEvents[static_cast<size_t>(event)];
  if (id < 0 || id > 7) Fail(std::string("WaitFlag ") + pipes.name + ": the event is 0 to 7");
  Event &it = events[static_cast<size_t>(event)][id];
  if (!it.set)
    Fail(std::string("WaitFlag ") + pipes.name + " waits for an event that nobody has set: it would hang");
  if (pipes.to != V || type == CoreType::Vector) Begin(pipes.to, "WaitFlag");
  it.set = false;
  Learn(pipes.to, it.clock);
  Note(GLOBAL, static_cast<size_t>(event), 0);
}

void Core::CheckEnd() {
  for (size_t event = 0; event < std::size(kEvents); ++event)
    for (const Event &it : events[event])
      if (it.set)
        Fail(std::string("the event ") + kEvents[event].name +
             " is still set when the kernel ends: the next kernel would not wait for it");
  for (size_t flag = 0; flag < cross.size(); ++flag)
    if (!cross[flag].empty())
      Fail("the cross-core flag " + std::to_string(flag) + " is still set when the kernel ends");
  Require(atomic.empty(), "SetAtomicNone is missing: the next kernel would add to its outputs");
  ReleaseAll();
}

// The cube core of dav-3510 has flags of its own for its second vector core.
static void CheckFlag(const Core &core, int flag, const char *op) {
  const bool second = core.launch.limits.arch == 3510 && core.type == CoreType::Cube;
  if (flag >= 0 && (flag <= 10 || flag == kSyncAllFlag || (second && flag >= 16 && flag <= 26))) return;
  Fail(std::string(op) + ": the flag is 0 to 10" +
       (second ? ", or 16 to 26 for the second vector core" : ""));
}

void SetCross(Core &core, int mode, pipe_t pipe, int flag) {
  Launch &launch = core.launch;
  CheckFlag(core, flag, "CrossCoreSetFlag");
  Require(mode != 4 || launch.limits.arch == 3510, "CrossCoreSetFlag of mode 4 is known to dav-3510 alone");
  core.Begin(PipeOf(pipe), "CrossCoreSetFlag");
  core.Note(GLOBAL, static_cast<size_t>(flag), 0);
  Clock clock = core.Snapshot(PipeOf(pipe));
  clock.others.resize(launch.cores.size() * kPipes, 0);
  for (size_t i = 0; i < kPipes; ++i) clock.others[core.index * kPipes + i] = clock.own[i];
  clock.own = {};
  const auto deliver = [&](Core &to, const Clock &what, int as) {
    to.cross[as].push_back(what);
    if (to.cross[as].size() > 15)
      Fail("CrossCoreSetFlag: flag " + std::to_string(as) + " was set 16 times without a wait");
  };
  if (mode == 4) {
    const bool to_vector = core.type == CoreType::Cube;
    const int64_t sub = to_vector ? flag / 16 : core.sub_block;
    for (auto &other : launch.cores)
      if (other->block == core.block && other->type != core.type && (!to_vector || other->sub_block == sub))
        return deliver(*other, clock, to_vector ? flag % 16 : flag + 16 * static_cast<int>(sub));
    Fail("CrossCoreSetFlag of mode 4: no core receives it");
  }
  std::vector<Core *> members, receivers;
  for (auto &other : launch.cores) {
    const bool same_type = other->type == core.type, same_block = other->block == core.block;
    if (mode == 0 ? same_type : mode == 1 ? same_type && same_block : same_block) {
      if (same_type) members.push_back(other.get());
      if (mode != 2 || !same_type) receivers.push_back(other.get());
    }
  }
  if (receivers.empty()) Fail("CrossCoreSetFlag of mode " + std::to_string(mode) + ": no core receives it");
  if (members.size() == 1) {
    for (Core *to : receivers) deliver(*to, clock, flag);
    return;
  }
  const int64_t group = mode == 0 ? static_cast<int64_t>(core.type) - 2 : core.block;
  auto &arrived = launch.arrivals[{mode, flag, group}];
  arrived.resize(members.size());
  const size_t me = std::find(members.begin(), members.end(), &core) - members.begin();
  arrived[me].push_back(clock);
  if (!std::all_of(arrived.begin(), arrived.end(), [](const auto &queue) { return !queue.empty(); })) return;
  Clock all;
  for (auto &queue : arrived) {
    all.Join(queue.front());
    queue.pop_front();
  }
  for (Core *to : receivers) deliver(*to, all, flag);
}

void WaitCross(Core &core, pipe_t pipe, int flag) {
  CheckFlag(core, flag, "CrossCoreWaitFlag");
  while (core.cross[flag].empty()) BlockUntilFlag(core, flag);
  const Clock clock = core.cross[flag].front();
  core.cross[flag].pop_front();
  const Pipe waits = pipe == PIPE_ALL ? S : PipeOf(pipe);
  core.Begin(waits, "CrossCoreWaitFlag");
  core.Learn(waits, clock);
  core.Note(GLOBAL, static_cast<size_t>(flag), 0);
}

} // namespace AscendC::emulation
