// The backward kernels of one instruction set, as backward_schedule.cpp calls them, and the plain
// structs between the two. It relies on job.h and holds no code.
//
// A task owns float32 sums of dK and dV for one (batch, kv head) over a subset of the query blocks;
// the sums of the subsets are added in a fixed order when all are done. dQ is finished by the task
// that owns the query block.
#pragma once

#include <cstdint>

#include "core/visibility.h"
#include "cpu/job.h"

namespace flashattn::cpu {

// Query rows of a block: the unit in which the work is divided.
inline constexpr std::int64_t kBackwardBlockQ = 64;
// Keys of a block: ranges of keys that are packed or summed start at a multiple of it.
inline constexpr std::int64_t kBackwardBlockK = 64;

// Sizes in bytes of the buffers that the schedule hands to the kernels, each a multiple of 64.
struct BackwardSizes {
  std::int64_t packed = 0;   // keys and values of one (batch, kv head)
  std::int64_t sums = 0;     // dK and dV sums of one (batch, kv head)
  std::int64_t scratch = 0;  // per running task
};

// Query blocks first, first + step, ... below end of every query head that shares the kv head.
struct QueryBlocks {
  std::int64_t first = 0;
  std::int64_t step = 1;
  std::int64_t end = 0;
};

// What each query block adds to the gradients of ALiBi slopes and sinks,
// [batch][query_heads][blocks]; null where not asked for.
struct HeadPartials {
  double* slopes = nullptr;
  double* sinks = nullptr;
  std::int64_t blocks = 0;  // at least those of any entry
};

struct BackwardTask {
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;
  QueryBlocks blocks;
  const void* packed = nullptr;  // filled by pack_keys, at least over what the blocks see
  void* sums = nullptr;
  void* scratch = nullptr;  // all three 64-byte aligned
  HeadPartials partials;
  // Whether the blocks are all that there are: dk and dv will be written right after this task.
  bool whole_head = false;
  // The (batch, kv head) whose task likely follows on this core, to fetch its rows ahead.
  std::int64_t next_batch = 0;
  std::int64_t next_kv_head = 0;
};

// The sums of one (batch, kv head): `count` of them, `stride_bytes` apart.
struct BackwardSums {
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;
  const void* first = nullptr;
  std::int64_t stride_bytes = 0;
  std::int64_t count = 0;
};

// Blocks of rows and of keys, at most, that one region of dmask has along an axis of its own.
inline constexpr std::int64_t kMaskRegionBlocks = 4;

// A region of dmask and all the scores that belong to it: along an axis of size 1 of dmask every
// batch entry, head, row or key of the call, else one batch entry, one head, whole blocks.
struct MaskRegion {
  Interval batches;
  Interval heads;
  Interval rows;
  Interval keys;
};

// A block of query rows of one head, from first_row on.
struct HeadRows {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t first_row = 0;
};

struct BackwardKernels {
  BackwardSizes (*sizes)(const AttentionJob& job);
  // Copies keys and values of `keys` (whole blocks) into the form that the products read.
  void (*pack_keys)(const AttentionJob& job, std::int64_t batch, std::int64_t kv_head,
                    Interval keys, void* packed);
  // Writes dq of the task's rows, and its sums of dK and dV.
  void (*accumulate)(const AttentionJob& job, const BackwardTask& task);
  // Adds the sums in ascending order and writes dk and dv of `keys`, which begin with a whole
  // block.
  void (*write_key_gradients)(const AttentionJob& job, const BackwardSums& sums, Interval keys);
  // Writes dmask of a region. scratch: mask_scratch(job, region) bytes, 64-byte aligned.
  void (*write_mask_gradient)(const AttentionJob& job, const MaskRegion& region, void* scratch);
  std::int64_t (*mask_scratch)(const AttentionJob& job, const MaskRegion& region);
  // sums[kBackwardBlockQ]: of exp(s - lse) over each row's keys and its sink, garbage past the last
  // row. scratch: weight_scratch(job) bytes, 64-byte aligned.
  void (*sum_weights)(const AttentionJob& job, const HeadRows& rows, float* sums, void* scratch);
  std::int64_t (*weight_scratch)(const AttentionJob& job);
};

}  // namespace flashattn::cpu
