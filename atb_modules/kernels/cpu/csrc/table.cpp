// Fills the table of kernels of the instruction set that this file is compiled for.
#include "table.h"

ATB_DECLARE(ATB_ISA)

namespace ATB_ISA {
// extern: a const object would otherwise be local to this file. Constant-initialised, so that loading the
// library runs no code of an instruction set that the processor may not have.
extern const AtbTable table = {norm,   gated,  gated_backward, rotary,
                               append, linear, attention,      attention_backward,
                               merge,  paged,  decode_layer,   decode_workspace};
} // namespace ATB_ISA
