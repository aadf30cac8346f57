// Decode kernels: one chunk of keys for all rows of some kv heads, and the merge of a head's
// chunks. Blocks that all rows see are read in memory order where reading is the bound
// (decode_linear.h), others one head after another (decode_head.h), to the same bits. The order of
// tasks is in decode_schedule.cpp.
#pragma once

#include "cpu/decode_head.h"
#include "cpu/decode_linear.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

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

// Keys or values of one block as contiguous rows: in place where they are, else (scattered
// elements, several pages) copied to `copy`.
template <DType dtype>
FLASHATTN_INLINE TileRows contiguous_block(const Rows& rows, Interval block, std::int64_t dim,
                                           float* copy, std::ptrdiff_t ahead) {
  if (rows.contiguous_rows() && rows.in_one_run(block.begin, block.end)) {
    return {.base = rows.row(block.begin), .row_bytes = rows.row_bytes, .ahead = ahead};
  }
  constexpr std::ptrdiff_t item = dtype == DType::kFloat32 ? 4 : 2;
  const std::ptrdiff_t row_bytes = decode_padded(dim) * item;
  char* to = reinterpret_cast<char*>(copy);
  const char* table[kDecodeBlockKeys];
  const std::int64_t count = block.end - block.begin;
  if (rows.pages != nullptr) list_paged_rows(rows, block.begin, block.end - 1, count, table);
  for (std::int64_t k = 0; k < count; ++k, to += row_bytes) {
    const char* const row = rows.pages != nullptr ? table[k] : rows.row(block.begin + k);
    if (rows.contiguous_rows()) {
      __builtin_memcpy(to, row, static_cast<std::size_t>(dim * item));
    } else {
      copy_strided<dtype>(row, rows.dim_bytes, to, item, dim);
    }
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
      task.partial.max[row] = -kInfinity;
      task.partial.sum[row] = 0.0F;
    }
  }
}

// What the rows of a kv head share, before any key.
FLASHATTN_INLINE DecodeHead decode_head(const DecodeChunk& task, const DecodeHead& shared,
                                        const float* q, std::int64_t h) {
  const std::int64_t row = h * task.job->heads_per_kv * task.job->seqlen_q;
  DecodeHead head = shared;
  head.q = q + row * head.q_stride;
  head.kv_head = h;
  head.partial = {.acc = task.partial.acc + row * head.acc_stride,
                  .max = task.partial.max + row,
                  .sum = task.partial.sum + row};
  return head;
}

// Kv heads [heads.begin, heads.end) against the keys of `block`, one head after another.
template <DType dtype, bool modified>
FLASHATTN_INLINE void decode_heads_in_turn(const DecodeChunk& task, const DecodeHead& shared,
                                           Interval heads, Interval block,
                                           const DecodeScratch& scratch) {
  const AttentionJob& job = *task.job;
  constexpr std::int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  for (std::int64_t h = heads.begin; h < heads.end; ++h) {
    // Next come the same keys of the next head, then the next keys of the first one.
    const bool last_head = h + 1 == heads.end;
    const std::int64_t next_head = last_head ? heads.begin - h : 1;
    const std::int64_t next_key = last_head ? block.end - block.begin : 0;
    const bool last = last_head && block.end == task.key_end;
    const auto ahead = [&](const RowTensor& tensor) -> std::ptrdiff_t {
      if (last) return 0;
      const std::ptrdiff_t to_head = next_head * tensor.head_stride * item;
      if (tensor.pages == nullptr || next_key == 0) {
        return to_head + next_key * tensor.row_stride * item;
      }
      const Rows rows = rows_of(tensor, dtype, task.batch, h);
      return to_head + (rows.row(block.end) - rows.row(block.begin));
    };
    const TileRows keys = contiguous_block<dtype>(rows_of(job.key, dtype, task.batch, h), block,
                                                  job.head_dim, scratch.key_copy, ahead(job.key));
    const TileRows values =
        contiguous_block<dtype>(rows_of(job.value, dtype, task.batch, h), block, job.value_dim,
                                scratch.value_copy, ahead(job.value));
    decode_head_block<dtype, modified>(job, task.batch, decode_head(task, shared, scratch.q, h),
                                       block, keys, values);
  }
}

// The addresses of a block's keys or values, and of what is fetched after it.
using DecodeRowTable = const char * [kDecodeBlockKeys + kDecodeKeysAhead];

// Whether the keys of a block can be read in memory order: all of them, or groups of
// kDecodeValueKeys, lie one stride apart.
FLASHATTN_INLINE bool in_even_groups(const Rows& rows, Interval block) {
  return rows.in_one_run(block.begin, block.end) ||
         (rows.page_rows % kDecodeValueKeys == 0 &&
          (rows.first_row + block.begin) % kDecodeValueKeys == 0);
}

// Rows of kv heads [heads.begin, heads.end) in a block of the keys before `last`.
template <DType dtype>
FLASHATTN_INLINE HeadRows head_rows_of(const RowTensor& tensor, std::int64_t batch, Interval heads,
                                       Interval block, std::int64_t last, DecodeRowTable& table) {
  constexpr std::int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  const Rows first = rows_of(tensor, dtype, batch, heads.begin);
  HeadRows rows{.base = first.row(block.begin),
                .row_bytes = first.row_bytes,
                .head_bytes = tensor.head_stride * item,
                .heads = heads.end - heads.begin};
  if (first.pages != nullptr) {
    const std::int64_t count = block.end - block.begin + kDecodeKeysAhead;
    list_paged_rows(first, block.begin, last - 1, count, table);
    rows.table = table;
  }
  return rows;
}

// Whether the heads of a key lie closer together than the keys of a head.
FLASHATTN_INLINE bool heads_share_rows(const RowTensor& tensor) {
  return std::int64_t{__builtin_llabs(tensor.head_stride)} <
         std::int64_t{__builtin_llabs(tensor.row_stride)};
}

template <bool modified>
FLASHATTN_INLINE float decode_score_scale(const AttentionJob& job) {
  if (!modified) return job.scale * kLog2E;
  return job.softcap != 0.0F ? 1.0F : job.scale;
}

// for each group of kv heads that lie side by side:
//   for each block of kDecodeBlockKeys keys of the chunk:
//     S = scale * Q K^T, modified; P = exp(S - max), rescaling acc and sum when max moved; acc += P
//     V
template <DType dtype, bool modified>
static void decode_chunk_typed(const DecodeChunk& task) {
  const AttentionJob& job = *task.job;
  const std::int64_t rows = job.heads_per_kv * job.seqlen_q;
  const DecodeScratch scratch = decode_scratch_at(job, task.scratch);
  DecodeModifiers modifiers;
  if constexpr (modified) modifiers = decode_modifiers(job, task.batch);
  const DecodeHead shared{.q_in_pairs = decode_in_pairs(job),
                          .q_stride = decode_padded(job.head_dim),
                          .head_dim = tailed(job.head_dim),
                          .value_dim = tailed(job.value_dim),
                          .score_scale = decode_score_scale<modified>(job),
                          .acc_stride = decode_padded(job.value_dim),
                          .modifiers = modified ? &modifiers : nullptr};
  decode_start<dtype>(task, shared.head_dim, scratch.q);
  const Rows key_rows = rows_of(job.key, dtype, task.batch, 0);
  const Rows value_rows = rows_of(job.value, dtype, task.batch, 0);
  const bool linear =
      decode_linear(job) && key_rows.contiguous_rows() && value_rows.contiguous_rows();
  const bool together = !linear || heads_share_rows(job.key);
  Interval heads{task.kv_head_begin, task.kv_head_begin};
  for (; heads.begin < task.kv_head_end; heads.begin = heads.end) {
    heads.end = together ? task.kv_head_end : heads.begin + 1;
    const DecodeHead first = decode_head(task, shared, scratch.q, heads.begin);
    Interval block{task.key_begin, task.key_begin};
    for (; block.begin < task.key_end; block.begin = block.end) {
      block.end = (block.begin / kDecodeBlockKeys + 1) * kDecodeBlockKeys;
      if (block.end > task.key_end) block.end = task.key_end;
      TileVisibility mask = TileVisibility::kAll;
      if constexpr (modified) mask = decode_mask_class(modifiers, heads, block);
      if (mask == TileVisibility::kNone) continue;
      const TileVisibility seen =
          job.visibility[task.batch].tile(0, job.seqlen_q, block.begin, block.end);
      // Keys and values have the same places and page sizes.
      if (linear && in_even_groups(key_rows, block) && seen == TileVisibility::kAll &&
          mask == TileVisibility::kAll) {
        DecodeRowTable key_table;
        DecodeRowTable value_table;
        decode_linear_block<dtype, modified>(
            first, rows,
            head_rows_of<dtype>(job.key, task.batch, heads, block, task.key_end, key_table),
            head_rows_of<dtype>(job.value, task.batch, heads, block, task.key_end, value_table),
            block, scratch);
      } else {
        decode_heads_in_turn<dtype, modified>(task, shared, heads, block, scratch);
      }
    }
  }
}

// What a row's merge starts with: its sink's score, or none.
template <bool modified>
FLASHATTN_INLINE float decode_sink(const DecodeMerge& task) {
  const AttentionJob& job = *task.job;
  if (!modified || job.sinks.data == nullptr) return -kInfinity;
  return job.sinks.at(task.batch, task.head);
}

// log(sum * exp(base)), base in the unit of the scores.
template <bool modified>
FLASHATTN_INLINE float natural_log(float base, float sum) {
  if constexpr (modified) return base + __builtin_logf(sum);
  return base * kLn2 + __builtin_logf(sum);
}

// out = sum over chunks c of w_c acc_c / sum over c of w_c sum_c with w_c = exp(max_c - max),
// chunks in ascending order, a sink before them; lse = max + log(sum). A row without weights gets
// out 0 and lse -inf.
template <DType dtype, bool modified>
FLASHATTN_INLINE void decode_merge_row(const DecodeMerge& task, const TailedDim& dim,
                                       std::int64_t i, const Rows& out) {
  const AttentionJob& job = *task.job;
  constexpr float kUnit = kScoreUnit<modified>;
  const std::int64_t row = task.head * job.seqlen_q + i;
  const std::int64_t stride = decode_padded(job.value_dim);
  const std::int64_t chunk_floats = decode_partial_floats(job);
  // decode_partial_at takes writable memory; nothing is written through it here.
  float* partials = const_cast<float*>(task.partials);
  const float sink = decode_sink<modified>(task);
  float largest = sink;
  for (std::int64_t c = 0; c < task.chunks; ++c) {
    const float max_c = decode_partial_at(job, partials + c * chunk_floats).max[row];
    if (!(max_c <= largest)) largest = max_c;
  }
  const float base = largest == -kInfinity ? 0.0F : largest;
  float* acc = task.scratch;
  for (std::int64_t d = 0; d < stride; ++d) acc[d] = 0.0F;
  float sum = modified ? exp2_of((sink - base) * kUnit) : 0.0F;
  for (std::int64_t c = 0; c < task.chunks; ++c) {
    const DecodePartial partial = decode_partial_at(job, partials + c * chunk_floats);
    const float weight = exp2_of((partial.max[row] - base) * kUnit);
    sum += weight * partial.sum[row];
    const Vec weights = broadcast(weight);
    for (std::int64_t d = 0; d < stride; d += kLanes) {
      store(acc + d, load(acc + d) + weights * load(partial.acc + row * stride + d));
    }
  }
  // A row without weights gives 0, whatever it met on the way.
  const bool dead = sum == 0.0F;
  const Vec inverse = broadcast((modified ? job.dropout.keep_scale : 1.0F) / sum);
  for (std::int64_t d = 0; d < stride; d += kLanes) {
    store(acc + d, dead ? Vec{} : load(acc + d) * inverse);
  }
  from_tailed(acc, dim);
  narrow_row<dtype>(acc, job.value_dim, out.row(i), out.dim_bytes);
  job.lse.head(task.batch, task.head)[i * job.lse.row_stride] =
      dead ? -kInfinity : natural_log<modified>(base, sum);
}

template <DType dtype, bool modified>
static void decode_merge_typed(const DecodeMerge& task) {
  const TailedDim dim = tailed(task.job->value_dim);
  const Rows out = rows_of(task.job->out, dtype, task.batch, task.head);
  for (std::int64_t i = 0; i < task.job->seqlen_q; ++i) {
    decode_merge_row<dtype, modified>(task, dim, i, out);
  }
}

template <bool modified>
static void decode_chunk_of(const DecodeChunk& task) {
  switch (task.job->dtype) {
    case DType::kFloat16:
      return decode_chunk_typed<DType::kFloat16, modified>(task);
    case DType::kBFloat16:
      return decode_chunk_typed<DType::kBFloat16, modified>(task);
    default:
      return decode_chunk_typed<DType::kFloat32, modified>(task);
  }
}

template <bool modified>
static void decode_merge_of(const DecodeMerge& task) {
  switch (task.job->dtype) {
    case DType::kFloat16:
      return decode_merge_typed<DType::kFloat16, modified>(task);
    case DType::kBFloat16:
      return decode_merge_typed<DType::kBFloat16, modified>(task);
    default:
      return decode_merge_typed<DType::kFloat32, modified>(task);
  }
}

static void decode_chunk(const DecodeChunk& task) {
  if (has_modifiers(*task.job)) return decode_chunk_of<true>(task);
  decode_chunk_of<false>(task);
}

static void decode_merge(const DecodeMerge& task) {
  if (has_modifiers(*task.job)) return decode_merge_of<true>(task);
  decode_merge_of<false>(task);
}

constexpr DecodeKernels kDecodeKernels = {.chunk = decode_chunk, .merge = decode_merge};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
