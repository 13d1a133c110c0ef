// A libopapi whose operators only write down that they were called. torch_npu's host code looks an operator
// up by name, makes a descriptor of each argument and asks for the workspace; the descriptors made since the
// last operator are then the operator's tensors. Outside a recording every operator is refused, so that
// nothing computes garbage in silence.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#define ANSWER extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kRefused = 561103; // "no kernel for this operator"
bool recording = false;
std::mutex mutex;
std::string lines;
std::string tensors;
} // namespace

extern "C" long emulated_npu_fail(const char *name);

ANSWER void emulated_opapi_record(int on) {
  const std::lock_guard<std::mutex> lock(mutex);
  recording = on != 0;
  lines.clear();
  tensors.clear();
}
ANSWER const char *emulated_opapi_lines() {
  return lines.c_str();
}

// One line an operator: its name, then dtype:size,size,... of each tensor.
ANSWER int emulated_opapi_note(const char *name) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!recording) {
    tensors.clear();
    emulated_npu_fail(name);
    return kRefused;
  }
  lines += name;
  lines += tensors;
  lines += '\n';
  tensors.clear();
  return 0;
}

ANSWER void *aclCreateTensor(const int64_t *sizes, uint64_t count, int dtype, const int64_t *, int64_t, int,
                             const int64_t *, uint64_t, void *) {
  const std::lock_guard<std::mutex> lock(mutex);
  tensors += ' ' + std::to_string(dtype) + ':';
  for (uint64_t i = 0; i < count; ++i) tensors += (i ? "," : "") + std::to_string(sizes[i]);
  return std::malloc(8);
}
#define DUMMY(kind)                                                                                          \
  ANSWER void *aclCreate##kind(...) {                                                                        \
    return std::malloc(8);                                                                                   \
  }                                                                                                          \
  ANSWER int aclDestroy##kind(void *descriptor) {                                                            \
    std::free(descriptor);                                                                                   \
    return 0;                                                                                                \
  }
DUMMY(Scalar)
DUMMY(IntArray)
DUMMY(FloatArray)
DUMMY(BoolArray)
DUMMY(TensorList)
DUMMY(ScalarList)
ANSWER int aclDestroyTensor(void *descriptor) {
  std::free(descriptor);
  return 0;
}
ANSWER int aclDestroyAclOpExecutor(void *) {
  return 0;
}
ANSWER int aclSetAclOpExecutorRepeatable(void *) {
  return 0;
}
