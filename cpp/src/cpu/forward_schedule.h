// Runs the forward pass of a job: who packs what when, and in which order the query blocks are
// computed.
#pragma once

#include "cpu/job.h"
#include "cpu/kernel_table.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {

// Writes job.out and job.lse. The result does not depend on the number of threads or on how tasks
// are ordered: every query block is computed by one task, from inputs alone.
void run_forward(const AttentionJob& job, const CpuKernels& kernels, ThreadPool& pool);

}  // namespace flashattn::cpu
