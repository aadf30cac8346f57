// The order of work of a backward call: how the query blocks are divided, which buffers exist at a
// time, and in which order partial sums are added. It relies on the kernels of one instruction set
// (backward_table.h) and does no arithmetic on tensors itself.
#pragma once

#include <cstdint>

#include "core/visibility.h"
#include "cpu/backward_table.h"
#include "cpu/job.h"
#include "cpu/kernel_table.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {

// Into how many subsets the query blocks of a (batch, kv head) are divided. A function of one such
// pair's own sizes, so that a result depends neither on the number of threads nor on what else is
// in the batch.
std::int64_t query_subsets(const AttentionJob& job);

// Subset number `index`. Interleaved, which balances causal masks; a window bounded on both sides
// gets contiguous runs instead, so that each subset sees a short range of keys.
QueryBlocks query_subset(const Visibility& visibility, std::int64_t index, std::int64_t count);

// The keys that the rows of `blocks` see.
Interval keys_of_blocks(const Visibility& visibility, const QueryBlocks& blocks);

// Writes every gradient of the job that has memory. Bitwise the same for any pool.
void run_backward(const AttentionJob& call, const CpuKernels& kernels, ThreadPool& pool);

}  // namespace flashattn::cpu
