// Operands of the backward pass between the tensors and the packed buffers: keys and values of a
// head, the query rows of a block, dQ, and the summed dK and dV. It relies on pack.h for the forms
// and multiplies nothing but rowsum(dO * O) and the scale.
#pragma once

#include "cpu/backward_layout.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// Whether none of `count` units (a multiple of 4 kLanes) holds an infinity or a NaN. Adding 0 * x
// finds them; four sums hide the latency of the additions.
template <class Unit>
FLASHATTN_INLINE bool units_are_finite(const float* units, std::int64_t count) {
  Vec sums[4] = {};
  for (std::int64_t i = 0; i < count; i += 4 * kLanes) {
    FLASHATTN_UNROLL for (int n = 0; n < 4; ++n) {
      const Vec x = load(units + i + n * kLanes);
      sums[n] += x * 0.0F;
      // A pair read as a float32 has the exponent of its high half; shifted up, of its low half.
      if constexpr (Unit::kElements == 2) sums[n] += vec_of_bits(bits_of(x) << 16) * 0.0F;
    }
  }
  return !any((sums[0] + sums[1]) + (sums[2] + sums[3]) != Vec{});
}

// Packs kBlockQ rows from `begin` on along the contraction, to[kBlockQ][packed], and across it,
// lanes_to[kBlockQ / kElements][lanes], rows `row` apart (the same buffer for one element per
// unit).
template <class Unit>
FLASHATTN_INLINE void pack_both_ways(const Rows& rows, std::int64_t begin, std::int64_t valid_end,
                                     std::int64_t dim, float* to, std::int64_t packed,
                                     float* lanes_to, std::int64_t lanes, std::int64_t row) {
  static_assert(kBlockQ == kBlockK);
  if constexpr (Unit::kElements == 1) {
    pack_rows_float32(rows, begin, begin + kBlockQ, valid_end, dim, to, packed);
  } else {
    pack_rows_bf16(rows, begin, begin + kBlockQ, valid_end, dim, to, packed);
    for (std::int64_t r = 0; r < kBlockQ; r += 2) {
      const auto* even = reinterpret_cast<const std::uint16_t*>(to + r * packed);
      interleave_rows16(even, even + 2 * packed, lanes, lanes_to + r / 2 * row);
    }
  }
}

// The keys that a PackedKeys holds: those of one (batch, kv head) from first_key on.
struct PackedPlace {
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;
  std::int64_t first_key = 0;
};

// K and V of keys [keys.begin, keys.end), whole blocks; rows past seqlen_k become zeros.
template <class Unit>
static void pack_key_range(const AttentionJob& job, const BackwardShape<Unit>& shape,
                           const PackedPlace& place, Interval keys,
                           const PackedKeys<Unit>& packed) {
  const Rows k = rows_of(job.key, job.dtype, place.batch, place.kv_head);
  const Rows v = rows_of(job.value, job.dtype, place.batch, place.kv_head);
  for (std::int64_t key = keys.begin; key < keys.end; key += kBlockK) {
    const std::int64_t to = key - place.first_key;
    float* along = packed.keys + to * shape.head_packed;
    pack_both_ways<Unit>(k, key, job.seqlen_k, job.head_dim, along, shape.head_packed,
                         packed.key_lanes + to / Unit::kElements * shape.head_row, shape.head_lanes,
                         shape.head_row);
    packed.finite[to / kBlockK] = units_are_finite<Unit>(along, kBlockK * shape.head_packed);
    float* values = packed.values + to * shape.value_packed;
    if constexpr (Unit::kElements == 1) {
      pack_rows_float32(v, key, key + kBlockK, job.seqlen_k, job.value_dim, values,
                        shape.value_packed);
    } else {
      pack_rows_bf16(v, key, key + kBlockK, job.seqlen_k, job.value_dim, values,
                     shape.value_packed);
    }
  }
}

template <class Unit>
static void pack_key_blocks(const AttentionJob& job, std::int64_t batch, std::int64_t kv_head,
                            Interval keys, void* memory) {
  const auto shape = BackwardShape<Unit>::of(job);
  Carver carver{.base = static_cast<char*>(memory)};
  const auto packed = PackedKeys<Unit>::carve(shape, carver);
  pack_key_range(job, shape, {.batch = batch, .kv_head = kv_head}, keys, packed);
}

FLASHATTN_INLINE const float* scalar_of(const RowScalars& table, std::int64_t batch,
                                        std::int64_t head, std::int64_t row) {
  return table.head(batch, head) + row * table.row_stride;
}

// Whether row i of O holds nothing but zeros.
template <class Unit>
FLASHATTN_INLINE bool is_zero_row(const BackwardShape<Unit>& shape, const QueryBlock<Unit>& block,
                                  std::int64_t i) {
  std::uint32_t magnitudes = 0;
  for (std::int64_t u = 0; u < shape.value_units; ++u) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, block.out_columns + u * kBlockQ + i, sizeof(bits));
    magnitudes |= bits & (Unit::kElements == 2 ? 0x7fff7fffU : 0x7fffffffU);
  }
  return magnitudes == 0;
}

// lse, and delta = rowsum(dO * O) - dlse. A row whose only weight is its sink's has no dO * O,
// whatever dO holds. The row sum is taken in the order and the steps of
// dP = dO V^T (dot_tile): where one weight is 1 and O is that row of V, dP - delta is exactly 0.
template <class Unit>
static void load_row_scalars(const AttentionJob& job, const BackwardShape<Unit>& shape,
                             std::int64_t batch, std::int64_t head, QueryBlock<Unit>& block) {
  for (std::int64_t i = 0; i < kBlockQ; i += kLanes) {
    Vec sum{};
    for (std::int64_t first = 0; first < shape.value_units; first += kDepthStep) {
      const std::int64_t left = shape.value_units - first;
      const std::int64_t last = left < kDepthStep ? shape.value_units : first + kDepthStep;
      Vec part{};
      for (std::int64_t u = first; u < last; ++u) {
        part = Unit::multiply_add(part, load(block.out_columns + u * kBlockQ + i),
                                  load(block.dout_columns + u * kBlockQ + i));
      }
      sum += part;
    }
    store(block.delta + i, sum);
  }
  const float sink = job.sinks.data != nullptr ? job.sinks.at(batch, head) : kInfinity;
  block.dead = 0;
  for (std::int64_t i = 0; i < kBlockQ; ++i) {
    // 2^(s - inf) is 0 for every finite s; with -inf a row without weights would give NaN.
    block.lse[i] = kInfinity;
    block.lse_high[i] = kInfinity;
    block.lse_low[i] = 0.0F;
    block.sum_log2[i] = 0.0F;
    if (i >= block.rows) continue;
    const float lse = *scalar_of(job.lse, batch, head, block.first_row + i);
    if (lse == -kInfinity) {
      block.dead |= std::uint64_t{1} << i;
    } else {
      block.lse[i] = lse;
    }
    const double lse_log2 = static_cast<double>(lse) / static_cast<double>(kLn2);
    if (lse != -kInfinity) block.lse_high[i] = static_cast<float>(lse_log2);
    if (block.lse_high[i] != kInfinity) {
      block.lse_low[i] = static_cast<float>(lse_log2 - static_cast<double>(block.lse_high[i]));
    }
    if (job.sum_log2.data != nullptr) {
      block.sum_log2[i] = *scalar_of(job.sum_log2, batch, head, block.first_row + i);
      block.lse_low[i] += block.sum_log2[i];
    }
    if (!block.finite && lse == sink && is_zero_row(shape, block, i)) block.delta[i] = 0.0F;
    if (job.dlse.data == nullptr) continue;
    block.delta[i] -= *scalar_of(job.dlse, batch, head, block.first_row + i);
  }
}

// One operand of a query block: its rows, its columns, and whether all of it is finite.
template <class Unit>
FLASHATTN_INLINE bool load_operand(const Rows& rows, const QueryBlock<Unit>& block,
                                   std::int64_t valid_end, std::int64_t dim, float* rows_to,
                                   std::int64_t row, float* columns_to) {
  const std::int64_t units = round_up(units_of<Unit>(dim), kLanes);
  float* along = Unit::kElements == 1 ? rows_to : block.staging;
  const std::int64_t packed = Unit::kElements == 1 ? row : units;
  pack_both_ways<Unit>(rows, block.first_row, valid_end, dim, along, packed, rows_to,
                       round_up(dim, kLanes), row);
  transpose_units(reinterpret_cast<const char*>(along), packed * 4, kBlockQ, kBlockQ, units,
                  columns_to, kBlockQ);
  return units_are_finite<Unit>(along, kBlockQ * packed);
}

// Reads query rows [first_row, first_row + kBlockQ) of one head; dQ starts at 0.
template <class Unit>
static void load_query_block(const AttentionJob& job, const BackwardShape<Unit>& shape,
                             std::int64_t batch, std::int64_t head, std::int64_t first_row,
                             QueryBlock<Unit>& block) {
  const std::int64_t rows = job.seqlen_q;
  block.first_row = first_row;
  block.rows = rows - first_row < kBlockQ ? rows - first_row : kBlockQ;
  const bool q_finite = load_operand(rows_of(job.query, job.dtype, batch, head), block, rows,
                                     job.head_dim, block.q_rows, shape.head_row, block.q_columns);
  const bool dout_finite =
      load_operand(rows_of(job.dout, job.dtype, batch, head), block, rows, job.value_dim,
                   block.dout_rows, shape.value_row, block.dout_columns);
  block.finite = q_finite && dout_finite;
  transpose_rows<Unit>(rows_of(job.out, job.dtype, batch, head), first_row, rows, kBlockQ,
                       job.value_dim, block.out_columns, kBlockQ, block.staging);
  load_row_scalars(job, shape, batch, head, block);
  zero_units(block.dq, kBlockQ * shape.head_lanes);
}

// row[0..lanes) *= scale, in place.
FLASHATTN_INLINE void scale_row(float* row, std::int64_t lanes, float scale) {
  for (std::int64_t d = 0; d < lanes; d += kLanes) store(row + d, load(row + d) * scale);
}

// A row without weights (lse -inf) has a gradient of exactly 0, even where its weights of 0 met
// keys that are not finite.
template <class Unit>
static void write_dq(const AttentionJob& job, const BackwardShape<Unit>& shape, std::int64_t batch,
                     std::int64_t head, const QueryBlock<Unit>& block) {
  if (job.dq.data == nullptr) return;
  const Rows dq = rows_of(job.dq, job.dtype, batch, head);
  for (std::int64_t i = 0; i < block.rows; ++i) {
    float* row = block.dq + i * shape.head_lanes;
    if ((block.dead >> i & 1) != 0) {
      zero_units(row, shape.head_lanes);
    } else {
      scale_row(row, shape.head_lanes, job.scale);
    }
    write_row(row, job.head_dim, dq, block.first_row + i);
  }
}

// to[0..count) = scale times the sum of [offset, offset + count) of the sums that touched key block
// `block`, in their order. touched: bytes from a sum's start to its flags.
static inline void add_sums(const BackwardSums& sums, std::int64_t touched, std::int64_t block,
                            std::int64_t offset, std::int64_t count, float scale, float* to) {
  const char* sum = static_cast<const char*>(sums.first);
  bool empty = true;
  for (std::int64_t i = 0; i < sums.count; ++i, sum += sums.stride_bytes) {
    if (sum[touched + block] == 0) continue;
    const float* from = reinterpret_cast<const float*>(sum) + offset;
    if (empty) {
      for (std::int64_t d = 0; d < count; d += kLanes) store(to + d, load(from + d));
    } else {
      for (std::int64_t d = 0; d < count; d += kLanes) store(to + d, load(to + d) + load(from + d));
    }
    empty = false;
  }
  if (empty) zero_units(to, count);
  scale_row(to, count, scale);
}

// One of dk and dv, over the keys [keys.begin, keys.end) of one block; it starts `offset` floats
// into each sum.
static inline void write_summed_rows(const BackwardSums& sums, std::int64_t touched, Interval keys,
                                     std::int64_t offset, std::int64_t lanes, float scale,
                                     std::int64_t dim, const Rows& to) {
  // Long runs of each sum, yet all in cache; several rows of the longest (512 columns) fit.
  constexpr std::int64_t kPieceFloats = 2048;
  alignas(64) float piece[kPieceFloats];
  const std::int64_t rows_at_once = kPieceFloats / lanes;
  for (std::int64_t key = keys.begin; key < keys.end; key += rows_at_once) {
    const std::int64_t left = keys.end - key;
    const std::int64_t rows = left < rows_at_once ? left : rows_at_once;
    add_sums(sums, touched, key / kBlockK, offset + key * lanes, rows * lanes, scale, piece);
    for (std::int64_t r = 0; r < rows; ++r) write_row(piece + r * lanes, dim, to, key + r);
  }
}

// dk and dv of keys [keys.begin, keys.end), as far as they are asked for; keys.begin is a multiple
// of kBlockK.
template <class Unit>
static void write_key_blocks(const AttentionJob& job, const BackwardSums& sums, Interval keys) {
  const auto shape = BackwardShape<Unit>::of(job);
  const std::int64_t dv_offset = shape.wants_dk ? shape.keys * shape.head_lanes : 0;
  const std::int64_t dv_floats = shape.wants_dv ? shape.keys * shape.value_lanes : 0;
  const std::int64_t touched = (dv_offset + dv_floats) * 4;
  const Rows dk = rows_of(job.dk, job.dtype, sums.batch, sums.kv_head);
  const Rows dv = rows_of(job.dv, job.dtype, sums.batch, sums.kv_head);
  for (std::int64_t key = keys.begin; key < keys.end; key += kBlockK) {
    const Interval block{key, key + kBlockK < keys.end ? key + kBlockK : keys.end};
    if (shape.wants_dk) {
      write_summed_rows(sums, touched, block, 0, shape.head_lanes, job.scale, job.head_dim, dk);
    }
    if (shape.wants_dv) {
      write_summed_rows(sums, touched, block, dv_offset, shape.value_lanes, 1.0F, job.value_dim,
                        dv);
    }
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
