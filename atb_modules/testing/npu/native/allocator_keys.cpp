// A CUDA build of torch registers the keys of its allocator's configuration when it is loaded, and torch_npu
// registers keys of the same names: the second registration throws. No CUDA device is used here, so CUDA's
// keys are withdrawn.
#include <string>
#include <unordered_set>

namespace c10::CachingAllocator {
struct AcceleratorAllocatorConfig {
  static std::unordered_set<std::string> &getMutableKeys();
};
} // namespace c10::CachingAllocator

extern "C" int emulated_npu_withdraw_keys(const char *const *names, int count) {
  auto &keys = c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys();
  int withdrawn = 0;
  for (int i = 0; i < count; ++i) withdrawn += static_cast<int>(keys.erase(names[i]));
  return withdrawn;
}
