// Exported entry points: the best instruction set is found once, and every call goes through its table.
#include "table.h"
#include <atomic>

#ifdef ATB_HAS_baseline
ATB_DECLARE(baseline)
#endif
#ifdef ATB_HAS_avx2
ATB_DECLARE(avx2)
#endif
#ifdef ATB_HAS_avx512
ATB_DECLARE(avx512)
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

const AtbTable *table_of(int32_t isa) {
  if (isa == ATB_BASELINE) return &baseline::table;
#ifdef ATB_HAS_avx2
  if (isa == ATB_AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return &avx2::table;
#endif
#ifdef ATB_HAS_avx512
  if (isa == ATB_AVX512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return &avx512::table;
#endif
  return nullptr;
}

int32_t best_isa() {
  for (int32_t isa = ATB_AVX512; isa > ATB_BASELINE; --isa)
    if (table_of(isa)) return isa;
  return ATB_BASELINE;
}

std::atomic<int32_t> selected_isa{-1};
std::atomic<const AtbTable *> selected{nullptr};

const AtbTable *current() {
  const AtbTable *table = selected.load(std::memory_order_acquire);
  if (table) return table;
  atb_select_isa(best_isa());
  return selected.load(std::memory_order_acquire);
}

} // namespace

int32_t atb_abi_version(void) {
  return ATB_ABI_VERSION;
}
int32_t atb_best_isa(void) {
  return best_isa();
}
int32_t atb_current_isa(void) {
  current();
  return selected_isa.load(std::memory_order_acquire);
}

int32_t atb_select_isa(int32_t isa) {
  const AtbTable *table = table_of(isa);
  if (!table) return -1;
  selected_isa.store(isa, std::memory_order_release);
  selected.store(table, std::memory_order_release);
  return 0;
}

int32_t atb_has_bf16_units(void) {
#if defined(__x86_64__)
  // GCC 12's __builtin_cpu_supports does not know AMX, so the CPUID leaves are read: (7, 1).EAX bit 5 is
  // AVX512_BF16, (7, 0).EDX bit 22 is AMX-BF16.
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1)) return 1;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1)) return 1;
#endif
  return 0;
}

void atb_norm(const atb_norm_args *args) {
  current()->norm(args);
}
void atb_gated_activation(const atb_gated_args *args) {
  current()->gated(args);
}
void atb_gated_backward(const atb_gated_backward_args *args) {
  current()->gated_backward(args);
}
void atb_rotary(const atb_rotary_args *args) {
  current()->rotary(args);
}
void atb_append(const atb_append_args *args) {
  current()->append(args);
}
void atb_linear(const atb_linear_args *args) {
  current()->linear(args);
}
void atb_attention(const atb_attention_args *args) {
  current()->attention(args);
}
void atb_attention_backward(const atb_attention_backward_args *args) {
  current()->attention_backward(args);
}
void atb_merge_attention(const atb_merge_args *args) {
  current()->merge(args);
}
void atb_paged_attention(const atb_paged_args *args) {
  current()->paged(args);
}
void atb_decode_layer(const atb_decode_args *args) {
  current()->decode_layer(args);
}
void atb_decode_stack(const atb_decode_stack_args *args) {
  for (int64_t i = 0; i < args->count; ++i) {
    atb_decode_args layer = args->layers[i];
    const int32_t rotary = args->rotary_of[i], group = args->group_of[i];
    layer.hidden = args->hidden;
    layer.cos = args->cos[rotary];
    layer.sin = args->sin[rotary];
    layer.slots = args->slots[group];
    layer.block_table = args->block_tables[group];
    layer.max_blocks = args->max_blocks[group];
    layer.kv_lengths = args->kv_lengths;
    layer.batch = args->batch;
    layer.threads = args->threads;
    current()->decode_layer(&layer);
  }
}
int64_t atb_decode_workspace(const atb_decode_args *args) {
  return current()->decode_workspace(args);
}
