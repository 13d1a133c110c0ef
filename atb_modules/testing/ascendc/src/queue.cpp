// The protocol of queues: alloc, enqueue, dequeue, free; each step hands the buffer from one pipe to the
// other.
#include <algorithm>

#include "emulation/queue.h"

namespace AscendC::emulation {

Queue NewQueue(TPosition source, TPosition target, int depth) {
  Queue queue;
  queue.depth = depth;
  const bool loads = source == TPosition::GM;
  queue.position = loads ? target : source;
  queue.place = PlaceOf(queue.position);
  switch (source) {
  case TPosition::GM:
  case TPosition::VECIN:
    queue.source = MTE2;
    break;
  case TPosition::A1:
  case TPosition::B1:
    queue.source = MTE1;
    queue.position = target;
    queue.place = PlaceOf(target);
    break;
  case TPosition::CO1:
    queue.source = M;
    break;
  case TPosition::VECOUT:
  case TPosition::VECCALC:
    queue.source = V;
    break;
  default:
    Fail("this source of a queue is not modelled");
  }
  switch (target) {
  case TPosition::GM:
    queue.target = source == TPosition::CO1 ? FIX : MTE3;
    break;
  case TPosition::VECIN:
  case TPosition::VECCALC:
    queue.target = V;
    break;
  case TPosition::VECOUT:
    queue.target = MTE3;
    break;
  case TPosition::A1:
  case TPosition::B1:
    queue.target = MTE1;
    break;
  case TPosition::A2:
  case TPosition::B2:
    queue.target = M;
    break;
  default:
    Fail("this target of a queue is not modelled");
  }
  return queue;
}

void InitQueue(Core &core, size_t index, int count, size_t bytes) {
  Require(count > 0 && bytes > 0, "InitBuffer: the number of buffers and their length are positive");
  bytes = (bytes + 31) / 32 * 32;
  Queue &queue = core.queues[index];
  for (int i = 0; i < count; ++i) {
    QueueBuffer buffer;
    buffer.offset = core.Take(queue.place, bytes);
    buffer.bytes = bytes;
    queue.buffers.push_back(buffer);
    core.launch.map.push_back({static_cast<int32_t>(core.index), queue.place,
                               static_cast<int32_t>(queue.position), static_cast<int32_t>(index), i,
                               static_cast<int64_t>(buffer.offset), static_cast<int64_t>(bytes)});
  }
  // Every buffer holds an event of its kind while it is free, and there are eight.
  size_t together = 0;
  for (const Queue &other : core.queues)
    if (other.source == queue.source && other.target == queue.target) together += other.buffers.size();
  if (together > 8)
    Fail("the queues from pipe " + std::string(NameOf(queue.source)) + " to " + NameOf(queue.target) +
         " have " + std::to_string(together) + " buffers together; there are eight events of a kind");
}

namespace {
QueueBuffer &Find(Queue &queue, Place place, size_t offset, const char *verb) {
  for (QueueBuffer &buffer : queue.buffers)
    if (queue.place == place && buffer.offset == offset) return buffer;
  Fail(std::string(verb) + " of a tensor that does not belong to the queue");
}
void Trace(Core &core, Pipe pipe, const char *op, const Queue &queue, const QueueBuffer &buffer) {
  core.Begin(pipe, op);
  core.Note(queue.place, buffer.offset, buffer.bytes);
}
} // namespace

size_t AllocBuffer(Core &core, size_t index) {
  Queue &queue = core.queues[index];
  for (size_t tried = 0; tried < queue.buffers.size(); ++tried) {
    const size_t i =
        (queue.cursor + tried) % queue.buffers.size(); // in turn: the one before may still be emptied
    QueueBuffer &buffer = queue.buffers[i];
    if (buffer.state != QueueBuffer::Free) continue;
    queue.cursor = i + 1;
    buffer.state = QueueBuffer::Allocated;
    core.Learn(queue.source, buffer.freed);
    core.Poison(queue.place, buffer.offset, buffer.bytes);
    Trace(core, queue.source, "AllocTensor", queue, buffer);
    return i;
  }
  Fail("AllocTensor: all buffers of the queue are in use, it would hang");
}

void EnQueBuffer(Core &core, size_t index, Place place, size_t offset) {
  Queue &queue = core.queues[index];
  QueueBuffer &buffer = Find(queue, place, offset, "EnQue");
  Require(buffer.state == QueueBuffer::Allocated,
          "EnQue of a tensor that AllocTensor did not give, or gave away before");
  if (queue.fifo.size() >= static_cast<size_t>(queue.depth) && queue.depth > 0)
    Fail("EnQue: the queue holds " + std::to_string(queue.depth) + " tensors, its depth");
  buffer.state = QueueBuffer::Enqueued;
  Trace(core, queue.source, "EnQue", queue, buffer);
  buffer.filled = core.Snapshot(queue.source);
  queue.fifo.push_back(&buffer - queue.buffers.data());
}

size_t DeQueBuffer(Core &core, size_t index) {
  Queue &queue = core.queues[index];
  Require(!queue.fifo.empty(), "DeQue from an empty queue: it would hang");
  const size_t i = queue.fifo.front();
  queue.fifo.erase(queue.fifo.begin());
  QueueBuffer &buffer = queue.buffers[i];
  buffer.state = QueueBuffer::Dequeued;
  core.Learn(queue.target, buffer.filled);
  Trace(core, queue.target, "DeQue", queue, buffer);
  return i;
}

void FreeBuffer(Core &core, size_t index, Place place, size_t offset) {
  Queue &queue = core.queues[index];
  QueueBuffer &buffer = Find(queue, place, offset, "FreeTensor");
  Require(buffer.state != QueueBuffer::Free, "FreeTensor of a tensor that is free already");
  Require(buffer.state != QueueBuffer::Enqueued, "FreeTensor of a tensor that is still in the queue");
  buffer.state = QueueBuffer::Free;
  core.Poison(queue.place, buffer.offset, buffer.bytes); // who reads it now reads what the next load brings
  Trace(core, queue.target, "FreeTensor", queue, buffer);
  buffer.freed = core.Snapshot(queue.target);
}

} // namespace AscendC::emulation

namespace AscendC::emulation {
void Core::ReleaseAll() {
  for (const Queue &queue : queues)
    for (const QueueBuffer &buffer : queue.buffers)
      if (buffer.state != QueueBuffer::Free)
        Fail(std::string("a tensor was not freed when its pipe ended: ") +
             (buffer.state == QueueBuffer::Enqueued ? "it is still in the queue" : "FreeTensor is missing"));
  Barrier(PIPE_ALL);
  queues.clear();
  for (Memory &memory : memories) memory.used = 0;
}
} // namespace AscendC::emulation
