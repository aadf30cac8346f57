// Peak loops of one instruction set. The accumulators are local and nothing in the loops clobbers
// memory: an `asm volatile("" ::: "memory")` in them makes the compiler spill, and halves the
// figure.
#pragma once

#include "cpu/peak_table.h"
#include "cpu/vec.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Enough chains to cover latency times throughput (8 to 12), few enough to stay in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPeakChains = 24;
#else
constexpr int kPeakChains = 12;
#endif

FLASHATTN_INLINE float sum_of_chains(const Vec (&acc)[kPeakChains]) {
  Vec sum{};
  FLASHATTN_UNROLL for (int i = 0; i < kPeakChains; ++i) sum += acc[i];
  return sum[0];
}

// acc = acc * factor + term in every chain. The factor is below 1: values stay normal and finite.
FLASHATTN_NOINLINE float peak_multiply_add(std::int64_t rounds) {
  // Unknown to the compiler, which could otherwise fold the loop.
  volatile float opaque_factor = 0.999F;
  volatile float opaque_term = 0.001F;
  const Vec factor = broadcast(opaque_factor);
  const Vec term = broadcast(opaque_term);
  Vec acc[kPeakChains];
  FLASHATTN_UNROLL for (int i = 0; i < kPeakChains; ++i) acc[i] =
      term * broadcast(static_cast<float>(i));
  for (std::int64_t round = 0; round < rounds; ++round) {
    FLASHATTN_UNROLL for (int i = 0; i < kPeakChains; ++i) acc[i] = acc[i] * factor + term;
  }
  return sum_of_chains(acc);
}

#if defined(FLASHATTN_HAS_BF16_DOT)
FLASHATTN_NOINLINE float peak_bf16_dot(std::int64_t rounds) {
  // Pairs of bf16 0.5 and 0.0078125.
  volatile std::int32_t opaque_a = 0x3f003f00;
  volatile std::int32_t opaque_b = 0x3c003c00;
  const Vec a = vec_of_bits(broadcast(opaque_a));
  const Vec b = vec_of_bits(broadcast(opaque_b));
  // Different starts: equal chains would be computed once.
  Vec acc[kPeakChains];
  FLASHATTN_UNROLL for (int i = 0; i < kPeakChains; ++i) acc[i] = broadcast(static_cast<float>(i));
  for (std::int64_t round = 0; round < rounds; ++round) {
    FLASHATTN_UNROLL for (int i = 0; i < kPeakChains; ++i) acc[i] = dot_bf16_pairs(acc[i], a, b);
  }
  return sum_of_chains(acc);
}
#endif

FLASHATTN_NOINLINE float peak_read(const void* data, std::int64_t bytes) {
  constexpr std::int64_t kStep = 8;  // vectors
  constexpr std::int64_t kStepBytes = kStep * kLanes * 4;
  const char* from = static_cast<const char*>(data);
  Vec sum[kStep] = {};
  for (std::int64_t at = 0; at + kStepBytes <= bytes; at += kStepBytes) {
    FLASHATTN_UNROLL for (int i = 0; i < kStep; ++i) sum[i] += load(from + at + i * kLanes * 4);
  }
  Vec total{};
  FLASHATTN_UNROLL for (int i = 0; i < kStep; ++i) total += sum[i];
  return total[0];
}

constexpr PeakKernels kPeakKernels = {.multiply_add = peak_multiply_add,
                                      .multiply_add_flops = std::int64_t{2} * kPeakChains * kLanes,
#if defined(FLASHATTN_HAS_BF16_DOT)
                                      .bf16_dot = peak_bf16_dot,
                                      .bf16_dot_flops = std::int64_t{4} * kPeakChains * kLanes,
#else
                                      .bf16_dot = nullptr,
                                      .bf16_dot_flops = 0,
#endif
                                      .read = peak_read};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
