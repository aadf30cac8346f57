// Where everything of the backward pass lies in the buffers that the schedule hands out, in 32-bit
// units (tile.h). It relies on the padding rules of pack.h and computes nothing.
#pragma once

#include "cpu/backward_table.h"
#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

constexpr std::int64_t kBlockQ = kBackwardBlockQ;
constexpr std::int64_t kBlockK = kBackwardBlockK;
// Keys whose weights and score gradients are alive at a time: each operand of the query block is
// read from the first-level cache by all but the first of the strip's tiles.
constexpr std::int64_t kStripKeys = 16;
constexpr std::int64_t kStripTiles = kStripKeys / kTileRows;

// Vectors of a register tile: all accumulators, a row of B and a broadcast must fit the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVecs = 4;
#else
constexpr int kTileVecs = 2;
#endif

// Floats between rows of `lanes` columns that are read as vectors, a few columns at a time from
// many rows: an odd multiple of a cache line where a power of two would send them all to the same
// sets.
FLASHATTN_INLINE std::int64_t padded_row(std::int64_t lanes) {
  return lanes % 128 == 0 ? lanes + 16 : lanes;
}

// Sizes of the operands' rows, in units.
template <class Unit>
struct BackwardShape {
  std::int64_t keys = 0;          // seqlen_k, padded to whole blocks
  std::int64_t head_units = 0;    // contraction of S = Q K^T
  std::int64_t value_units = 0;   // contraction of dP = dO V^T
  std::int64_t head_lanes = 0;    // columns of Q, K, dQ, dK: head_dim, padded to whole vectors
  std::int64_t value_lanes = 0;   // columns of dO, dV
  std::int64_t head_row = 0;      // from row to row of Q and K, one column per lane
  std::int64_t value_row = 0;     // of dO
  std::int64_t head_packed = 0;   // from row to row of K along the contraction
  std::int64_t value_packed = 0;  // of V
  // Gradients that are asked for; what only the others need is not computed.
  bool wants_dq = false;
  bool wants_dk = false;
  bool wants_dv = false;
  bool wants_slopes = false;
  // The weights that dV sums are not those that dS takes.
  bool drops = false;

  // Whether a gradient is asked for that takes more than lse and delta.
  FLASHATTN_INLINE bool wants_scores() const {
    return wants_dq || wants_dk || wants_dv || wants_slopes;
  }

  static FLASHATTN_INLINE BackwardShape of(const AttentionJob& job) {
    BackwardShape shape;
    shape.keys = round_up(job.seqlen_k, kBlockK);
    shape.head_units = units_of<Unit>(job.head_dim);
    shape.value_units = units_of<Unit>(job.value_dim);
    shape.head_lanes = round_up(job.head_dim, kLanes);
    shape.value_lanes = round_up(job.value_dim, kLanes);
    shape.head_row = padded_row(shape.head_lanes);
    shape.value_row = padded_row(shape.value_lanes);
    // With one element per unit, both forms of K are the same rows.
    shape.head_packed = Unit::kElements == 1 ? shape.head_row : round_up(shape.head_units, kLanes);
    shape.value_packed = round_up(shape.value_units, kLanes);
    shape.wants_dq = job.dq.data != nullptr;
    shape.wants_dk = job.dk.data != nullptr;
    shape.wants_dv = job.dv.data != nullptr;
    shape.wants_slopes = job.dslopes.data != nullptr;
    shape.drops = job.dropout.threshold != 0;
    return shape;
  }

  // Whether a row of sums takes more than one register tile's columns.
  FLASHATTN_INLINE bool in_column_groups() const {
    const std::int64_t widest = head_lanes > value_lanes ? head_lanes : value_lanes;
    return widest > kTileVecs * kLanes;
  }
};

// Hands out consecutive pieces of a buffer, each aligned to 64 bytes. Without a buffer it only
// counts.
struct Carver {
  char* base = nullptr;
  std::int64_t used = 0;  // bytes

  FLASHATTN_INLINE float* floats(std::int64_t count) {
    return static_cast<float*>(bytes(count * 4));
  }
  FLASHATTN_INLINE void* bytes(std::int64_t count) {
    void* piece = base == nullptr ? nullptr : base + used;
    used += round_up(count, 64);
    return piece;
  }
};

// Keys and values of one (batch, kv head).
template <class Unit>
struct PackedKeys {
  float* keys = nullptr;            // [keys][head_packed], K along the contraction of S
  float* values = nullptr;          // [keys][value_packed], V along the contraction of dP
  float* key_lanes = nullptr;       // [keys / kElements][head_row], K along the contraction of dQ
  unsigned char* finite = nullptr;  // [keys / kBlockK]: whether all of the block's K is finite

  static FLASHATTN_INLINE PackedKeys carve(const BackwardShape<Unit>& shape, Carver& carver) {
    PackedKeys packed;
    packed.keys = carver.floats(shape.keys * shape.head_packed);
    packed.values = carver.floats(shape.keys * shape.value_packed);
    // With one element per unit both forms of K are the same.
    packed.key_lanes = Unit::kElements == 1
                           ? packed.keys
                           : carver.floats(shape.keys / Unit::kElements * shape.head_row);
    packed.finite = static_cast<unsigned char*>(carver.bytes(shape.keys / kBlockK));
    return packed;
  }
};

// Sums over query rows, float32, unscaled. A block of keys starts at 0 when it is first touched, so
// that a task with a short range of keys neither writes nor adds the others. Sums that are not
// asked for do not exist.
template <class Unit>
struct KeySums {
  float* dk = nullptr;               // [keys][head_lanes]
  float* dv = nullptr;               // [keys][value_lanes]
  unsigned char* touched = nullptr;  // [keys / kBlockK]; where 0, the block's sums are garbage

  static FLASHATTN_INLINE KeySums carve(const BackwardShape<Unit>& shape, Carver& carver) {
    KeySums sums;
    if (shape.wants_dk) sums.dk = carver.floats(shape.keys * shape.head_lanes);
    if (shape.wants_dv) sums.dv = carver.floats(shape.keys * shape.value_lanes);
    sums.touched = static_cast<unsigned char*>(carver.bytes(shape.keys / kBlockK));
    return sums;
  }
};

// One block of query rows of one head, and what is computed for it. Lanes and rows without a query
// row are zero.
template <class Unit>
struct QueryBlock {
  float* q_columns = nullptr;     // [head_units, padded][kBlockQ], Q^T
  float* dout_columns = nullptr;  // [value_units, padded][kBlockQ], dO^T
  float* out_columns = nullptr;   // [value_units, padded][kBlockQ], O^T
  float* q_rows = nullptr;        // [kBlockQ / kElements][head_row]
  float* dout_rows = nullptr;     // [kBlockQ / kElements][value_row]
  float* lse = nullptr;           // [kBlockQ], +inf where there is no row or it is -inf
  float* lse_high = nullptr;      // [kBlockQ], lse / log(2), +inf where it is -inf: rounded,
  float* lse_low = nullptr;       // [kBlockQ]  and what the rounding lost
  float* sum_log2 = nullptr;      // [kBlockQ], of the row's exp(s - lse), or 0; lse_low has it too
  float* delta = nullptr;         // [kBlockQ], rowsum(dO * O) - dlse
  float* dq = nullptr;            // [kBlockQ][head_lanes], unscaled
  // The weights of a strip of keys, and the score gradients of the whole key block.
  float* p = nullptr;         // [kStripKeys][kBlockQ]
  float* p_units = nullptr;   // [kStripKeys][kBlockQ / kElements], P along the contraction of dV
  float* ds_units = nullptr;  // [kStripKeys][kBlockQ / kElements], dS along the contraction of dK
  float* ds = nullptr;        // [kBlockK / kElements][kBlockQ], dS along the contraction of dQ
  std::int32_t* key_begin = nullptr;  // [kBlockQ]: the keys that each row sees, counted from the
  std::int32_t* key_end = nullptr;    // [kBlockQ]  key block's first and clipped to it
  float* staging = nullptr;           // [kBlockQ][max(head_lanes, value_lanes)]

  std::int64_t first_row = 0;
  std::int64_t rows = 0;   // that exist
  bool finite = true;      // all of Q and dO
  std::uint64_t dead = 0;  // a bit for each row without weights (lse -inf)

  // dS of the strip's keys by query: [kStripKeys][kBlockQ / kElements].
  FLASHATTN_INLINE const float* ds_of_strip(std::int64_t strip) const {
    return Unit::kElements == 1 ? ds + strip * kBlockQ : ds_units;
  }

  static FLASHATTN_INLINE QueryBlock carve(const BackwardShape<Unit>& shape, Carver& carver) {
    constexpr std::int64_t elements = Unit::kElements;
    const std::int64_t widest =
        shape.head_lanes > shape.value_lanes ? shape.head_lanes : shape.value_lanes;
    QueryBlock block;
    block.q_columns = carver.floats(round_up(shape.head_units, kLanes) * kBlockQ);
    block.dout_columns = carver.floats(round_up(shape.value_units, kLanes) * kBlockQ);
    block.out_columns = carver.floats(round_up(shape.value_units, kLanes) * kBlockQ);
    block.q_rows = carver.floats(kBlockQ / elements * shape.head_row);
    block.dout_rows = carver.floats(kBlockQ / elements * shape.value_row);
    block.lse = carver.floats(kBlockQ);
    block.lse_high = carver.floats(kBlockQ);
    block.lse_low = carver.floats(kBlockQ);
    block.sum_log2 = carver.floats(kBlockQ);
    block.delta = carver.floats(kBlockQ);
    block.dq = carver.floats(kBlockQ * shape.head_lanes);
    block.p = carver.floats(kStripKeys * kBlockQ);
    block.ds = carver.floats(kBlockK / elements * kBlockQ);
    // With one element per unit the forms are the same, as long as no weight is dropped.
    block.p_units =
        elements == 1 && !shape.drops ? block.p : carver.floats(kStripKeys * kBlockQ / elements);
    block.ds_units = elements == 1 ? nullptr : carver.floats(kStripKeys * kBlockQ / elements);
    block.key_begin = static_cast<std::int32_t*>(carver.bytes(kBlockQ * 4));
    block.key_end = static_cast<std::int32_t*>(carver.bytes(kBlockQ * 4));
    block.staging = carver.floats(kBlockQ * widest);
    return block;
  }
};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
