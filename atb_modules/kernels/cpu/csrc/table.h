// The kernels of one instruction set, as the dispatcher sees them.
#pragma once
#include "atb_cpu.h"

struct AtbTable {
  void (*norm)(const atb_norm_args *);
  void (*gated)(const atb_gated_args *);
  void (*gated_backward)(const atb_gated_backward_args *);
  void (*rotary)(const atb_rotary_args *);
  void (*append)(const atb_append_args *);
  void (*linear)(const atb_linear_args *);
  void (*attention)(const atb_attention_args *);
  void (*attention_backward)(const atb_attention_backward_args *);
  void (*merge)(const atb_merge_args *);
  void (*paged)(const atb_paged_args *);
  void (*decode_layer)(const atb_decode_args *);
  int64_t (*decode_workspace)(const atb_decode_args *);
};

#define ATB_DECLARE(isa)                                                                                     \
  namespace isa {                                                                                            \
  extern const AtbTable table;                                                                               \
  void norm(const atb_norm_args *);                                                                          \
  void gated(const atb_gated_args *);                                                                        \
  void gated_backward(const atb_gated_backward_args *);                                                      \
  void rotary(const atb_rotary_args *);                                                                      \
  void append(const atb_append_args *);                                                                      \
  void linear(const atb_linear_args *);                                                                      \
  void attention(const atb_attention_args *);                                                                \
  void attention_backward(const atb_attention_backward_args *);                                              \
  void merge(const atb_merge_args *);                                                                        \
  void paged(const atb_paged_args *);                                                                        \
  void decode_layer(const atb_decode_args *);                                                                \
  int64_t decode_workspace(const atb_decode_args *);                                                         \
  }
