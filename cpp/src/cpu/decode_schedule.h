// The order of work of a decode call: which chunks of keys there are, which tasks they make, and
// the merge. Relies on the kernels of one instruction set (decode_table.h) and does no arithmetic
// on tensors itself.
#pragma once

#include "cpu/job.h"
#include "cpu/kernel_table.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {

// Whether decode computes the rows of a batch entry in a forward call, or the lane kernel of
// forward.h does. A function of the entry's own rows and of the keys that they see: never of its
// batch mates, of padding that lengths tell of or of threads.
bool prefers_decode(const AttentionJob& job, std::int64_t entry);

// Writes job.out and job.lse of the entries that decode computes. Bitwise the same for any pool and
// any batch mates.
void run_decode(const AttentionJob& job, const CpuKernels& kernels, ThreadPool& pool);

}  // namespace flashattn::cpu
