// How a kernel is found by name and called with arguments that come as bytes.
#pragma once
#include <cstring>
#include <tuple>
#include <utility>

#include "core.h"

namespace AscendC::emulation {

struct Arguments {
  const uint8_t *data;
  const int64_t *sizes;
  int32_t count;
};
struct Entry {
  const char *name;
  KernelType type;
  void (*call)(const Arguments &);
};
void Register(const Entry &entry);

template <typename T> T Take(const Arguments &arguments, size_t index) {
  int64_t start = 0;
  for (size_t i = 0; i < index; ++i) start += arguments.sizes[i];
  if (arguments.sizes[index] != static_cast<int64_t>(sizeof(T)))
    Fail("argument " + std::to_string(index) + " of the kernel has " + std::to_string(sizeof(T)) +
         " bytes, given " + std::to_string(arguments.sizes[index]));
  T value;
  std::memcpy(static_cast<void *>(&value), arguments.data + start, sizeof(T));
  return value;
}
template <typename... A, size_t... I>
void CallWith(void (*kernel)(A...), const Arguments &arguments, std::index_sequence<I...>) {
  if (arguments.count != static_cast<int32_t>(sizeof...(A)))
    Fail("the kernel takes " + std::to_string(sizeof...(A)) + " arguments, given " +
         std::to_string(arguments.count));
  kernel(Take<std::decay_t<A>>(arguments, I)...);
}
template <typename... A> void CallKernel(void (*kernel)(A...), const Arguments &arguments) {
  CallWith(kernel, arguments, std::index_sequence_for<A...>());
}

} // namespace AscendC::emulation

#define ATB_EMULATED_KERNEL(kernel, type)                                                                    \
  namespace {                                                                                                \
  const bool kernel##_registered =                                                                           \
      (::AscendC::emulation::Register({#kernel, type,                                                        \
                                       [](const ::AscendC::emulation::Arguments &arguments) {                \
                                         ::AscendC::emulation::CallKernel(&kernel, arguments);               \
                                       }}),                                                                  \
       true);                                                                                                \
  }
