// Two schedules over the same kernels. With many (batch, kv head) pairs one task is a whole pair:
// it packs keys and values into its thread's own memory and computes all their query blocks. With
// few, the pairs are packed by all threads into shared memory and every query block is a task of
// its own.
#include "cpu/forward_schedule.h"

#include <algorithm>

#include "cpu/scratch.h"

namespace flashattn::cpu {
namespace {

// Packed keys and values that a call may hold at a time; a single pair that needs more gets it.
constexpr std::int64_t kPackedBudget = std::int64_t{32} << 20;
// Pairs per thread from which whole pairs balance well enough.
constexpr std::int64_t kPairsPerThread = 8;
// Multiply-adds below which waking a helper costs more than it gains (about 20 us of one core).
constexpr double kSerialWork = 1e6;

class ForwardRun {
 public:
  ForwardRun(const AttentionJob& job, const ForwardKernels& kernels)
      : job_(job),
        kernels_(kernels),
        blocks_((job.seqlen_q + kernels.block_q - 1) / kernels.block_q),
        packed_bytes_(round_to_line(kernels.packed_bytes(job))),
        scratch_bytes_(round_to_line(kernels.scratch_bytes(job))) {}

  void run(ThreadPool& pool) const {
    const std::int64_t pairs = job_.batch * job_.kv_heads;
    if (pairs == 0 || job_.query_heads == 0 || job_.seqlen_q == 0) return;
    const std::int64_t threads = small() ? 1 : pool.threads();
    if (threads == 1) {
      for (std::int64_t pair = 0; pair < pairs; ++pair) whole_pair(pair, pairs);
    } else if (pairs >= kPairsPerThread * threads && threads * packed_bytes_ <= kPackedBudget) {
      pool.parallel_for(pairs, [&](std::int64_t pair) { whole_pair(pair, pairs); });
    } else {
      run_shared(pool, pairs);
    }
  }

 private:
  static std::int64_t round_to_line(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

  bool small() const {
    const double scores = static_cast<double>(job_.batch * job_.query_heads) *
                          static_cast<double>(job_.seqlen_q) * static_cast<double>(job_.seqlen_k);
    return scores * static_cast<double>(job_.head_dim + job_.value_dim) < kSerialWork;
  }

  // Keys that some query of the batch entry sees, as pack() chunks [begin, end).
  Interval chunks(std::int64_t batch) const {
    const Interval keys = job_.visibility[batch].keys_of_rows(0, job_.seqlen_q);
    if (keys.begin >= keys.end) return {0, 0};
    // The kernels read whole tiles: up to seven keys more than the last, zeros past the limit.
    const std::int64_t end = std::min(keys.end + 7, (job_.seqlen_k + 7) / 8 * 8);
    return {keys.begin / kernels_.pack_keys, (end + kernels_.pack_keys - 1) / kernels_.pack_keys};
  }

  void pack(std::int64_t pair, std::int64_t chunk, std::byte* packed) const {
    kernels_.pack(job_, pair / job_.kv_heads, pair % job_.kv_heads, chunk * kernels_.pack_keys,
                  packed);
  }

  // Everything of one (batch, kv head). Query blocks that see most keys come first: when tasks are
  // few this is the order that ends evenly.
  void whole_pair(std::int64_t pair, std::int64_t pairs) const {
    std::byte* const packed =
        thread_scratch(static_cast<std::size_t>(packed_bytes_ + scratch_bytes_));
    std::byte* const scratch = packed + packed_bytes_;
    const std::int64_t batch = pair / job_.kv_heads;
    const Interval range = chunks(batch);
    for (std::int64_t c = range.begin; c < range.end; ++c) pack(pair, c, packed);

    const std::int64_t tasks = job_.heads_per_kv * blocks_;
    const std::int64_t first_head = pair % job_.kv_heads * job_.heads_per_kv;
    for (std::int64_t task = 0; task < tasks; ++task) {
      const ForwardAhead ahead = look_ahead(pair, pairs, task, tasks);
      kernels_.block(job_, batch, first_head + task / blocks_,
                     (blocks_ - 1 - task % blocks_) * kernels_.block_q, packed, scratch, &ahead);
    }
  }

  // The queries of the next task, and this task's share of the next pair's keys.
  ForwardAhead look_ahead(std::int64_t pair, std::int64_t pairs, std::int64_t task,
                          std::int64_t tasks) const {
    const std::int64_t next_pair = pair + 1;
    ForwardAhead ahead{.query_begin = job_.seqlen_q};
    if (next_pair < pairs) {
      ahead.batch = next_pair / job_.kv_heads;
      ahead.kv_head = next_pair % job_.kv_heads;
      const Interval keys = job_.visibility[ahead.batch].keys_of_rows(0, job_.seqlen_q);
      const std::int64_t length = std::max<std::int64_t>(keys.end - keys.begin, 0);
      ahead.key_begin = keys.begin + length * task / tasks;
      ahead.key_end = keys.begin + length * (task + 1) / tasks;
    }
    const bool last = task + 1 == tasks;
    if (last && next_pair == pairs) return ahead;
    const std::int64_t next_task = last ? 0 : task + 1;
    const std::int64_t of_pair = last ? next_pair : pair;
    ahead.query_batch = of_pair / job_.kv_heads;
    ahead.query_head = of_pair % job_.kv_heads * job_.heads_per_kv + next_task / blocks_;
    ahead.query_begin = (blocks_ - 1 - next_task % blocks_) * kernels_.block_q;
    return ahead;
  }

  // Groups of pairs that fit the budget; within a group all threads pack, then all compute.
  void run_shared(ThreadPool& pool, std::int64_t pairs) const {
    const std::int64_t group = std::clamp<std::int64_t>(kPackedBudget / packed_bytes_, 1, pairs);
    const Workspace workspace(static_cast<std::size_t>(group * packed_bytes_));
    for (std::int64_t first = 0; first < pairs; first += group) {
      run_group(pool, first, std::min(first + group, pairs), workspace.data());
    }
  }

  void run_group(ThreadPool& pool, std::int64_t first, std::int64_t last, std::byte* memory) const {
    const auto packed_of = [&](std::int64_t pair) {
      return memory + (pair - first) * packed_bytes_;
    };
    const std::int64_t chunks_per_pair =
        (job_.seqlen_k + kernels_.pack_keys - 1) / kernels_.pack_keys;
    pool.parallel_for((last - first) * chunks_per_pair, [&](std::int64_t index) {
      const std::int64_t pair = first + index / chunks_per_pair;
      const std::int64_t chunk = index % chunks_per_pair;
      const Interval range = chunks(pair / job_.kv_heads);
      if (chunk >= range.begin && chunk < range.end) pack(pair, chunk, packed_of(pair));
    });
    const std::int64_t tasks_per_pair = job_.heads_per_kv * blocks_;
    pool.parallel_for((last - first) * tasks_per_pair, [&](std::int64_t index) {
      const std::int64_t pair = first + index / tasks_per_pair;
      const std::int64_t task = index % tasks_per_pair;
      const std::int64_t head = pair % job_.kv_heads * job_.heads_per_kv + task / blocks_;
      kernels_.block(job_, pair / job_.kv_heads, head,
                     (blocks_ - 1 - task % blocks_) * kernels_.block_q, packed_of(pair),
                     thread_scratch(static_cast<std::size_t>(scratch_bytes_)), nullptr);
    });
  }

  const AttentionJob& job_;
  const ForwardKernels& kernels_;
  std::int64_t blocks_;  // of queries, per head
  std::int64_t packed_bytes_;
  std::int64_t scratch_bytes_;
};

}  // namespace

void run_forward(const AttentionJob& job, const CpuKernels& kernels, ThreadPool& pool) {
  ForwardRun(job, kernels.forward).run(pool);
}

}  // namespace flashattn::cpu
