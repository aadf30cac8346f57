// What one instruction set offers for the forward pass: plain function pointers, so that portable
// code can schedule kernels without being compiled with their instructions.
#pragma once

#include <cstdint>

#include "cpu/job.h"

namespace flashattn::cpu {

// What a task may fetch into the cache while it computes: what the next tasks of its thread read.
struct ForwardAhead {
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;
  std::int64_t key_begin = 0;  // keys and values [key_begin, key_end) of that head
  std::int64_t key_end = 0;
  std::int64_t query_batch = 0;
  std::int64_t query_head = 0;
  std::int64_t query_begin = 0;  // queries [query_begin, query_end) of that head
  std::int64_t query_end = 0;
};

// block_q rows against every key they see. Row r is query r / heads of head `head + r % heads`, so
// that heads that share a kv head can share a block when each has few queries; heads is 1 or all of
// the group.
struct ForwardTask {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t heads = 1;
  std::int64_t first_row = 0;
  const void* packed =
      nullptr;              // of (batch, kv head), filled by pack() over the keys these rows see
  void* scratch = nullptr;  // 64-byte aligned
  const ForwardAhead* ahead = nullptr;  // may be null
};

struct ForwardKernels {
  // Rows of one task.
  std::int64_t block_q = 0;
  // Keys that pack() handles at a time; every key_begin is a multiple of it.
  std::int64_t pack_keys = 0;

  // Bytes that the packed keys and values of one (batch, kv head) take.
  std::int64_t (*packed_bytes)(const AttentionJob& job) = nullptr;
  // Bytes of scratch that one block() call needs.
  std::int64_t (*scratch_bytes)(const AttentionJob& job) = nullptr;
  // Packs keys [key_begin, key_begin + pack_keys) of one (batch, kv head); packed is 64-byte
  // aligned.
  void (*pack)(const AttentionJob& job, std::int64_t batch, std::int64_t kv_head,
               std::int64_t key_begin, void* packed) = nullptr;
  // Writes out and lse of the task's rows.
  void (*block)(const AttentionJob& job, const ForwardTask& task) = nullptr;
};

}  // namespace flashattn::cpu
