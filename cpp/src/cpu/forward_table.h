// What one instruction set offers for the forward pass: plain function pointers, so that portable
// code can schedule kernels without being compiled with their instructions.
#pragma once

#include <cstdint>

#include "cpu/job.h"

namespace flashattn::cpu {

// What a block may fetch into the cache while it computes: the rows that the next tasks of this
// thread read.
struct ForwardAhead {
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;
  std::int64_t key_begin = 0;  // keys and values [key_begin, key_end) of that head
  std::int64_t key_end = 0;
  std::int64_t query_batch = 0;
  std::int64_t query_head = 0;
  std::int64_t query_begin = 0;  // block_q queries of that head; at seqlen_q or past it: none
};

struct ForwardKernels {
  // Queries of one task.
  std::int64_t block_q = 0;
  // Keys that pack() handles at a time; every key_begin is a multiple of it.
  std::int64_t pack_keys = 0;

  // Bytes that the packed keys and values of one (batch, kv head) take: K, V, and which V rows are
  // not finite.
  std::int64_t (*packed_bytes)(const AttentionJob& job) = nullptr;
  // Bytes of scratch that one block() call needs.
  std::int64_t (*scratch_bytes)(const AttentionJob& job) = nullptr;
  // Packs keys [key_begin, key_begin + pack_keys) of one (batch, kv head). Both buffers are 64-byte
  // aligned.
  void (*pack)(const AttentionJob& job, std::int64_t batch, std::int64_t kv_head,
               std::int64_t key_begin, void* packed) = nullptr;
  // Writes out and lse of queries [query_begin, query_begin + block_q) of one query head. ahead may
  // be null.
  void (*block)(const AttentionJob& job, std::int64_t batch, std::int64_t head,
                std::int64_t query_begin, const void* packed, void* scratch,
                const ForwardAhead* ahead) = nullptr;
};

}  // namespace flashattn::cpu
