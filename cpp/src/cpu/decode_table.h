// Decode: attention of a few query rows over many keys, bound by how fast keys and values can be
// read. This is the table that one instruction set exports (decode.h implements it) and the structs
// that decode_schedule fills. Keys are cut into chunks at multiples of kDecodeChunkKeys, counted
// from key 0, so what a chunk computes depends on nothing but the row and its keys: not on threads,
// batch mates or seqlen_k.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/job.h"

namespace flashattn::cpu {

inline constexpr std::int64_t kDecodeChunkKeys = 512;
inline constexpr std::int64_t kDecodeBlockKeys = 64;  // keys per step of the online softmax
// Rows of float32 scratch are padded to this many elements, the widest vector there is.
inline constexpr std::int64_t kDecodePad = 16;
// Floats between the scores of two rows: not a power of two, which would put the rows of all heads
// into the same few sets of the cache.
inline constexpr std::int64_t kDecodeScoreStride = kDecodeBlockKeys + kDecodePad;

FLASHATTN_INLINE std::int64_t decode_padded(std::int64_t dim) {
  return (dim + kDecodePad - 1) / kDecodePad * kDecodePad;
}

// The partial result of some query rows over one chunk. A row is (kv head, query head in its group,
// query row), row = (kv_head * heads_per_kv + head_in_group) * seqlen_q + i, for all kv heads of
// the batch entry. Scores are in units of log 2 without modifiers and in natural units with them.
struct DecodePartial {
  float* acc =
      nullptr;  // [rows][decode_padded(value_dim)]: sum over keys of exp(score - max) * value
  float* max = nullptr;  // [rows]: the largest score; -inf when no key is visible
  float* sum = nullptr;  // [rows]: sum over keys of exp(score - max), before dropout
};

struct DecodeChunk {
  const AttentionJob* job = nullptr;
  std::int64_t batch = 0;
  std::int64_t key_begin = 0;  // within one chunk
  std::int64_t key_end = 0;
  std::int64_t kv_head_begin = 0;
  std::int64_t kv_head_end = 0;
  DecodePartial partial{};
  float* scratch = nullptr;  // decode_scratch_floats(job)
};

struct DecodeMerge {
  const AttentionJob* job = nullptr;
  std::int64_t batch = 0;
  std::int64_t head = 0;  // query head; all its rows are merged
  const float* partials =
      nullptr;  // chunk c's DecodePartial arrays start at c * decode_partial_floats(job)
  std::int64_t chunks = 0;   // 0: the rows see no key
  float* scratch = nullptr;  // decode_padded(value_dim) floats
};

FLASHATTN_INLINE std::int64_t decode_rows(const AttentionJob& job) {
  return job.query_heads * job.seqlen_q;
}

FLASHATTN_INLINE std::int64_t decode_partial_floats(const AttentionJob& job) {
  return decode_rows(job) * (decode_padded(job.value_dim) + 2);
}

// One partial's arrays in memory: acc, then max, then sum.
FLASHATTN_INLINE DecodePartial decode_partial_at(const AttentionJob& job, float* base) {
  float* max = base + decode_rows(job) * decode_padded(job.value_dim);
  return {.acc = base, .max = max, .sum = max + decode_rows(job)};
}

// The float32 scratch of a chunk, in this order.
struct DecodeScratch {
  float* q = nullptr;           // [decode_rows][decode_padded(head_dim)]: all rows of an entry
  float* key_copy = nullptr;    // [kDecodeBlockKeys][decode_padded(head_dim)]: for the strided path
  float* value_copy = nullptr;  // [kDecodeBlockKeys][decode_padded(value_dim)]
  float* scores = nullptr;      // [decode_rows][kDecodeScoreStride], if rows are few
  float* sums = nullptr;        // [decode_rows][decode_padded(value_dim)], if rows are few
};

// Whether keys and values are read in memory order (decode_linear.h). Not where the arithmetic
// takes longer than the reading: from 4 query rows a key on for 16-bit elements, from 9 on for
// float32.
FLASHATTN_INLINE bool decode_linear(const AttentionJob& job) {
  const std::int64_t rows = job.heads_per_kv * job.seqlen_q;
  return rows <= (job.dtype == DType::kFloat32 ? 8 : 3);
}

FLASHATTN_INLINE DecodeScratch decode_scratch_at(const AttentionJob& job, float* base) {
  float* key_copy = base + decode_rows(job) * decode_padded(job.head_dim);
  float* value_copy = key_copy + kDecodeBlockKeys * decode_padded(job.head_dim);
  float* scores = value_copy + kDecodeBlockKeys * decode_padded(job.value_dim);
  float* sums = scores + decode_rows(job) * kDecodeScoreStride;
  return {
      .q = base, .key_copy = key_copy, .value_copy = value_copy, .scores = scores, .sums = sums};
}

FLASHATTN_INLINE std::int64_t decode_scratch_floats(const AttentionJob& job) {
  const std::int64_t copies =
      kDecodeBlockKeys * (decode_padded(job.head_dim) + decode_padded(job.value_dim));
  const std::int64_t few_rows =
      decode_linear(job) ? kDecodeScoreStride + decode_padded(job.value_dim) : 0;
  return copies + decode_rows(job) * (decode_padded(job.head_dim) + few_rows);
}

struct DecodeKernels {
  void (*chunk)(const DecodeChunk& task) = nullptr;
  void (*merge)(const DecodeMerge& task) = nullptr;
};

}  // namespace flashattn::cpu
