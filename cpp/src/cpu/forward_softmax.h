// One step of the online softmax over a key block: P = exp(scale * S - row_max), the row sums, and
// the factor by which what was summed before must shrink because a maximum rose.
#pragma once

#include "cpu/forward_visible.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// P of vector n over its keys, in place of S (float32) or as pairs of keys. Returns the sum over
// keys. Two chains of additions: one would be bound by their latency.
template <class Unit>
FLASHATTN_INLINE Vec exponentials(const BlockScratch<Unit>& scratch, const KeyBlock& block, int n,
                                  Vec scale_log2, Vec minus_max_log2) {
  Vec sum_even{};
  Vec sum_odd{};
  float* S = scratch.S + block.begin[n] * kBlockQ + n * kLanes;
  for (int k = block.begin[n]; k < block.end[n]; k += 2, S += 2 * kBlockQ) {
    const Vec even = exp2<Unit::kExpDegree>(load(S) * scale_log2 + minus_max_log2);
    const Vec odd = exp2<Unit::kExpDegree>(load(S + kBlockQ) * scale_log2 + minus_max_log2);
    sum_even += even;
    sum_odd += odd;
    if constexpr (Unit::kElements == 2) {
      store(scratch.P + k / 2 * kBlockQ + n * kLanes, Unit::pair(even, odd));
    } else {
      store(S, even);
      store(S + kBlockQ, odd);
    }
  }
  return sum_even + sum_odd;
}

// Updates row_max, row_sum and rescale; returns whether any lane's maximum rose, that is whether O
// must be multiplied by rescale. scale_log2 = scale * log2(e) > 0.
template <class Unit>
FLASHATTN_INLINE bool softmax_block(const BlockScratch<Unit>& scratch, const KeyBlock& block,
                                    float scale_log2) {
  bool rose = false;
  for (int n = 0; n < kBlockVecs; ++n) {
    const int lane = n * kLanes;
    if (block.begin[n] == block.end[n]) {
      store(scratch.rescale + lane, broadcast(1.0F));
      continue;
    }
    const Vec old_max = load(scratch.row_max + lane);
    const Vec new_max = load(scratch.block_max + lane);
    const Vec old_log2 = load(scratch.row_max_log2 + lane);
    const Vec new_log2 = new_max * broadcast(scale_log2);
    store(scratch.row_max + lane, new_max);
    store(scratch.row_max_log2 + lane, new_log2);
    // A lane that has seen nothing above -inf subtracts 0: all its exponentials are 0 and none is
    // NaN.
    const Vec minus_max = -select(new_max == broadcast(-kInfinity), Vec{}, new_log2);
    const Vec rescale = exp2<6>(old_log2 + minus_max);
    store(scratch.rescale + lane, rescale);
    rose |= any(old_max != new_max);
    const Vec sum = exponentials(scratch, block, n, broadcast(scale_log2), minus_max);
    store(scratch.row_sum + lane, load(scratch.row_sum + lane) * rescale + sum);
  }
  return rose;
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
