// The forward pass of one instruction set as a table of functions: chooses what a 32-bit unit is
// for the job's dtype. float32 and float16 compute in float32; bfloat16 on pairs where the
// instruction exists.
#pragma once

#include "cpu/forward_block.h"
#include "cpu/forward_pack.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

#if defined(FLASHATTN_HAS_BF16_DOT)
FLASHATTN_INLINE bool uses_bf16_pairs(const AttentionJob& job) {
  return job.dtype == DType::kBFloat16;
}
#else
// No such instruction: the pair kernels are not instantiated and this name is never used for them.
using Bf16PairUnit = Float32Unit;
FLASHATTN_INLINE bool uses_bf16_pairs(const AttentionJob&) { return false; }
#endif

static std::int64_t forward_packed_bytes(const AttentionJob& job) {
  return uses_bf16_pairs(job) ? PackedHead<Bf16PairUnit>(job, nullptr).bytes
                              : PackedHead<Float32Unit>(job, nullptr).bytes;
}

static std::int64_t forward_scratch_bytes(const AttentionJob& job) {
  return 4 * (uses_bf16_pairs(job) ? BlockScratch<Bf16PairUnit>(job, nullptr).floats
                                   : BlockScratch<Float32Unit>(job, nullptr).floats);
}

static void forward_pack(const AttentionJob& job, std::int64_t batch, std::int64_t kv_head,
                         std::int64_t key_begin, void* packed) {
  if (uses_bf16_pairs(job)) return pack_head<Bf16PairUnit>(job, batch, kv_head, key_begin, packed);
  pack_head<Float32Unit>(job, batch, kv_head, key_begin, packed);
}

static void forward_rows(const AttentionJob& job, const ForwardTask& task) {
  if (has_modifiers(job)) {
    if (uses_bf16_pairs(job)) return forward_block<Bf16PairUnit, true>(job, task);
    return forward_block<Float32Unit, true>(job, task);
  }
  if (uses_bf16_pairs(job)) return forward_block<Bf16PairUnit, false>(job, task);
  forward_block<Float32Unit, false>(job, task);
}

constexpr ForwardKernels kForwardKernels = {.block_q = kBlockQ,
                                            .pack_keys = kPackKeys,
                                            .packed_bytes = forward_packed_bytes,
                                            .scratch_bytes = forward_scratch_bytes,
                                            .pack = forward_pack,
                                            .block = forward_rows};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
