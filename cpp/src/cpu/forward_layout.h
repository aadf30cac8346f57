// Shapes of the forward pass: block sizes of this instruction set, and where K, V and the working
// arrays lie in the buffers that the schedule hands out. No code that computes attention.
#pragma once

#include "cpu/modifiers.h"
#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Vectors side by side in one register tile, and vectors of queries in one block. 16 accumulators
// where there are 32 registers, 12 of 16 with fused multiply-add, 8 of 16 where a product needs a
// register of its own.
#if defined(__AVX512F__)
constexpr int kPanelVecs = 4;
constexpr int kBlockVecs = 4;
#elif defined(__AVX2__)
constexpr int kPanelVecs = 3;
constexpr int kBlockVecs = 6;
#elif defined(__aarch64__)
constexpr int kPanelVecs = 4;
constexpr int kBlockVecs = 16;
#else
constexpr int kPanelVecs = 2;
constexpr int kBlockVecs = 16;
#endif
static_assert(kBlockVecs % kPanelVecs == 0);

constexpr int kBlockQ = kBlockVecs * kLanes;
// Keys of one step of the online softmax: S^T (kBlockK x kBlockQ) stays in the L1 or L2 cache.
constexpr int kBlockK = 128;
// Keys that one pack() call handles: long enough to stream, short enough to share among threads.
constexpr std::int64_t kPackKeys = 256;
constexpr std::int64_t kCacheLineFloats = 16;
// Head and value dimensions that this backend takes.
constexpr std::int64_t kMaxHeadDim = 512;

// Packed K and V of one (batch, kv head), keys padded with zero rows. Without a base only the sizes
// hold.
template <class Unit>
struct PackedHead {
  std::int64_t keys;   // padded count
  std::int64_t k_ld;   // units between rows of K
  std::int64_t v_ld;   // units between rows of V (of row pairs for bf16); value_dim in whole tiles
  std::int64_t bytes;  // of all of it
  float* K = nullptr;  // [keys][k_ld]
  float* V = nullptr;  // [keys / kElements][v_ld]: rows that hold an infinity or NaN are zero here
  std::uint8_t* skip =
      nullptr;  // [keys]: 1 for those rows; forward_values.h adds them on their own

  FLASHATTN_INLINE PackedHead(const AttentionJob& job, void* base) {
    keys = round_up(job.seqlen_k, 2 * kTileRows);
    k_ld = units_of<Unit>(job.head_dim);
    v_ld = round_up(job.value_dim, kTileRows);
    const std::int64_t k_floats = round_up(keys * k_ld, kCacheLineFloats);
    const std::int64_t v_floats = round_up(keys / Unit::kElements * v_ld, kCacheLineFloats);
    bytes = (k_floats + v_floats) * 4 + round_up(keys, 64);
    if (base == nullptr) return;
    K = static_cast<float*>(base);
    V = K + k_floats;
    skip = reinterpret_cast<std::uint8_t*>(V + v_floats);
  }
};

// Working arrays of one query block. Lanes are queries: every array's last axis is [kBlockQ], but
// staging's.
template <class Unit>
struct BlockScratch {
  std::int64_t floats = 0;   // of all of it
  float* Q = nullptr;        // Q^T [units_of(head_dim)]
  float* O = nullptr;        // O^T [value_dim in whole vectors], not yet divided by row_sum
  float* S = nullptr;        // S^T [kBlockK], then P^T in its place where a unit is a float32
  float* P = nullptr;        // P^T: S, or pairs of keys [kBlockK / 2]
  float* row_max = nullptr;  // of the scores before scaling
  // row_max * scale * log2(e), rounded once: what the exponentials subtract.
  float* row_max_log2 = nullptr;
  float* row_sum = nullptr;
  float* block_max = nullptr;  // row_max including the keys of this step
  float* rescale = nullptr;    // 2^(old row_max_log2 - new)
  float* staging = nullptr;    // rows on their way into Q, or one row of V
  float* bias = nullptr;       // [kBiasKeys], where the call has modifiers

  // Without a base only the size holds.
  FLASHATTN_INLINE BlockScratch(const AttentionJob& job, void* base) {
    const std::int64_t units = units_of<Unit>(job.head_dim);
    constexpr std::int64_t kPairRows = Unit::kElements == 2 ? kBlockK / 2 : 0;
    const std::int64_t rows = units + round_up(job.value_dim, kLanes) + kBlockK + kPairRows + 5;
    const std::int64_t staged = units * kBlockQ;
    const std::int64_t staging_floats = staged > job.value_dim ? staged : job.value_dim;
    const std::int64_t bias_rows = has_modifiers(job) ? kBiasKeys : 0;
    floats = (rows + bias_rows) * kBlockQ + staging_floats;
    if (base == nullptr) return;
    Q = static_cast<float*>(base);
    O = Q + units * kBlockQ;
    S = O + round_up(job.value_dim, kLanes) * kBlockQ;
    P = Unit::kElements == 2 ? S + kBlockK * kBlockQ : S;
    row_max = S + (kBlockK + kPairRows) * kBlockQ;
    row_max_log2 = row_max + kBlockQ;
    row_sum = row_max_log2 + kBlockQ;
    block_max = row_sum + kBlockQ;
    rescale = block_max + kBlockQ;
    bias = rescale + kBlockQ;
    staging = bias + bias_rows * kBlockQ;
  }
};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
