// The query rows of one block on their way in (Q^T) and out (out, lse): which rows the lanes hold,
// the sign of the scale, the division by row_sum.
#pragma once

#include "cpu/forward_visible.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Q^T of the block in the vectors that hold a row; their lanes without one are zero. No tile reads
// the others.
template <class Unit>
FLASHATTN_INLINE void read_queries(const AttentionJob& job, const ForwardTask& task,
                                   const QueryRows& rows, const BlockScratch<Unit>& scratch) {
  const Rows first_head = rows_of(job.query, job.dtype, task.batch, task.head);
  const std::int64_t lanes = round_up(rows.count, kLanes);
  if (rows.heads == 1) {
    transpose_rows<Unit>(first_head, rows.first_row, job.seqlen_q, lanes, job.head_dim, scratch.Q,
                         kBlockQ, scratch.staging);
    return;
  }
  const std::int64_t units = units_of<Unit>(job.head_dim);
  for (std::int64_t lane = 0; lane < rows.count; ++lane) {
    const Rows head = rows_of(job.query, job.dtype, task.batch, task.head + rows.head(lane));
    const std::int64_t query = rows.query(lane);
    float* const to = scratch.staging + lane * units;
    if constexpr (Unit::kElements == 2) {
      pack_rows_bf16(head, query, query + 1, job.seqlen_q, job.head_dim, to, units);
    } else {
      pack_rows_float32(head, query, query + 1, job.seqlen_q, job.head_dim, to, units);
    }
  }
  transpose_units(reinterpret_cast<const char*>(scratch.staging), units * 4, rows.count, lanes,
                  units, scratch.Q, kBlockQ);
}

// row_max is the maximum of the scores before scaling, so the scale it is used with must be
// positive. The sign of a negative scale moves into Q, exactly; for a zero scale Q becomes 0 (NaN
// where it was not finite) and the scale 1. Returns the scale that is left, in units of log 2.
template <class Unit>
FLASHATTN_INLINE float make_scale_positive(float scale, float* Q, std::int64_t count) {
  if (scale > 0.0F) return scale * kLog2E;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec q = load(Q + i);
    if constexpr (Unit::kElements == 2) {
      const VecU bits = reinterpret_cast<VecU>(q);
      const VecU low = (bits & 0x7f80U) == 0x7f80U ? bits & 0xffffU : VecU{};
      const VecU high = (bits & 0x7f800000U) == 0x7f800000U ? bits & 0xffff0000U : VecU{};
      store(Q + i, reinterpret_cast<Vec>(scale < 0.0F ? bits ^ 0x80008000U : low | high));
    } else {
      store(Q + i, q * broadcast(scale < 0.0F ? -1.0F : 0.0F));
    }
  }
  return scale < 0.0F ? -scale * kLog2E : 1.0F;
}

// What a row of O is multiplied by: 1 / row_sum, and where weights were dropped the scale of those
// that stayed. A row whose sum is 0 gets 0, whatever its O.
struct RowFactor {
  Vec factor;
  VecI dead;
};

// One vector of rows of out, row i to to[i], i < count. O^T is multiplied and transposed kLanes
// dimensions at a time.
template <DType dtype>
static void write_out(const float* O, RowFactor row, std::int64_t value_dim,
                      char* const (&to)[kLanes], std::int64_t count, std::ptrdiff_t dim_bytes) {
  constexpr std::ptrdiff_t item = dtype == DType::kFloat32 ? 4 : 2;
  for (std::int64_t d = 0; d < value_dim; d += kLanes, O += kLanes * kBlockQ) {
    Vec r[kLanes];
    FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) r[i] =
        select(row.dead, Vec{}, load(O + i * kBlockQ) * row.factor);
    transpose(r);
    if (count >= kLanes && d + kLanes <= value_dim && dim_bytes == item) {
      FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) narrow<dtype>(to[i] + d * item, r[i]);
      continue;
    }
    alignas(64) float block[kLanes * kLanes];
    FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) store(block + i * kLanes, r[i]);
    const std::int64_t dims = value_dim - d < kLanes ? value_dim - d : kLanes;
    for (std::int64_t i = 0; i < count && i < kLanes; ++i) {
      narrow_row<dtype>(block + i * kLanes, dims, to[i] + d * dim_bytes, dim_bytes);
    }
  }
}

// out = O / row_sum and lse. A row without weights, because it sees no key or because all that it
// sees score -inf, has row_sum 0: it gives 0 and -inf.
template <class Unit, bool modified>
FLASHATTN_INLINE void write_rows(const AttentionJob& job, const ForwardTask& task,
                                 const QueryRows& rows, const BlockScratch<Unit>& scratch) {
  const Rows out = rows_of(job.out, job.dtype, task.batch, task.head);
  const std::ptrdiff_t head_bytes = job.out.head_stride * out.item_bytes();
  float* const lse = job.lse.head(task.batch, task.head);
  for (int lane = 0; lane < rows.count; lane += kLanes) {
    const Vec row_sum = load(scratch.row_sum + lane);
    alignas(64) float row_lse[kLanes];
    // The modified kernel's maximum is in natural units, and exactly the sink where no key is seen.
    const Vec max = modified ? load(scratch.row_max + lane)
                             : load(scratch.row_max_log2 + lane) * broadcast(kLn2);
    store(row_lse, max + log(row_sum));
    const float kept = modified ? job.dropout.keep_scale : 1.0F;
    const RowFactor row{.factor = broadcast(kept) / row_sum, .dead = row_sum == Vec{}};
    const std::int64_t count = rows.count - lane;
    char* to[kLanes] = {};
    for (int i = 0; i < kLanes && i < count; ++i) {
      const std::int64_t query = rows.query(lane + i);
      const std::int64_t head = rows.head(lane + i);
      to[i] = out.row(query) + head * head_bytes;
      lse[head * job.lse.head_stride + query * job.lse.row_stride] = row_lse[i];
    }
    const float* const O = scratch.O + lane;
    if (job.dtype == DType::kFloat32) {
      write_out<DType::kFloat32>(O, row, job.value_dim, to, count, out.dim_bytes);
    } else if (job.dtype == DType::kFloat16) {
      write_out<DType::kFloat16>(O, row, job.value_dim, to, count, out.dim_bytes);
    } else {
      write_out<DType::kBFloat16>(O, row, job.value_dim, to, count, out.dim_bytes);
    }
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
