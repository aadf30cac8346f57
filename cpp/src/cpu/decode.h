// Decode kernels: one chunk of keys for all rows of some kv heads, and the merge of a head's
// chunks. Keys a row may not see are never touched on its behalf: a row takes part in a tile with
// exactly the keys it sees, so nothing behind a length or outside of a window can reach it. Relies
// on decode_tile.h; the order of tasks is in decode_schedule.cpp.
#pragma once

#include "cpu/decode_tile.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// What the rows of one kv head share while a block of keys is worked on.
struct DecodeHead {
  // [rows][q_stride]: float32 in tailed order, or the bf16 elements as they are.
  const float* q = nullptr;
  bool q_in_pairs = false;
  std::int64_t q_stride = 0;
  TailedDim head_dim{};
  TailedDim value_dim{};
  float log2_scale = 0.0F;  // scale * log2(e)
  DecodePartial partial{};  // of this head's first row
  std::int64_t acc_stride = 0;
};

// Lane i of the result is lane i + by, around the end.
template <int by, int... lane>
FLASHATTN_INLINE Vec rotated(Vec x, LaneList<lane...>) {
  return __builtin_shufflevector(x, x, ((lane + by) % kLanes)...);
}

// The largest lane; a NaN lane may or may not count.
template <int by = kLanes / 2>
FLASHATTN_INLINE float largest_lane(Vec x) {
  const Vec folded = max(x, rotated<by>(x, AllLanes{}));
  if constexpr (by == 1) return folded[0];
  if constexpr (by > 1) return largest_lane<by / 2>(folded);
}

template <int by = kLanes / 2>
FLASHATTN_INLINE float lane_sum(Vec x) {
  const Vec folded = x + rotated<by>(x, AllLanes{});
  if constexpr (by == 1) return folded[0];
  if constexpr (by > 1) return lane_sum<by / 2>(folded);
}

FLASHATTN_INLINE float exp2_of(float x) { return exp2<6>(broadcast(x))[0]; }

// The online softmax of one row: s[0..count) are scores in and weights 2^(s - max) out. The running
// sum and accumulator are rescaled when the max moves. A NaN score makes the row's sum NaN.
FLASHATTN_INLINE void decode_softmax(float* s, std::int64_t count, float* max_log2, float* sum,
                                     float* acc, std::int64_t acc_floats) {
  Vec largest = broadcast(-kInfinity);
  for (std::int64_t k = 0; k < count; k += kLanes) largest = max(largest, load(s + k));
  const float block_max = largest_lane(largest);
  if (!(block_max <= *max_log2)) {
    const float factor = exp2_of(*max_log2 - block_max);
    *sum *= factor;
    const Vec factors = broadcast(factor);
    for (std::int64_t d = 0; d < acc_floats; d += kLanes) store(acc + d, load(acc + d) * factors);
    *max_log2 = block_max;
  }
  // With every score -inf the weights are 2^-inf = 0 and not 2^NaN.
  const Vec base = broadcast(*max_log2 == -kInfinity ? 0.0F : *max_log2);
  Vec total{};
  for (std::int64_t k = 0; k < count; k += kLanes) {
    const Vec p = exp2<6>(load(s + k) - base);
    total += p;
    store(s + k, p);
  }
  *sum += lane_sum(total);
}

// Rows [row, row + rows) of a head against `count` keys that all of them see.
template <DType dtype, int rows>
FLASHATTN_NOINLINE void decode_block(const DecodeHead& head, std::int64_t row, const TileRows& keys,
                                     const TileRows& values, std::int64_t count) {
  alignas(64) float s[rows][kDecodeBlockKeys];
  float* acc = head.partial.acc + row * head.acc_stride;
  const float* q = head.q + row * head.q_stride;
#if defined(FLASHATTN_HAS_BF16_DOT)
  if (dtype == DType::kBFloat16 && head.q_in_pairs) {
    decode_scores<PairDot, rows>(q, head.q_stride, head.head_dim, head.log2_scale, keys, count, s);
  } else
#endif
  {
    decode_scores<WidenedDot<dtype>, rows>(q, head.q_stride, head.head_dim, head.log2_scale, keys,
                                           count, s);
  }
  for (int r = 0; r < rows; ++r) {
    decode_softmax(s[r], count, head.partial.max_log2 + row + r, head.partial.sum + row + r,
                   acc + r * head.acc_stride, head.acc_stride);
  }
  decode_accumulate<dtype, rows>(s, values, count, head.value_dim, acc, head.acc_stride);
}

FLASHATTN_INLINE TileRows skip_rows(TileRows rows, std::int64_t count) {
  rows.base += count * rows.row_bytes;
  return rows;
}

FLASHATTN_INLINE Interval clipped(Interval keys, Interval to) {
  const std::int64_t begin = keys.begin > to.begin ? keys.begin : to.begin;
  const std::int64_t end = keys.end < to.end ? keys.end : to.end;
  return {begin, end > begin ? end : begin};
}

// All rows of a head against keys [block.begin, block.end), whose rows start at keys.base and
// values.base.
template <DType dtype>
FLASHATTN_INLINE void decode_head_block(const AttentionJob& job, std::int64_t batch,
                                        const DecodeHead& head, Interval block, TileRows keys,
                                        TileRows values) {
  const Visibility& visibility = job.visibility[batch];
  const std::int64_t rows = job.heads_per_kv * job.seqlen_q;
  const bool all_seen =
      visibility.tile(0, job.seqlen_q, block.begin, block.end) == TileVisibility::kAll;
  const auto keys_seen = [&](std::int64_t row) {
    return all_seen ? block : clipped(visibility.keys_of_row(row % job.seqlen_q), block);
  };
  // Rows r and r + 1 usually see the same keys of the block and share a tile; where the end of a
  // window or of the causal triangle passes between them they do not.
  std::int64_t row = 0;
  while (row < rows) {
    const Interval seen = keys_seen(row);
    std::int64_t alike = 1;
    for (; alike < 4 && row + alike < rows; ++alike) {
      const Interval next = keys_seen(row + alike);
      if (next.begin != seen.begin || next.end != seen.end) break;
    }
    const std::int64_t count = seen.end - seen.begin;
    const std::int64_t tile = alike == 4 ? 4 : alike >= 2 ? 2 : 1;
    if (count > 0) {
      const TileRows k = skip_rows(keys, seen.begin - block.begin);
      const TileRows v = skip_rows(values, seen.begin - block.begin);
      if (tile == 4) decode_block<dtype, 4>(head, row, k, v, count);
      if (tile == 2) decode_block<dtype, 2>(head, row, k, v, count);
      if (tile == 1) decode_block<dtype, 1>(head, row, k, v, count);
      // The other rows of the head find what was fetched.
      keys.ahead = 0;
      values.ahead = 0;
    }
    row += tile;
  }
}

// row[0..dim) in place: contiguous elements become tailed order.
FLASHATTN_INLINE void to_tailed(float* row, const TailedDim& dim) {
  if (dim.rest() == 0) return;
  float rest[kLanes] = {};
  __builtin_memcpy(rest + kLanes - dim.rest(), row + dim.full,
                   static_cast<std::size_t>(dim.rest()) * sizeof(float));
  __builtin_memcpy(row + dim.full, rest, sizeof(rest));
}

FLASHATTN_INLINE void from_tailed(float* row, const TailedDim& dim) {
  __builtin_memmove(row + dim.full, row + dim.full + kLanes - dim.rest(),
                    static_cast<std::size_t>(dim.rest()) * sizeof(float));
}

// Keys or values of one block as contiguous rows: in place where they are, else copied element by
// element to `copy`.
template <DType dtype>
FLASHATTN_INLINE TileRows contiguous_block(const Rows& rows, Interval block, std::int64_t dim,
                                           float* copy, std::ptrdiff_t ahead) {
  if (rows.contiguous_rows()) {
    return {.base = rows.row(block.begin), .row_bytes = rows.row_bytes, .ahead = ahead};
  }
  constexpr std::ptrdiff_t item = dtype == DType::kFloat32 ? 4 : 2;
  const std::ptrdiff_t row_bytes = decode_padded(dim) * item;
  char* to = reinterpret_cast<char*>(copy);
  for (std::int64_t k = block.begin; k < block.end; ++k, to += row_bytes) {
    copy_strided<dtype>(rows.row(k), rows.dim_bytes, to, item, dim);
  }
  return {.base = reinterpret_cast<const char*>(copy), .row_bytes = row_bytes};
}

// Whether scores come from dot products of bf16 pairs: the instruction is there, and rows are whole
// vectors of pairs.
FLASHATTN_INLINE bool decode_in_pairs(const AttentionJob& job) {
#if defined(FLASHATTN_HAS_BF16_DOT)
  return job.dtype == DType::kBFloat16 && job.head_dim % PairDot::kStep == 0;
#else
  (void)job;
  return false;
#endif
}

// Zeroes the partials of kv heads [task.kv_head_begin, task.kv_head_end), and widens their query
// rows to `q`.
template <DType dtype>
FLASHATTN_INLINE void decode_start(const DecodeChunk& task, const TailedDim& head_dim, float* q) {
  const AttentionJob& job = *task.job;
  const std::int64_t heads = job.heads_per_kv;
  const std::int64_t q_stride = decode_padded(job.head_dim);
  const std::int64_t acc_stride = decode_padded(job.value_dim);
  for (std::int64_t h = task.kv_head_begin * heads; h < task.kv_head_end * heads; ++h) {
    const Rows query = rows_of(job.query, dtype, task.batch, h);
    for (std::int64_t i = 0; i < job.seqlen_q; ++i) {
      const std::int64_t row = h * job.seqlen_q + i;
      if (dtype == DType::kBFloat16 && decode_in_pairs(job)) {
        auto* pairs = reinterpret_cast<std::uint16_t*>(q + row * q_stride);
        read_row_bits16(query, i, job.head_dim, pairs);
      } else {
        widen_row<dtype>(query.row(i), query.dim_bytes, job.head_dim, q + row * q_stride);
        to_tailed(q + row * q_stride, head_dim);
      }
      for (std::int64_t d = 0; d < acc_stride; ++d) task.partial.acc[row * acc_stride + d] = 0.0F;
      task.partial.max_log2[row] = -kInfinity;
      task.partial.sum[row] = 0.0F;
    }
  }
}

// for each block of kDecodeBlockKeys keys of the chunk:
//   for each kv head:                      (the rows of all heads of a key share a page)
//     S = scale * Q K^T; P = 2^(S - max), rescaling acc and sum when max moved; acc += P V
template <DType dtype>
static void decode_chunk_typed(const DecodeChunk& task) {
  const AttentionJob& job = *task.job;
  constexpr std::int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  const std::int64_t rows = job.heads_per_kv * job.seqlen_q;
  const std::int64_t copy_floats = kDecodeBlockKeys * decode_padded(job.head_dim);
  float* q = task.scratch;
  float* key_copy = q + decode_rows(job) * decode_padded(job.head_dim);
  DecodeHead head{.q_in_pairs = decode_in_pairs(job),
                  .q_stride = decode_padded(job.head_dim),
                  .head_dim = tailed(job.head_dim),
                  .value_dim = tailed(job.value_dim),
                  .log2_scale = job.scale * kLog2E,
                  .acc_stride = decode_padded(job.value_dim)};
  decode_start<dtype>(task, head.head_dim, q);
  Interval block{task.key_begin, task.key_begin};
  for (; block.begin < task.key_end; block.begin = block.end) {
    block.end = (block.begin / kDecodeBlockKeys + 1) * kDecodeBlockKeys;
    if (block.end > task.key_end) block.end = task.key_end;
    for (std::int64_t h = task.kv_head_begin; h < task.kv_head_end; ++h) {
      // Next come the same keys of the next head, then the next keys of the first one.
      const bool last_head = h + 1 == task.kv_head_end;
      const std::int64_t next_head = last_head ? task.kv_head_begin - h : 1;
      const std::int64_t next_key = last_head ? block.end - block.begin : 0;
      const bool last = last_head && block.end == task.key_end;
      const auto ahead = [&](const RowTensor& tensor) {
        return last ? 0 : (next_head * tensor.head_stride + next_key * tensor.row_stride) * item;
      };
      const TileRows keys = contiguous_block<dtype>(rows_of(job.key, dtype, task.batch, h), block,
                                                    job.head_dim, key_copy, ahead(job.key));
      const TileRows values =
          contiguous_block<dtype>(rows_of(job.value, dtype, task.batch, h), block, job.value_dim,
                                  key_copy + copy_floats, ahead(job.value));
      head.q = q + h * rows * head.q_stride;
      head.partial = {.acc = task.partial.acc + h * rows * head.acc_stride,
                      .max_log2 = task.partial.max_log2 + h * rows,
                      .sum = task.partial.sum + h * rows};
      decode_head_block<dtype>(job, task.batch, head, block, keys, values);
    }
  }
}

// out = sum over chunks c of w_c acc_c / sum over c of w_c sum_c with w_c = 2^(max_c - max), chunks
// in ascending order; lse = ln 2 * max + ln(sum). A row without a visible key gets out 0 and lse
// -inf.
template <DType dtype>
FLASHATTN_INLINE void decode_merge_row(const DecodeMerge& task, const TailedDim& dim,
                                       std::int64_t i, const Rows& out) {
  const AttentionJob& job = *task.job;
  const std::int64_t row = task.head * job.seqlen_q + i;
  const std::int64_t stride = decode_padded(job.value_dim);
  const std::int64_t chunk_floats = decode_partial_floats(job);
  // decode_partial_at takes writable memory; nothing is written through it here.
  float* partials = const_cast<float*>(task.partials);
  float largest = -kInfinity;
  for (std::int64_t c = 0; c < task.chunks; ++c) {
    const float max_c = decode_partial_at(job, partials + c * chunk_floats).max_log2[row];
    if (!(max_c <= largest)) largest = max_c;
  }
  const float base = largest == -kInfinity ? 0.0F : largest;
  float* acc = task.scratch;
  for (std::int64_t d = 0; d < stride; ++d) acc[d] = 0.0F;
  float sum = 0.0F;
  for (std::int64_t c = 0; c < task.chunks; ++c) {
    const DecodePartial partial = decode_partial_at(job, partials + c * chunk_floats);
    const float weight = exp2_of(partial.max_log2[row] - base);
    sum += weight * partial.sum[row];
    const Vec weights = broadcast(weight);
    for (std::int64_t d = 0; d < stride; d += kLanes) {
      store(acc + d, load(acc + d) + weights * load(partial.acc + row * stride + d));
    }
  }
  // A row without weights gives 0, whatever it met on the way.
  const bool dead = sum == 0.0F;
  const Vec inverse = broadcast(1.0F / sum);
  for (std::int64_t d = 0; d < stride; d += kLanes) {
    store(acc + d, dead ? Vec{} : load(acc + d) * inverse);
  }
  from_tailed(acc, dim);
  narrow_row<dtype>(acc, job.value_dim, out.row(i), out.dim_bytes);
  job.lse.data[task.batch * job.lse.batch_stride + task.head * job.lse.head_stride +
               i * job.lse.row_stride] = dead ? -kInfinity : base * kLn2 + __builtin_logf(sum);
}

template <DType dtype>
static void decode_merge_typed(const DecodeMerge& task) {
  const TailedDim dim = tailed(task.job->value_dim);
  const Rows out = rows_of(task.job->out, dtype, task.batch, task.head);
  for (std::int64_t i = 0; i < task.job->seqlen_q; ++i) decode_merge_row<dtype>(task, dim, i, out);
}

static void decode_chunk(const DecodeChunk& task) {
  switch (task.job->dtype) {
    case DType::kFloat16:
      return decode_chunk_typed<DType::kFloat16>(task);
    case DType::kBFloat16:
      return decode_chunk_typed<DType::kBFloat16>(task);
    default:
      return decode_chunk_typed<DType::kFloat32>(task);
  }
}

static void decode_merge(const DecodeMerge& task) {
  switch (task.job->dtype) {
    case DType::kFloat16:
      return decode_merge_typed<DType::kFloat16>(task);
    case DType::kBFloat16:
      return decode_merge_typed<DType::kBFloat16>(task);
    default:
      return decode_merge_typed<DType::kFloat32>(task);
  }
}

constexpr DecodeKernels kDecodeKernels = {.chunk = decode_chunk, .merge = decode_merge};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
