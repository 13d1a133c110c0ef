// The record of operators. torch_npu's host code looks an operator of libopapi up by name, makes a descriptor
// of each argument and asks for its workspace; the descriptors made since the operator before are this one's
// tensors. Outside a recording every operator is refused, so that nothing computes garbage in silence.
#include "answers.h"

#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace {
constexpr int kRefused = 561103; // "no kernel for this operator"
bool recording = false;
std::mutex mutex;
std::string lines;
std::vector<std::string> tensors;
long host_waits = 0;
} // namespace

ANSWER void emulated_operators_record(int on) {
  const std::lock_guard<std::mutex> lock(mutex);
  recording = on != 0;
  if (recording) lines.clear();
  tensors.clear();
}
ANSWER const char *emulated_operators_lines() {
  return lines.c_str();
}
ANSWER int emulated_operator_recording() {
  return recording;
}

ANSWER int emulated_operator_note(const char *name) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!recording) {
    tensors.clear();
    emulated_npu_fail(name);
    return kRefused;
  }
  lines += name;
  for (const std::string &tensor : tensors) lines += ' ' + tensor;
  lines += '\n';
  tensors.clear();
  return 0;
}

ANSWER void emulated_host_waits(const char *name) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++host_waits;
  if (recording) lines += std::string("host:") + name + '\n';
}
ANSWER long emulated_host_wait_count() {
  return host_waits;
}

ANSWER void emulated_operator_tensor(int dtype, const int64_t *sizes, uint64_t count) {
  std::string text = std::to_string(dtype) + ':';
  for (uint64_t i = 0; i < count; ++i) text += (i ? "," : "") + std::to_string(sizes[i]);
  const std::lock_guard<std::mutex> lock(mutex);
  tensors.push_back(text);
}

ANSWER void *aclCreateTensor(const int64_t *sizes, uint64_t count, int dtype, const int64_t *, int64_t, int,
                             const int64_t *, uint64_t, void *) {
  emulated_operator_tensor(dtype, sizes, count);
  return std::malloc(8);
}
ANSWER int aclDestroyTensor(void *descriptor) {
  std::free(descriptor);
  return 0;
}

#define DESCRIPTOR(kind)                                                                                     \
  ANSWER void *aclCreate##kind(...) {                                                                        \
    return std::malloc(8);                                                                                   \
  }                                                                                                          \
  ANSWER int aclDestroy##kind(void *descriptor) {                                                            \
    std::free(descriptor);                                                                                   \
    return 0;                                                                                                \
  }
DESCRIPTOR(Scalar)
DESCRIPTOR(IntArray)
DESCRIPTOR(FloatArray)
DESCRIPTOR(BoolArray)
DESCRIPTOR(TensorList)
DESCRIPTOR(ScalarList)
ANSWER int aclDestroyAclOpExecutor(void *) {
  return 0;
}
ANSWER int aclSetAclOpExecutorRepeatable(void *) {
  return 0;
}

// A prefetch into the cache is a command of the runtime, not an operator.
ANSWER int aclrtCmoAsync(void *, size_t, int, void *) {
  return emulated_operator_note("aclrtCmoAsync");
}
