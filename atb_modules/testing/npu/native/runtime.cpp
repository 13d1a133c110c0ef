// Answers of the emulated runtime: the functions of CANN's runtime that torch_npu must get a sensible answer
// from to load, allocate, copy and keep its books. Device memory is host memory, streams and events are
// tokens, every queue is empty, and no kernel can run. Names and codes are those of the public interface.
//
// Whatever is not answered here is generated beside this file as a function that fails and leaves its name
// behind.
#include "answers.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <malloc.h>

namespace {
constexpr int kOk = 0;
constexpr int kInvalidArgument = 100000;
constexpr int kInvalidDevice = 107001;
constexpr int kNoContext = 107002;
constexpr int kOutOfMemory = 207001;
constexpr int kInternal = 500000;

char soc_name[64] = "Ascend910B1";
unsigned device_count = 0;
size_t device_bytes = static_cast<size_t>(64) << 30;
size_t used_bytes = 0;
int current_device = -1;
char unanswered_name[256] = "";
char message[512] = "emulated NPU: no kernel can run on this machine";
long system_options[16] = {};

void *allocate(size_t size, size_t alignment) {
  const size_t padded = (size + 2 * alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, padded);
}

void *token() {
  return std::malloc(sizeof(int64_t));
}
} // namespace

// ---- what the tests set and read
ANSWER void emulated_npu_configure(const char *soc, unsigned devices, size_t bytes) {
  std::snprintf(soc_name, sizeof soc_name, "%s", soc);
  device_count = devices;
  device_bytes = bytes;
}
ANSWER const char *emulated_npu_unanswered() {
  return unanswered_name;
}
ANSWER long emulated_npu_fail(const char *name) {
  std::snprintf(unanswered_name, sizeof unanswered_name, "%s", name);
  std::snprintf(message, sizeof message, "emulated NPU: %s has no answer on this machine", name);
  return kInternal;
}

// ---- process, devices, contexts
ANSWER int aclInit(const char *) {
  return kOk;
}
ANSWER int aclFinalize() {
  return kOk;
}
ANSWER const char *aclrtGetSocName() {
  return soc_name;
}
ANSWER const char *aclGetRecentErrMsg() {
  return message;
}
ANSWER void aclAppLog(int, const char *, const char *, unsigned, const char *, ...) {}
ANSWER int aclrtGetDeviceCount(unsigned *count) {
  *count = device_count;
  return kOk;
}
ANSWER int aclrtGetDevice(int *device) {
  if (current_device < 0) return kNoContext;
  *device = current_device;
  return kOk;
}
ANSWER int aclrtSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(device_count)) return kInvalidDevice;
  current_device = device;
  return kOk;
}
ANSWER int aclrtResetDevice(int) {
  return kOk;
}
ANSWER int aclrtResetDeviceForce(int) {
  return kOk;
}
ANSWER int aclrtGetCurrentContext(void **context) {
  static int only;
  if (current_device < 0) return kNoContext;
  *context = &only;
  return kOk;
}
ANSWER int aclrtSetCurrentContext(void *) {
  return kOk;
}
ANSWER int aclrtGetPrimaryCtxState(int device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  *active = device == current_device;
  return kOk;
}
ANSWER int aclrtSynchronizeDevice() {
  emulated_host_waits("aclrtSynchronizeDevice");
  return kOk;
}
ANSWER int aclrtSynchronizeDeviceWithTimeout(int) {
  emulated_host_waits("aclrtSynchronizeDeviceWithTimeout");
  return kOk;
}
ANSWER int aclrtGetLastError(int) {
  return kOk;
}
ANSWER int aclrtPeekAtLastError(int) {
  return kOk;
}
ANSWER int aclrtSetDeviceSatMode(int) {
  return kOk;
}
ANSWER int aclrtSetOpExecuteTimeOut(unsigned) {
  return kOk;
}
ANSWER int aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t *actual) {
  if (actual) *actual = 0;
  return kOk;
}
ANSWER int aclrtSetOpWaitTimeout(unsigned) {
  return kOk;
}

// ---- memory
ANSWER int aclrtGetMemInfo(int, size_t *free_bytes, size_t *total) {
  *total = device_bytes;
  *free_bytes = device_bytes - (used_bytes < device_bytes ? used_bytes : device_bytes);
  return kOk;
}
ANSWER int aclrtMalloc(void **pointer, size_t size, int) {
  if (used_bytes + size > device_bytes) return kOutOfMemory;
  *pointer = allocate(size, 512);
  if (!*pointer) return kOutOfMemory;
  used_bytes += malloc_usable_size(*pointer);
  return kOk;
}
ANSWER int aclrtMallocAlign32(void **pointer, size_t size, int policy) {
  return aclrtMalloc(pointer, size, policy);
}
ANSWER int aclrtFree(void *pointer) {
  used_bytes -= malloc_usable_size(pointer);
  std::free(pointer);
  return kOk;
}
ANSWER int aclrtMallocHost(void **pointer, size_t size) {
  *pointer = allocate(size, 64);
  return *pointer ? kOk : kOutOfMemory;
}
ANSWER int aclrtFreeHost(void *pointer) {
  std::free(pointer);
  return kOk;
}
ANSWER int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int, void *) {
  if (size > room) return kInvalidArgument;
  std::memmove(to, from, size);
  return kOk;
}
ANSWER int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  emulated_host_waits("aclrtMemcpy");
  return aclrtMemcpyAsync(to, room, from, size, kind, nullptr);
}
ANSWER int aclrtMemset(void *to, size_t room, int value, size_t size) {
  if (size > room) return kInvalidArgument;
  std::memset(to, value, size);
  return kOk;
}
ANSWER int aclrtMemsetAsync(void *to, size_t room, int value, size_t size, void *) {
  return aclrtMemset(to, room, value, size);
}

// ---- streams and events: nothing is ever outstanding
ANSWER int aclrtCreateStream(void **stream) {
  return (*stream = token()) ? kOk : kOutOfMemory;
}
ANSWER int aclrtCreateStreamWithConfig(void **stream, unsigned, unsigned) {
  return aclrtCreateStream(stream);
}
ANSWER int aclrtDestroyStream(void *stream) {
  std::free(stream);
  return kOk;
}
ANSWER int aclrtDestroyStreamForce(void *stream) {
  return aclrtDestroyStream(stream);
}
ANSWER int aclrtSynchronizeStream(void *) {
  emulated_host_waits("aclrtSynchronizeStream");
  return kOk;
}
ANSWER int aclrtSynchronizeStreamWithTimeout(void *, int) {
  emulated_host_waits("aclrtSynchronizeStreamWithTimeout");
  return kOk;
}
ANSWER int aclrtStreamWaitEvent(void *, void *) {
  return kOk;
}
ANSWER int aclrtStreamQuery(void *, int *status) {
  *status = 0;
  return kOk;
}
ANSWER int aclrtStreamGetId(void *, int *id) {
  *id = 0;
  return kOk;
}
ANSWER int aclrtSetStreamFailureMode(void *, uint64_t) {
  return kOk;
}
ANSWER int aclrtSetStreamOverflowSwitch(void *, unsigned) {
  return kOk;
}
ANSWER int aclrtCreateEventWithFlag(void **event, unsigned) {
  return (*event = token()) ? kOk : kOutOfMemory;
}
ANSWER int aclrtCreateEventExWithFlag(void **event, unsigned flag) {
  return aclrtCreateEventWithFlag(event, flag);
}
ANSWER int aclrtDestroyEvent(void *event) {
  std::free(event);
  return kOk;
}
ANSWER int aclrtRecordEvent(void *, void *) {
  return kOk;
}
ANSWER int aclrtResetEvent(void *, void *) {
  return kOk;
}
ANSWER int aclrtSynchronizeEvent(void *) {
  emulated_host_waits("aclrtSynchronizeEvent");
  return kOk;
}
ANSWER int aclrtQueryEventStatus(void *, int *status) {
  *status = 1;
  return kOk;
}
ANSWER int aclrtQueryEventWaitStatus(void *, int *status) {
  *status = 1;
  return kOk;
}
ANSWER int aclQueryEventRecordedStatus(void *, int *status) {
  *status = 1;
  return kOk;
}
ANSWER int aclrtEventElapsedTime(float *milliseconds, void *, void *) {
  *milliseconds = 0.0f;
  return kOk;
}

// ---- options of the runtime and of the operator compiler
ANSWER int aclrtGetSysParamOpt(int option, int64_t *value) {
  *value = system_options[option & 15];
  return kOk;
}
ANSWER int aclrtSetSysParamOpt(int option, int64_t value) {
  system_options[option & 15] = value;
  return kOk;
}
ANSWER int aclrtCtxGetSysParamOpt(int option, int64_t *value) {
  return aclrtGetSysParamOpt(option, value);
}
ANSWER int aclrtCtxSetSysParamOpt(int option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}
ANSWER int aclSetCompileopt(int, const char *) {
  return kOk;
}
ANSWER size_t aclGetCompileoptSize(int) {
  return 256;
}
ANSWER int aclGetCompileopt(int, char *value, size_t room) {
  if (room) value[0] = 0;
  return kOk;
}

// ---- books of the profiler
ANSWER int MsprofRegisterCallback(unsigned, void *) {
  return kOk;
}
ANSWER uint64_t MsprofGetHashId(const char *, size_t) {
  return 0;
}
ANSWER uint64_t MsprofSysCycleTime() {
  return 0;
}
