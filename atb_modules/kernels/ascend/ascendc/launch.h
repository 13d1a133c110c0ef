// How the torch binding launches a kernel: in stream order on the current NPU stream, on a device or on the
// emulation.
//
// With CANN the launchers are those that ascendc_library generates (aclrtlaunch_<kernel>). With
// ATB_HOST_KERNELS the same sources are compiled for the host and a launch runs them on the emulation, held
// to the limits of the SoC that the runtime names.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <cstring>
#include <optional>
#include <torch/library.h>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "tiling/soc_table.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace atb_ascend {

// A pointer to global memory, how far it may be followed, and what may be done there: 0 read, 1 write, 2
// both, 3 scratch.
struct Global {
  void *data = nullptr;
  int64_t bytes = 0;
  int32_t element = 1, access = 0;
};
inline Global Pointer(const at::Tensor &tensor, int32_t access) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.data_ptr(), (last + 1) * tensor.element_size(), static_cast<int32_t>(tensor.element_size()),
          access};
}
inline Global In(const at::Tensor &tensor) {
  return Pointer(tensor, 0);
}
inline Global In(const std::optional<at::Tensor> &tensor) {
  return tensor ? Pointer(*tensor, 0) : Global{};
}
inline Global Out(const at::Tensor &tensor) {
  return Pointer(tensor, 1);
}
inline Global InOut(const at::Tensor &tensor) {
  return Pointer(tensor, 2);
}
inline Global Work(const at::Tensor &tensor) {
  return Pointer(tensor, 3);
}

inline const AtbSocRow &DeviceSoc() {
  static const AtbSocRow row = [] {
    const char *name = aclrtGetSocName();
    const AtbSocRow *found = name == nullptr ? nullptr : AtbFindSoc(name);
    TORCH_CHECK(found != nullptr, "the SoC is ", name == nullptr ? "unknown" : name,
                "; allowed: those of socs.py");
    AtbSocRow usable = *found;
    usable.soc.ub -= kAtbReservedUb;
    return usable;
  }();
  return row;
}

inline int32_t DtypeOf(const at::Tensor &tensor, const char *name) {
  switch (tensor.scalar_type()) {
  case at::kHalf:
    return ATB_HALF;
  case at::kBFloat16:
    return ATB_BFLOAT16;
  case at::kFloat:
    return ATB_FLOAT;
  default:
    TORCH_CHECK_TYPE(false, name, " is ", tensor.scalar_type(), "; allowed: float16, bfloat16, float32");
  }
}

#ifdef ATB_HOST_KERNELS

struct EmulatedLimits {
  int64_t capacity[5];
  int32_t cube_cores, vector_cores, bfloat16, arch;
};
extern "C" {
void *atb_emulation_launch(const char *kernel, const void *limits, int64_t blocks, int32_t traced,
                           const Global *tensors, int32_t tensor_count, const uint8_t *arguments,
                           const int64_t *argument_sizes, int32_t argument_count);
const char *atb_emulation_error(const void *launch);
void atb_emulation_free(void *launch);
}

// The name of a kernel; the emulation finds its entries.
#define ATB_KERNEL(op) "atb_" #op
using Kernel = const char *;

template <typename Tiling>
int RunKernel(Kernel kernel, int32_t dtype, uint32_t blocks, void *, Tiling tiling,
              const std::vector<Global> &globals) {
  const AtbSocRow &row = DeviceSoc();
  const EmulatedLimits limits{{row.soc.ub, row.l1, row.l0a, row.l0b, row.l0c},
                              row.soc.cube_cores,
                              row.soc.vector_cores,
                              row.soc.bfloat16,
                              row.arch};
  std::vector<uint8_t> arguments;
  std::vector<int64_t> sizes;
  const auto append = [&](const void *data, size_t size) {
    const auto *bytes = static_cast<const uint8_t *>(data);
    arguments.insert(arguments.end(), bytes, bytes + size);
    sizes.push_back(static_cast<int64_t>(size));
  };
  for (const Global &global : globals) append(&global.data, sizeof(void *));
  append(&tiling, sizeof tiling);
  std::vector<Global> tensors;
  for (const Global &global : globals)
    if (global.data != nullptr) tensors.push_back(global);
  const char *const suffix[] = {"_half", "_bfloat16", "_float"};
  const std::string name = std::string(kernel) + suffix[dtype];
  void *launch = atb_emulation_launch(name.c_str(), &limits, blocks, 0, tensors.data(),
                                      static_cast<int32_t>(tensors.size()), arguments.data(), sizes.data(),
                                      static_cast<int32_t>(sizes.size()));
  const std::string error = atb_emulation_error(launch);
  atb_emulation_free(launch);
  TORCH_CHECK(error.empty(), name, " on the emulation: ", error);
  return 0;
}

#else

template <typename Function> struct KernelOf {
  const char *name;
  Function half, bfloat16, floating;
};
#ifdef ATB_NO_BFLOAT16
#define ATB_KERNEL(op)                                                                                       \
  KernelOf<decltype(&aclrtlaunch_atb_##op##_half)> {                                                         \
    "atb_" #op, aclrtlaunch_atb_##op##_half, nullptr, aclrtlaunch_atb_##op##_float                           \
  }
#else
#define ATB_KERNEL(op)                                                                                       \
  KernelOf<decltype(&aclrtlaunch_atb_##op##_half)> {                                                         \
    "atb_" #op, aclrtlaunch_atb_##op##_half, aclrtlaunch_atb_##op##_bfloat16, aclrtlaunch_atb_##op##_float   \
  }
#endif

template <typename Function, typename Tiling, size_t... I>
int CallLauncher(Function function, uint32_t blocks, void *stream, Tiling &tiling,
                 const std::vector<Global> &globals, std::index_sequence<I...>) {
  return static_cast<int>(function(blocks, stream, globals[I].data..., &tiling));
}
template <size_t count, typename Function, typename Tiling>
int RunKernel(const KernelOf<Function> &kernel, int32_t dtype, uint32_t blocks, void *stream, Tiling tiling,
              const std::vector<Global> &globals) {
  const Function function = dtype == ATB_HALF       ? kernel.half
                            : dtype == ATB_BFLOAT16 ? kernel.bfloat16
                                                    : kernel.floating;
  return CallLauncher(function, blocks, stream, tiling, globals, std::make_index_sequence<count>());
}

#endif

// Queues the kernel of x's dtype behind everything that the current stream of x's device was given before,
// which need not be the current device. The handler may run later, on the thread of torch_npu's task queue,
// so it holds copies.
template <typename Kernels, typename Tiling, typename... Globals>
void Launch(const Kernels &kernel, const at::Tensor &x, const Tiling &tiling, const Globals &...globals) {
  const c10::DeviceGuard guard(x.device());
  const int32_t dtype = DtypeOf(x, "x");
  const std::vector<Global> pointers{globals...};
  void *stream = c10_npu::getCurrentNPUStream().stream(false);
  at_npu::native::OpCommand command;
#ifdef ATB_HOST_KERNELS
  command.Name(kernel);
  command.SetCustomHandler(
      [=]() -> int { return RunKernel(kernel, dtype, tiling.blocks, stream, tiling, pointers); });
#else
  command.Name(kernel.name);
  command.SetCustomHandler([=]() -> int {
    return RunKernel<sizeof...(Globals)>(kernel, dtype, tiling.blocks, stream, tiling, pointers);
  });
#endif
  command.Run();
}

inline void Accept(const char *reason, const char *op) {
  TORCH_CHECK_VALUE(reason == nullptr, op, ": ", reason);
}

} // namespace atb_ascend
