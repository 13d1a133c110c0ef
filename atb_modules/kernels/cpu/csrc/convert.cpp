// The loops of convert.h.
#include "convert.h"
#include "atb_cpu.h"

namespace ATB_ISA {

template <class T> static void read_row(const T *x, int64_t n, float *out) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i));
  if (i < n) store_part(out + i, load_part(x + i, n - i), n - i);
}

template <class T> static void write_row(const float *x, int64_t n, T *out) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i));
  if (i < n) store_part(out + i, load_part(x + i, n - i), n - i);
}

void read_floats(const void *x, int dtype, int64_t n, float *out) {
  if (dtype == ATB_BF16)
    read_row((const bf16 *)x, n, out);
  else if (dtype == ATB_F16)
    read_row((const f16 *)x, n, out);
  else if (dtype == ATB_I8)
    read_row((const int8_t *)x, n, out);
  else
    read_row((const float *)x, n, out);
}

void write_floats(const float *x, int64_t n, void *out, int dtype) {
  if (dtype == ATB_BF16)
    write_row(x, n, (bf16 *)out);
  else if (dtype == ATB_F16)
    write_row(x, n, (f16 *)out);
  else
    write_row(x, n, (float *)out);
}

} // namespace ATB_ISA
