// Operands of the backward pass between the tensors and the packed buffers: keys and values of a
// head, the query rows of a block, dQ, and the summed dK and dV. It relies on pack.h for the forms
// and multiplies nothing but rowsum(dO * O) and the scale.
#pragma once

#include "cpu/backward_layout.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// Packs rows [begin, end) along the contraction into to[..][packed] and across it into
// lanes_to[..][lanes] (the same buffer for one element per unit). Returns whether all are finite.
template <class Unit>
FLASHATTN_INLINE bool pack_both_ways(const Rows& rows, std::int64_t begin, std::int64_t end,
                                     std::int64_t valid_end, std::int64_t dim, float* to,
                                     std::int64_t packed, float* lanes_to, std::int64_t lanes) {
  const std::int64_t count = end - begin;
  bool finite = true;
  if constexpr (Unit::kElements == 1) {
    pack_rows_float32(rows, begin, end, valid_end, dim, to, packed);
    for (std::int64_t r = 0; r < count; ++r) finite &= all_finite(to + r * packed, packed);
  } else {
    pack_rows_bf16(rows, begin, end, valid_end, dim, to, packed);
    for (std::int64_t r = 0; r < count; r += 2) {
      const auto* even = reinterpret_cast<const std::uint16_t*>(to + r * packed);
      const std::uint16_t* odd = even + 2 * packed;
      interleave_rows16(even, odd, lanes, lanes_to + r / 2 * lanes);
      finite &= all_finite_bf16(even, 4 * packed);
    }
  }
  return finite;
}

// K and V of keys [keys.begin, keys.end), whole blocks; rows past seqlen_k become zeros.
template <class Unit>
static void pack_key_blocks(const AttentionJob& job, std::int64_t batch, std::int64_t kv_head,
                            Interval keys, void* memory) {
  const auto shape = BackwardShape<Unit>::of(job);
  Carver carver{.base = static_cast<char*>(memory)};
  const auto packed = PackedKeys<Unit>::carve(shape, carver);
  const Rows k = rows_of(job.key, job.dtype, batch, kv_head);
  const Rows v = rows_of(job.value, job.dtype, batch, kv_head);
  for (std::int64_t key = keys.begin; key < keys.end; key += kBlockK) {
    packed.finite[key / kBlockK] = pack_both_ways<Unit>(
        k, key, key + kBlockK, job.seqlen_k, job.head_dim, packed.keys + key * shape.head_packed,
        shape.head_packed, packed.key_lanes + key / Unit::kElements * shape.head_lanes,
        shape.head_lanes);
    float* values = packed.values + key * shape.value_packed;
    if constexpr (Unit::kElements == 1) {
      pack_rows_float32(v, key, key + kBlockK, job.seqlen_k, job.value_dim, values,
                        shape.value_packed);
    } else {
      pack_rows_bf16(v, key, key + kBlockK, job.seqlen_k, job.value_dim, values,
                     shape.value_packed);
    }
  }
}

FLASHATTN_INLINE float sum_of_lanes(Vec x) {
  float sum = 0.0F;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

// delta = rowsum(dO * O) - dlse of one row. dout: float32, padded with zeros to `lanes`.
FLASHATTN_INLINE float delta_of_row(const float* dout, const Rows& out, std::int64_t row,
                                    std::int64_t value_dim, std::int64_t lanes, float* staging) {
  read_row(out, row, value_dim, staging);
  zero_units(staging + value_dim, lanes - value_dim);
  Vec sum{};
  for (std::int64_t d = 0; d < lanes; d += kLanes) sum += load(dout + d) * load(staging + d);
  return sum_of_lanes(sum);
}

FLASHATTN_INLINE const float* scalar_of(const RowScalars& table, std::int64_t batch,
                                        std::int64_t head, std::int64_t row) {
  return table.data + batch * table.batch_stride + head * table.head_stride +
         row * table.row_stride;
}

// The rows' logsumexp and delta. dO must be packed already.
template <class Unit>
static void load_row_scalars(const AttentionJob& job, const BackwardShape<Unit>& shape,
                             std::int64_t batch, std::int64_t head, QueryBlock<Unit>& block) {
  const Rows out = rows_of(job.out, job.dtype, batch, head);
  const Rows dout = rows_of(job.dout, job.dtype, batch, head);
  for (std::int64_t i = 0; i < kBlockQ; ++i) {
    block.lse[i] = kInfinity;
    block.delta[i] = 0.0F;
    if (i >= block.rows) continue;
    const std::int64_t row = block.first_row + i;
    const float lse = *scalar_of(job.lse, batch, head, row);
    // exp(s - inf) is 0 for every finite s; with -inf a row without weights would give NaN.
    if (lse != -kInfinity) block.lse[i] = lse;
    const float* dout_row = block.dout_rows + i * shape.value_lanes;
    if constexpr (Unit::kElements != 1) {
      float* widened = block.staging + shape.value_lanes;
      read_row(dout, row, job.value_dim, widened);
      zero_units(widened + job.value_dim, shape.value_lanes - job.value_dim);
      dout_row = widened;
    }
    block.delta[i] =
        delta_of_row(dout_row, out, row, job.value_dim, shape.value_lanes, block.staging);
    if (job.dlse.data != nullptr) block.delta[i] -= *scalar_of(job.dlse, batch, head, row);
  }
}

// Reads query rows [first_row, first_row + kBlockQ) of one head; dQ starts at 0.
template <class Unit>
static void load_query_block(const AttentionJob& job, const BackwardShape<Unit>& shape,
                             std::int64_t batch, std::int64_t head, std::int64_t first_row,
                             QueryBlock<Unit>& block) {
  block.first_row = first_row;
  block.rows = job.seqlen_q - first_row < kBlockQ ? job.seqlen_q - first_row : kBlockQ;
  const auto load_one = [&](const RowTensor& tensor, std::int64_t dim, std::int64_t units,
                            std::int64_t packed, std::int64_t lanes, float* rows_to,
                            float* columns_to) {
    float* along = Unit::kElements == 1 ? rows_to : block.staging;
    const bool finite =
        pack_both_ways<Unit>(rows_of(tensor, job.dtype, batch, head), first_row,
                             first_row + kBlockQ, job.seqlen_q, dim, along, packed, rows_to, lanes);
    transpose_units(reinterpret_cast<const char*>(along), packed * 4, kBlockQ, kBlockQ,
                    round_up(units, kLanes), columns_to, kBlockQ);
    return finite;
  };
  const bool q_finite = load_one(job.query, job.head_dim, shape.head_units, shape.head_packed,
                                 shape.head_lanes, block.q_rows, block.q_columns);
  const bool dout_finite = load_one(job.dout, job.value_dim, shape.value_units, shape.value_packed,
                                    shape.value_lanes, block.dout_rows, block.dout_columns);
  block.finite = q_finite && dout_finite;
  load_row_scalars(job, shape, batch, head, block);
  zero_units(block.dq, kBlockQ * shape.head_lanes);
}

// row[0..lanes) *= scale, in place.
FLASHATTN_INLINE void scale_row(float* row, std::int64_t lanes, float scale) {
  for (std::int64_t d = 0; d < lanes; d += kLanes) store(row + d, load(row + d) * scale);
}

template <class Unit>
static void write_dq(const AttentionJob& job, const BackwardShape<Unit>& shape, std::int64_t batch,
                     std::int64_t head, const QueryBlock<Unit>& block) {
  if (job.dq.data == nullptr) return;
  const Rows dq = rows_of(job.dq, job.dtype, batch, head);
  for (std::int64_t i = 0; i < block.rows; ++i) {
    float* row = block.dq + i * shape.head_lanes;
    scale_row(row, shape.head_lanes, job.scale);
    write_row(row, job.head_dim, dq, block.first_row + i);
  }
}

// One row of dk or dv: the sums that cover key block `block`, added in their order from `offset`
// floats into each, times the scale.
static inline void write_summed_row(const BackwardSums& sums, Interval block, std::int64_t offset,
                                    float scale, std::int64_t dim, const Rows& to,
                                    std::int64_t row) {
  constexpr std::int64_t kPiece = 256;
  alignas(64) float piece[kPiece];
  const char* base = reinterpret_cast<const char*>(sums.first);
  for (std::int64_t first = 0; first < dim; first += kPiece) {
    const std::int64_t columns = dim - first < kPiece ? dim - first : kPiece;
    const std::int64_t lanes = round_up(columns, kLanes);
    zero_units(piece, lanes);
    for (std::int64_t i = 0; i < sums.count; ++i) {
      const Interval covered = sums.covers[i];
      if (covered.begin >= block.end || covered.end <= block.begin) continue;
      const float* from =
          reinterpret_cast<const float*>(base + i * sums.stride_bytes) + offset + first;
      for (std::int64_t d = 0; d < lanes; d += kLanes) {
        store(piece + d, load(piece + d) + load(from + d));
      }
    }
    scale_row(piece, lanes, scale);
    Rows columns_of = to;
    columns_of.base += first * to.dim_bytes;
    write_row(piece, columns, columns_of, row);
  }
}

// dk and dv of keys [keys.begin, keys.end); keys.begin is a multiple of kBlockK.
template <class Unit>
static void write_key_blocks(const AttentionJob& job, const BackwardSums& sums, Interval keys) {
  const auto shape = BackwardShape<Unit>::of(job);
  const std::int64_t dv_offset = shape.keys * shape.head_lanes;
  const Rows dk = rows_of(job.dk, job.dtype, sums.batch, sums.kv_head);
  const Rows dv = rows_of(job.dv, job.dtype, sums.batch, sums.kv_head);
  for (std::int64_t key = keys.begin; key < keys.end; ++key) {
    const std::int64_t begin = key / kBlockK * kBlockK;
    const Interval block{begin, begin + kBlockK};
    if (job.dk.data != nullptr) {
      write_summed_row(sums, block, key * shape.head_lanes, job.scale, job.head_dim, dk, key);
    }
    if (job.dv.data == nullptr) continue;
    write_summed_row(sums, block, dv_offset + key * shape.value_lanes, 1.0F, job.value_dim, dv,
                     key);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
