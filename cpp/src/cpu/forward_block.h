// One block of queries against every key it sees: the online softmax of flash attention with the
// queries in the vector lanes.
//
//   Q^T, once                                      Q scaled by the sign of scale, see fold_scale
//   for each block of kBlockK keys:
//     S^T = K Q^T, row_max                         forward_scores.h
//     P^T = exp(scale * S^T - row_max), row_sum    forward_softmax.h
//     O^T = O^T * rescale + V^T P^T                forward_values.h
//   out = O / row_sum, lse = row_max + log(row_sum)
//
// K and V are read row-major as broadcasts and every maximum and sum runs down a lane, so nothing
// but Q and out is transposed and no reduction is horizontal.
#pragma once

#include "cpu/forward_prefetch.h"
#include "cpu/forward_softmax.h"
#include "cpu/forward_values.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// row_max is the maximum of the scores before scaling, so the scale it is used with must be
// positive. The sign of a negative scale moves into Q, exactly; for a zero scale Q becomes 0 (NaN
// where it was not finite) and the scale 1. Returns the scale that is left, in units of log 2.
template <class Unit>
FLASHATTN_INLINE float fold_scale(float scale, float* Q, std::int64_t count) {
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

template <class Unit>
FLASHATTN_INLINE void start_rows(const BlockScratch<Unit>& scratch) {
  for (int lane = 0; lane < kBlockQ; lane += kLanes) {
    store(scratch.row_max + lane, broadcast(-kInfinity));
    store(scratch.row_max_log2 + lane, broadcast(-kInfinity));
    store(scratch.row_sum + lane, Vec{});
  }
}

// One vector of query rows of out. O^T is divided and transposed kLanes dimensions at a time.
template <DType dtype>
static void write_out(const float* O, std::int64_t value_dim, Vec factor, const Rows& out,
                      std::int64_t first_row, std::int64_t rows) {
  constexpr std::ptrdiff_t item = dtype == DType::kFloat32 ? 4 : 2;
  for (std::int64_t d = 0; d < value_dim; d += kLanes, O += kLanes * kBlockQ) {
    Vec r[kLanes];
    FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) r[i] = load(O + i * kBlockQ) * factor;
    transpose(r);
    if (rows >= kLanes && d + kLanes <= value_dim && out.contiguous_rows()) {
      char* to = out.row(first_row) + d * item;
      FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) narrow<dtype>(to + i * out.row_bytes, r[i]);
      continue;
    }
    alignas(64) float block[kLanes * kLanes];
    FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) store(block + i * kLanes, r[i]);
    const std::int64_t dims = value_dim - d < kLanes ? value_dim - d : kLanes;
    for (std::int64_t i = 0; i < rows && i < kLanes; ++i) {
      narrow_row<dtype>(block + i * kLanes, dims, out.row(first_row + i) + d * out.dim_bytes,
                        out.dim_bytes);
    }
  }
}

// out = O / row_sum and lse. A row that sees no key gives 0 and -inf; a row whose keys all score
// -inf gives NaN and -inf, as softmax does.
template <class Unit>
FLASHATTN_INLINE void finish_rows(const AttentionJob& job, std::int64_t batch, std::int64_t head,
                                  std::int64_t first_row, std::int64_t rows,
                                  const BlockScratch<Unit>& scratch, const VisibleLanes& lanes) {
  const Rows out = rows_of(job.out, job.dtype, batch, head);
  float* const lse = job.lse.data + batch * job.lse.batch_stride + head * job.lse.head_stride;
  for (int lane = 0; lane < rows; lane += kLanes) {
    const Vec row_sum = load(scratch.row_sum + lane);
    const VecI dead = load_int32(lanes.begin + lane) >= load_int32(lanes.end + lane);
    const Vec factor = select(dead, Vec{}, broadcast(1.0F) / row_sum);
    alignas(64) float row_lse[kLanes];
    store(row_lse, load(scratch.row_max_log2 + lane) * broadcast(kLn2) + log(row_sum));
    for (std::int64_t i = 0; i < kLanes && lane + i < rows; ++i) {
      lse[(first_row + lane + i) * job.lse.row_stride] = row_lse[i];
    }
    const float* const O = scratch.O + lane;
    const std::int64_t row = first_row + lane;
    const std::int64_t count = rows - lane;
    if (job.dtype == DType::kFloat32) {
      write_out<DType::kFloat32>(O, job.value_dim, factor, out, row, count);
    } else if (job.dtype == DType::kFloat16) {
      write_out<DType::kFloat16>(O, job.value_dim, factor, out, row, count);
    } else {
      write_out<DType::kBFloat16>(O, job.value_dim, factor, out, row, count);
    }
  }
}

template <class Unit>
static __attribute__((noinline)) void forward_block(const AttentionJob& job, std::int64_t batch,
                                                    std::int64_t head, std::int64_t first_row,
                                                    const void* packed, void* working,
                                                    const ForwardAhead* ahead) {
  const PackedHead<Unit> kv(job, const_cast<void*>(packed));
  const BlockScratch<Unit> scratch(job, working);
  const std::int64_t depth = kv.k_ld;
  const std::int64_t left = job.seqlen_q - first_row;
  const std::int64_t rows = left < kBlockQ ? left : kBlockQ;

  VisibleLanes lanes;
  find_visible_lanes(job.visibility[batch], first_row, rows, lanes);
  transpose_rows<Unit>(rows_of(job.query, job.dtype, batch, head), first_row, job.seqlen_q, kBlockQ,
                       job.head_dim, scratch.Q, scratch.staging);
  const float scale_log2 = fold_scale<Unit>(job.scale, scratch.Q, depth * kBlockQ);
  start_rows(scratch);

  const Rows values = rows_of(job.value, job.dtype, batch, head / job.heads_per_kv);
  const std::int64_t begin = lanes.keys.begin / kTileRows * kTileRows;
  const std::int64_t end = round_up(lanes.keys.end, kTileRows);
  const std::int64_t steps = (end - begin + kBlockK - 1) / kBlockK;
  if (steps <= 0) zero_units(scratch.O, round_up(job.value_dim, kLanes) * kBlockQ);
  Prefetcher prefetcher;
  plan_prefetch(job, rows_of(job.out, job.dtype, batch, head), first_row, rows, ahead, prefetcher);
  prefetcher.spread_over(steps * (round_up(kv.v_ld, kPrefetchDims) / kPrefetchDims) *
                         (kBlockVecs / kPanelVecs));
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t key = begin + step * kBlockK;
    KeyBlock block;
    find_key_block(lanes, key, end - key < kBlockK ? static_cast<int>(end - key) : kBlockK, block);
    for (int lane = 0; lane < kBlockQ; lane += kLanes) {
      store(scratch.block_max + lane, load(scratch.row_max + lane));
    }
    score_block(kv, depth, scratch, lanes, block);
    const bool rose = softmax_block(scratch, block, scale_log2);
    value_block(kv, scratch, block, step == 0, rose, prefetcher);
    add_nonfinite_values(kv, values, job.value_dim, scratch, lanes, block);
  }
  finish_rows(job, batch, head, first_row, rows, scratch, lanes);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
