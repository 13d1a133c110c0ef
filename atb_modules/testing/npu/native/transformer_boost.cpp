// Operations of ATB (the transformer boost library): objects with virtual functions, of which torch_npu calls
// Setup and Execute. The object here answers every virtual call with success and writes its name down when it
// is set up.
#include "answers.h"

#include <cstdlib>
#include <string>

namespace {
struct Object;
using Method = int (*)(Object *, const void *, uint64_t *, void *);
struct Object {
  const Method *table;
  std::string name;
};

int succeed(Object *, const void *, uint64_t *, void *) {
  return 0;
}
int set_up(Object *object, const void *, uint64_t *workspace, void *) {
  *workspace = 0;
  return emulated_operator_note(object->name.c_str());
}
// Order of the public class atb::Operation: two destructors, GetName, InferShape, GetInputNum, GetOutputNum,
// Setup, ...
const Method kOperation[16] = {succeed, succeed, succeed, succeed, succeed, succeed, set_up,  succeed,
                               succeed, succeed, succeed, succeed, succeed, succeed, succeed, succeed};
const Method kContext[16] = {succeed, succeed, succeed, succeed, succeed, succeed, succeed, succeed,
                             succeed, succeed, succeed, succeed, succeed, succeed, succeed, succeed};
} // namespace

// Called by the generated atb::CreateOperation of each kind.
ANSWER int emulated_atb_create(const char *name, void **operation) {
  *operation = new Object{kOperation, name};
  return 0;
}
ANSWER int _ZN3atb16DestroyOperationEPNS_9OperationE(void *operation) {
  delete static_cast<Object *>(operation);
  return 0;
}
ANSWER int _ZN3atb13CreateContextEPPNS_7ContextE(void **context) {
  *context = new Object{kContext, "context"};
  return 0;
}
ANSWER int _ZN3atb14DestroyContextEPNS_7ContextE(void *context) {
  delete static_cast<Object *>(context);
  return 0;
}
