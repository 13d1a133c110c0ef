// TPipe, TQue, TQueBind and TBuf: who owns which piece of an on-chip memory, and the hand-over between pipes.
#pragma once
#include "tensor.h"

namespace AscendC {
namespace emulation {

// The pipe that fills a buffer of the queue, and the pipe that empties it.
Queue NewQueue(TPosition source, TPosition target, int depth);
size_t AllocBuffer(Core &core, size_t queue);
void EnQueBuffer(Core &core, size_t queue, Place place, size_t offset);
size_t DeQueBuffer(Core &core, size_t queue);
void FreeBuffer(Core &core, size_t queue, Place place, size_t offset);
void InitQueue(Core &core, size_t queue, int count, size_t bytes);

} // namespace emulation

template <TPosition source, TPosition target, int32_t depth, auto mask = 0> class TQueBind {
public:
  template <typename T> LocalTensor<T> AllocTensor() {
    return Tensor<T>(emulation::AllocBuffer(Core(), Index()));
  }
  template <typename T> void AllocTensor(LocalTensor<T> &tensor) { tensor = AllocTensor<T>(); }
  template <typename T> bool EnQue(const LocalTensor<T> &tensor) {
    emulation::EnQueBuffer(Core(), Index(), tensor.place(), tensor.offset());
    return true;
  }
  template <typename T> LocalTensor<T> DeQue() { return Tensor<T>(emulation::DeQueBuffer(Core(), Index())); }
  template <typename T> void DeQue(LocalTensor<T> &tensor) { tensor = DeQue<T>(); }
  template <typename T> void FreeTensor(const LocalTensor<T> &tensor) {
    emulation::FreeBuffer(Core(), Index(), tensor.place(), tensor.offset());
  }
  bool HasTensorInQue() const { return !Self().fifo.empty(); }
  int32_t GetTensorCountInQue() const { return static_cast<int32_t>(Self().fifo.size()); }
  bool VacantInQue() const { return Self().fifo.size() < static_cast<size_t>(depth); }
  bool HasIdleBuffer() const {
    for (const auto &buffer : Self().buffers)
      if (buffer.state == emulation::QueueBuffer::Free) return true;
    return false;
  }

  // The emulation's own door.
  size_t Bind() {
    emulation::Require(index_ < 0, "InitBuffer was called twice for one queue");
    index_ = static_cast<int64_t>(Core().queues.size());
    Core().queues.push_back(emulation::NewQueue(source, target, depth));
    return static_cast<size_t>(index_);
  }

private:
  static emulation::Core &Core() { return emulation::Self(); }
  size_t Index() const {
    emulation::Require(index_ >= 0, "a queue was used before InitBuffer");
    return static_cast<size_t>(index_);
  }
  emulation::Queue &Self() const { return Core().queues[Index()]; }
  template <typename T> LocalTensor<T> Tensor(size_t buffer) const {
    const auto &queue = Self();
    const auto &it = queue.buffers[buffer];
    return {queue.place, it.offset, static_cast<uint32_t>(it.bytes / sizeof(T)), queue.position};
  }
  int64_t index_ = -1;
};

namespace emulation {
constexpr TPosition SourceOf(TPosition position) {
  switch (position) {
  case TPosition::VECIN:
  case TPosition::A1:
  case TPosition::B1:
  case TPosition::C1:
    return TPosition::GM;
  case TPosition::A2:
    return TPosition::A1;
  case TPosition::B2:
    return TPosition::B1;
  default:
    return position;
  }
}
constexpr TPosition TargetOf(TPosition position) {
  return position == TPosition::VECOUT || position == TPosition::CO1 ? TPosition::GM : position;
}
} // namespace emulation

template <TPosition position, int32_t depth, auto mask = 0>
class TQue : public TQueBind<emulation::SourceOf(position), emulation::TargetOf(position), depth, mask> {};

template <TPosition position = TPosition::VECCALC> class TBuf {
public:
  template <typename T> LocalTensor<T> Get() const { return Get<T>(bytes_ / sizeof(T)); }
  template <typename T> LocalTensor<T> Get(uint32_t size) const {
    emulation::Require(bound_, "a TBuf was used before InitBuffer");
    emulation::Require(size * sizeof(T) <= bytes_, "TBuf::Get asks for more than the buffer has");
    return {emulation::PlaceOf(position), offset_, size, position};
  }
  template <typename T> LocalTensor<T> GetWithOffset(uint32_t size, uint32_t bytes) const {
    emulation::Require(bound_ && bytes + size * sizeof(T) <= bytes_,
                       "TBuf::GetWithOffset asks for more than the buffer has");
    return {emulation::PlaceOf(position), offset_ + bytes, size, position};
  }

  // The emulation's own door.
  void Bind(size_t offset, size_t bytes) {
    bound_ = true;
    offset_ = offset;
    bytes_ = bytes;
  }

private:
  bool bound_ = false;
  size_t offset_ = 0, bytes_ = 0;
};

class TPipe {
public:
  template <TPosition source, TPosition target, int32_t depth, auto mask>
  bool InitBuffer(TQueBind<source, target, depth, mask> &queue, uint8_t count, uint32_t bytes) {
    emulation::InitQueue(emulation::Self(), queue.Bind(), count, bytes);
    return true;
  }
  template <TPosition position> bool InitBuffer(TBuf<position> &buffer, uint32_t bytes) {
    auto &core = emulation::Self();
    const size_t space = (bytes + 31) / 32 * 32;
    const auto place = emulation::PlaceOf(position);
    const size_t offset = core.Take(place, space);
    core.launch.map.push_back({static_cast<int32_t>(core.index), place, static_cast<int32_t>(position), -1, 0,
                               static_cast<int64_t>(offset), static_cast<int64_t>(space)});
    buffer.Bind(offset, space);
    return true;
  }
  // An event number for one hand-over that ends before the next one begins.
  TEventID FetchEventID(HardEvent event) {
    const auto &events = emulation::Self().events[static_cast<size_t>(event)];
    for (int id = 0; id < 8; ++id)
      if (!events[id].set) return static_cast<TEventID>(id);
    emulation::Fail("FetchEventID: all eight events of this kind are in use");
  }
  template <HardEvent event> TEventID FetchEventID() { return FetchEventID(event); }
  template <HardEvent event> TEventID AllocEventID() {
    auto &used = emulation::Self().event_ids[static_cast<size_t>(event)];
    for (int id = 0; id < 8; ++id)
      if ((used >> id & 1) == 0) {
        used |= static_cast<uint8_t>(1u << id);
        return static_cast<TEventID>(id);
      }
    emulation::Fail("AllocEventID: all eight events of this kind are in use");
  }
  template <HardEvent event> void ReleaseEventID(TEventID id) {
    auto &used = emulation::Self().event_ids[static_cast<size_t>(event)];
    emulation::Require((used >> id & 1) != 0, "ReleaseEventID of an event that was not allocated");
    used &= static_cast<uint8_t>(~(1u << id));
  }
  void Reset() { emulation::Self().ReleaseAll(); }
  void Destroy() { emulation::Self().ReleaseAll(); }
};

} // namespace AscendC
