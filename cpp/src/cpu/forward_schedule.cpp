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
// Tasks of a pair up to which the next pair's keys are fetched ahead; with more, waiting for them
// once costs less than the fetching (measured: +5 to +10 % at 2 tasks, 0 at 8, -1.5 % at 32).
constexpr std::int64_t kTasksToFetchAhead = 8;
// Multiply-adds below which waking a helper costs more than it gains (about 20 us of one core).
constexpr double kSerialWork = 1e6;

class ForwardRun {
 public:
  ForwardRun(const AttentionJob& job, const ForwardKernels& kernels)
      : job_(job),
        kernels_(kernels),
        packed_bytes_(round_to_line(kernels.packed_bytes(job))),
        scratch_bytes_(round_to_line(kernels.scratch_bytes(job))) {
    // Heads of a group share blocks where that leaves clearly fewer of them: with few queries a
    // block of one head would be mostly empty lanes.
    const std::int64_t apart = job.heads_per_kv * blocks_of(job.seqlen_q);
    const std::int64_t together = blocks_of(job.seqlen_q * job.heads_per_kv);
    heads_ = job.heads_per_kv > 1 && together * 10 <= apart * 9 ? job.heads_per_kv : 1;
    blocks_ = blocks_of(job.seqlen_q * heads_);
    tasks_ = job.heads_per_kv / heads_ * blocks_;
  }

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

  std::int64_t blocks_of(std::int64_t rows) const {
    return (rows + kernels_.block_q - 1) / kernels_.block_q;
  }

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

  // Task `index` of the tasks_ of one pair. Within a head, the blocks that see most keys come
  // first: the order that ends evenly.
  ForwardTask task_of(std::int64_t pair, std::int64_t index) const {
    const std::int64_t first_head = pair % job_.kv_heads * job_.heads_per_kv;
    return {.batch = pair / job_.kv_heads,
            .head = first_head + index / blocks_,
            .heads = heads_,
            .first_row = (blocks_ - 1 - index % blocks_) * kernels_.block_q};
  }

  // Everything of one (batch, kv head).
  void whole_pair(std::int64_t pair, std::int64_t pairs) const {
    std::byte* const packed =
        thread_scratch(static_cast<std::size_t>(packed_bytes_ + scratch_bytes_));
    const Interval range = chunks(pair / job_.kv_heads);
    for (std::int64_t c = range.begin; c < range.end; ++c) pack(pair, c, packed);
    for (std::int64_t index = 0; index < tasks_; ++index) {
      const ForwardAhead ahead = look_ahead(pair, pairs, index);
      ForwardTask task = task_of(pair, index);
      task.packed = packed;
      task.scratch = packed + packed_bytes_;
      task.ahead = &ahead;
      kernels_.block(job_, task);
    }
  }

  // The queries of the next task, and task `index`'s share of the next pair's keys.
  ForwardAhead look_ahead(std::int64_t pair, std::int64_t pairs, std::int64_t index) const {
    ForwardAhead ahead;
    const std::int64_t next_pair = pair + 1;
    if (next_pair < pairs && tasks_ <= kTasksToFetchAhead) {
      ahead.batch = next_pair / job_.kv_heads;
      ahead.kv_head = next_pair % job_.kv_heads;
      const Interval keys = job_.visibility[ahead.batch].keys_of_rows(0, job_.seqlen_q);
      const std::int64_t length = std::max<std::int64_t>(keys.end - keys.begin, 0);
      ahead.key_begin = keys.begin + length * index / tasks_;
      ahead.key_end = keys.begin + length * (index + 1) / tasks_;
    }
    const bool last = index + 1 == tasks_;
    if (heads_ > 1 || (last && next_pair == pairs)) return ahead;
    const ForwardTask next = last ? task_of(next_pair, 0) : task_of(pair, index + 1);
    ahead.query_batch = next.batch;
    ahead.query_head = next.head;
    ahead.query_begin = next.first_row;
    ahead.query_end = std::min(next.first_row + kernels_.block_q, job_.seqlen_q);
    return ahead;
  }

  // Groups of pairs that fit the budget; within a group all threads pack, then all compute.
  void run_shared(ThreadPool& pool, std::int64_t pairs) const {
    const std::int64_t group = std::clamp<std::int64_t>(
        kPackedBudget / std::max<std::int64_t>(packed_bytes_, 1), 1, pairs);
    const Workspace workspace(static_cast<std::size_t>(group * packed_bytes_));
    for (std::int64_t first = 0; first < pairs; first += group) {
      run_group(pool, first, std::min(first + group, pairs), workspace.data());
    }
  }

  void run_group(ThreadPool& pool, std::int64_t first, std::int64_t last, std::byte* memory) const {
    const auto packed_of = [&](std::int64_t pair) {
      return memory + (pair - first) * packed_bytes_;
    };
    const std::int64_t pair_chunks = (job_.seqlen_k + kernels_.pack_keys - 1) / kernels_.pack_keys;
    pool.parallel_for((last - first) * pair_chunks, [&](std::int64_t index) {
      const std::int64_t pair = first + index / pair_chunks;
      const std::int64_t chunk = index % pair_chunks;
      const Interval range = chunks(pair / job_.kv_heads);
      if (chunk >= range.begin && chunk < range.end) pack(pair, chunk, packed_of(pair));
    });
    pool.parallel_for((last - first) * tasks_, [&](std::int64_t index) {
      const std::int64_t pair = first + index / tasks_;
      ForwardTask task = task_of(pair, index % tasks_);
      task.packed = packed_of(pair);
      task.scratch = thread_scratch(static_cast<std::size_t>(scratch_bytes_));
      kernels_.block(job_, task);
    });
  }

  const AttentionJob& job_;
  const ForwardKernels& kernels_;
  std::int64_t packed_bytes_;
  std::int64_t scratch_bytes_;
  std::int64_t heads_;   // that share a block: 1, or all of a group
  std::int64_t blocks_;  // of a head, or of the group
  std::int64_t tasks_;   // of one (batch, kv head)
};

}  // namespace

void run_forward(const AttentionJob& job, const CpuKernels& kernels, ThreadPool& pool) {
  ForwardRun(job, kernels.forward).run(pool);
}

}  // namespace flashattn::cpu
