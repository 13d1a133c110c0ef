// What the answers of the emulated runtime share.
#pragma once

#include <cstddef>
#include <cstdint>

#define ANSWER extern "C" __attribute__((visibility("default")))

// Leave `name` behind as the last function without an answer; returns an internal error.
extern "C" long emulated_npu_fail(const char *name);
// Write an operator with its tensors into the record; refuses it where nothing is recorded.
extern "C" int emulated_operator_note(const char *name);
// Write down that the host waits for the device, where operators are recorded.
extern "C" void emulated_host_waits(const char *name);
// Whether operators are recorded now.
extern "C" int emulated_operator_recording();
// Add a tensor to those of the next operator.
extern "C" void emulated_operator_tensor(int dtype, const int64_t *sizes, uint64_t count);
