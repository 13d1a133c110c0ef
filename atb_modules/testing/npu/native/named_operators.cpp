// The older interface, which torch_npu takes on 310P: operators by type name, with descriptors that carry
// their sizes.
#include "answers.h"

#include <cstdlib>
#include <string>
#include <vector>

namespace {
struct Description {
  int dtype;
  int format;
  std::vector<int64_t> sizes;
};
const Description &read(const void *descriptor) {
  return *static_cast<const Description *>(descriptor);
}
} // namespace

ANSWER void *aclCreateTensorDesc(int dtype, int count, const int64_t *sizes, int format) {
  return new Description{dtype, format, std::vector<int64_t>(sizes, sizes + count)};
}
ANSWER void aclDestroyTensorDesc(const void *descriptor) {
  delete static_cast<const Description *>(descriptor);
}
ANSWER int aclGetTensorDescType(const void *descriptor) {
  return read(descriptor).dtype;
}
ANSWER int aclGetTensorDescFormat(const void *descriptor) {
  return read(descriptor).format;
}
ANSWER size_t aclGetTensorDescNumDims(const void *descriptor) {
  return read(descriptor).sizes.size();
}
ANSWER int aclGetTensorDescDimV2(const void *descriptor, size_t axis, int64_t *size) {
  if (axis >= read(descriptor).sizes.size()) return 100000;
  *size = read(descriptor).sizes[axis];
  return 0;
}
ANSWER void aclSetTensorDescName(void *, const char *) {}
ANSWER int aclSetTensorFormat(void *, int) {
  return 0;
}
ANSWER int aclSetTensorPlaceMent(void *, int) {
  return 0;
}
ANSWER int aclSetTensorShape(void *, int, const int64_t *) {
  return 0;
}

ANSWER void *aclCreateDataBuffer(void *, size_t) {
  return std::malloc(8);
}
ANSWER int aclDestroyDataBuffer(const void *buffer) {
  std::free(const_cast<void *>(buffer));
  return 0;
}

ANSWER void *aclopCreateAttr() {
  return std::malloc(8);
}
ANSWER void aclopDestroyAttr(const void *attributes) {
  std::free(const_cast<void *>(attributes));
}
#define ATTRIBUTE(kind)                                                                                      \
  ANSWER int aclopSetAttr##kind(...) {                                                                       \
    return 0;                                                                                                \
  }
ATTRIBUTE(Bool)
ATTRIBUTE(DataType)
ATTRIBUTE(Float)
ATTRIBUTE(Int)
ATTRIBUTE(ListBool)
ATTRIBUTE(ListFloat)
ATTRIBUTE(ListInt)
ATTRIBUTE(ListListInt)
ATTRIBUTE(String)

ANSWER int aclopCompileAndExecute(const char *type, int inputs, const void *const *input, const void *const *,
                                  int outputs, const void *const *output, void *const *, const void *, int,
                                  int, const char *, void *) {
  if (emulated_operator_recording()) {
    for (int i = 0; i < inputs; ++i)
      emulated_operator_tensor(read(input[i]).dtype, read(input[i]).sizes.data(),
                               read(input[i]).sizes.size());
    for (int i = 0; i < outputs; ++i)
      emulated_operator_tensor(read(output[i]).dtype, read(output[i]).sizes.data(),
                               read(output[i]).sizes.size());
  }
  return emulated_operator_note((std::string("aclop:") + type).c_str());
}
