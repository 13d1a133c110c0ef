// Who may touch which byte: bounds, bytes that nobody wrote, and conflicts between pipes and cores.
#include <algorithm>
#include <cstring>

#include "emulation/core.h"

namespace AscendC::emulation {

namespace {
const char *const kPipeNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
const char *const kPlaceNames[] = {"UB", "L1", "L0A", "L0B", "L0C", "global memory"};
} // namespace

thread_local Core *current = nullptr;

const char *NameOf(Pipe pipe) {
  return kPipeNames[pipe];
}
const char *NameOf(Place place) {
  return kPlaceNames[place];
}
void Fail(const std::string &sentence) {
  throw Fault(sentence);
}

Place PlaceOf(TPosition position) {
  switch (position) {
  case TPosition::A1:
  case TPosition::B1:
  case TPosition::C1:
    return L1;
  case TPosition::A2:
    return L0A;
  case TPosition::B2:
    return L0B;
  case TPosition::CO1:
    return L0C;
  case TPosition::VECIN:
  case TPosition::VECOUT:
  case TPosition::VECCALC:
    return UB;
  default:
    Fail("this TPosition has no memory in the emulation");
  }
}

void Memory::Touch() {
  if (!data.empty() || capacity == 0) return;
  data.assign(capacity, 0xff);
  written.assign(capacity, 0);
  blocks.resize(capacity / 32);
  reads.resize(blocks.size() * agents);
}

size_t Core::Take(Place place, size_t bytes) {
  Memory &memory = memories[place];
  const bool vector_place = place == UB;
  if (vector_place != (type == CoreType::Vector))
    Fail(std::string("a ") + (type == CoreType::Vector ? "vector" : "cube") + " core has no " +
         NameOf(place));
  if (memory.used + bytes > memory.capacity)
    Fail(std::string(NameOf(place)) + " overflow: " + std::to_string(memory.used + bytes) +
         " bytes are asked for, the SoC has " + std::to_string(memory.capacity));
  const size_t offset = memory.used;
  memory.used += bytes;
  memory.peak = std::max(memory.peak, memory.used);
  return offset;
}

void Core::Poison(Place place, size_t offset, size_t bytes) {
  Memory &memory = At(place);
  memory.Touch();
  std::memset(memory.written.data() + offset, 0, bytes);
}

// Whether the current instruction knows that an instruction of an agent has ended.
bool Core::Ended(const Memory &memory, size_t agent, uint32_t instruction) const {
  const size_t core = memory.first_core + agent / kPipes, pipe = agent % kPipes;
  const Clock &known = clocks_[pipe_];
  return instruction <= (core == index ? known.own[pipe] : known.Of(core, pipe));
}
std::string Core::Named(const Memory &memory, size_t agent) const {
  const size_t core = memory.first_core + agent / kPipes;
  return std::string("pipe ") + kPipeNames[agent % kPipes] +
         (core == index ? "" : " of core " + std::to_string(core));
}
std::string Core::Missing(const Memory &memory, size_t agent) const {
  const size_t core = memory.first_core + agent / kPipes;
  if (core != index) return "a cross-core flag is missing";
  const std::string from = kPipeNames[agent % kPipes], to = kPipeNames[pipe_];
  return "an event (or queue) " + from + "_" + to + (from == to ? ", here PipeBarrier," : "") + " is missing";
}

void Core::Read(Place place, size_t offset, size_t bytes, bool in_order) {
  if (bytes == 0) return;
  Memory &memory = At(place);
  memory.Touch();
  Require(offset + bytes <= memory.capacity, "a read past the end of an on-chip memory");
  if (const void *hole = std::memchr(memory.written.data() + offset, 0, bytes)) {
    const size_t at = static_cast<const uint8_t *>(hole) - memory.written.data();
    Fail(std::string(op_) + " reads byte " + std::to_string(at) + " of " + NameOf(place) +
         ", which nobody has written");
  }
  const size_t me = (index - memory.first_core) * kPipes + pipe_;
  for (size_t block = offset / 32; block <= (offset + bytes - 1) / 32; ++block) {
    const auto &it = memory.blocks[block];
    if (!Ended(memory, it.writer, it.write) && !(it.writer == me && (in_order || it.write == epoch_)))
      Fail(std::string(op_) + " on pipe " + NameOf(pipe_) + " reads " + NameOf(place) + " at byte " +
           std::to_string(block * 32) + " before the write by " + Named(memory, it.writer) +
           " is known to have ended: " + Missing(memory, it.writer));
    memory.reads[block * memory.agents + me] = epoch_;
  }
}

void Core::Write(Place place, size_t offset, size_t bytes, bool in_order) {
  if (bytes == 0) return;
  Memory &memory = At(place);
  memory.Touch();
  Require(offset + bytes <= memory.capacity, "a write past the end of an on-chip memory");
  if (&memory != &memories[place])
    Require(offset + bytes <= memory.used, "a vector core writes L1 where its cube core has no buffer");
  const size_t me = (index - memory.first_core) * kPipes + pipe_;
  for (size_t block = offset / 32; block <= (offset + bytes - 1) / 32; ++block) {
    auto &it = memory.blocks[block];
    const uint32_t *reads = &memory.reads[block * memory.agents];
    for (size_t agent = 0; agent < memory.agents; ++agent)
      if (reads[agent] != 0 && agent != me && !Ended(memory, agent, reads[agent]))
        Fail(std::string(op_) + " on pipe " + NameOf(pipe_) + " overwrites " + NameOf(place) + " at byte " +
             std::to_string(block * 32) + " while " + Named(memory, agent) +
             " may still read it: " + Missing(memory, agent));
    if (!Ended(memory, it.writer, it.write) && !(it.writer == me && (in_order || it.write == epoch_)))
      Fail(std::string(op_) + " on pipe " + NameOf(pipe_) + " overwrites " + NameOf(place) + " at byte " +
           std::to_string(block * 32) + " while " + Named(memory, it.writer) +
           " may still write it: " + Missing(memory, it.writer));
    it.write = epoch_;
    it.writer = static_cast<uint32_t>(me);
  }
  std::memset(memory.written.data() + offset, 1, bytes);
}

int32_t Core::RegionAt(const void *base) const {
  for (size_t i = 0; i < launch.regions.size(); ++i)
    if (launch.regions[i].base == base && launch.regions[i].bytes != 0) return static_cast<int32_t>(i);
  return -1;
}

Region &Core::Find(const void *address, size_t bytes, const char *verb, int32_t wanted) {
  const auto *at = static_cast<const uint8_t *>(address);
  for (size_t i = 0; i < launch.regions.size(); ++i) {
    if (wanted >= 0 && i != static_cast<size_t>(wanted)) continue;
    Region &region = launch.regions[i];
    if (at < region.base || at >= region.base + region.bytes) continue;
    if (at + bytes > region.base + region.bytes)
      Fail(std::string(op_) + " " + verb + " " + std::to_string(at + bytes - region.base - region.bytes) +
           " bytes past the end of tensor " + std::to_string(i) + " of global memory");
    region_ = static_cast<int32_t>(i);
    region_offset_ = at - region.base;
    return region;
  }
  Fail(std::string(op_) + " " + verb + " global memory that belongs to no tensor of the launch");
}

namespace {
constexpr uint64_t kAdds = 1ull << 63; // marks a write that added

// Whether `known` covers the access that a cell names.
bool Knows(const Clock &clock, size_t core, uint64_t cell) {
  const size_t agent = (cell >> 32) - 1;
  const auto epoch = static_cast<uint32_t>(cell);
  if (agent / kPipes == core) return epoch <= clock.own[agent % kPipes];
  return epoch <= clock.Of(agent / kPipes, agent % kPipes);
}
std::string WhoIs(uint64_t cell) {
  const size_t agent = (cell >> 32) - 1;
  return "pipe " + std::string(kPipeNames[agent % kPipes]) + " of core " + std::to_string(agent / kPipes);
}
} // namespace

void Core::ReadGlobal(const void *address, size_t bytes, int32_t wanted) {
  if (bytes == 0) return;
  Region &region = Find(address, bytes, "reads", wanted);
  region.read += bytes;
  if (region.access == Access::In) return;
  const Clock &clock = clocks_[pipe_];
  const uint64_t mine = (static_cast<uint64_t>(index * kPipes + pipe_ + 1) << 32) | epoch_;
  uint64_t fine = 0;
  const size_t first = region_offset_ / region.element, last = (region_offset_ + bytes - 1) / region.element;
  for (size_t i = first; i <= last; ++i) {
    const uint64_t cell = region.writer[i] & ~kAdds;
    region.reader[i] = mine;
    if (cell == fine && cell != 0) continue;
    if (cell == 0) {
      if (region.access != Access::InOut)
        Fail(std::string(op_) + " reads element " + std::to_string(i) + " of tensor " +
             std::to_string(region_) + " of global memory, which nobody has written");
      continue;
    }
    if (!Knows(clock, index, cell))
      Fail(std::string(op_) + " on pipe " + NameOf(pipe_) + " of core " + std::to_string(index) +
           " reads tensor " + std::to_string(region_) + " of global memory before the write by " +
           WhoIs(cell) + " is known to have ended: an event or cross-core flag is missing");
    fine = cell;
  }
}

void Core::WriteGlobal(const void *address, size_t bytes, bool adds, int32_t wanted) {
  if (bytes == 0) return;
  Region &region = Find(address, bytes, "writes", wanted);
  region.written += bytes;
  if (region.access == Access::In)
    Fail(std::string(op_) + " writes tensor " + std::to_string(region_) + ", which is an input");
  const Clock &clock = clocks_[pipe_];
  const uint64_t mine =
      (static_cast<uint64_t>(index * kPipes + pipe_ + 1) << 32) | epoch_ | (adds ? kAdds : 0);
  uint64_t fine = 0;
  const size_t first = region_offset_ / region.element, last = (region_offset_ + bytes - 1) / region.element;
  for (size_t i = first; i <= last; ++i) {
    const uint64_t cell = region.writer[i], reader = region.reader[i];
    region.writer[i] = mine;
    const bool both_add = adds && (cell & kAdds) != 0;
    if (cell == 0 && adds && region.access != Access::InOut)
      Fail(std::string(op_) + " adds to tensor " + std::to_string(region_) +
           " of global memory, which nobody has written");
    if (cell != 0 && cell != fine && cell != mine && !both_add) {
      if (!Knows(clock, index, cell & ~kAdds))
        Fail(std::string(op_) + " on pipe " + NameOf(pipe_) + " of core " + std::to_string(index) +
             " overwrites tensor " + std::to_string(region_) + " of global memory while " +
             WhoIs(cell & ~kAdds) + " may still write it: an event or cross-core flag is missing");
      fine = cell;
    }
    if (reader != 0 && !Knows(clock, index, reader))
      Fail(std::string(op_) + " on pipe " + NameOf(pipe_) + " of core " + std::to_string(index) +
           " overwrites tensor " + std::to_string(region_) + " of global memory while " + WhoIs(reader) +
           " may still read it: an event or cross-core flag is missing");
  }
}

} // namespace AscendC::emulation
