// Two schedules over the same kernels. With many (batch, kv head) pairs one task is a whole pair:
// it packs keys and values into its thread's own memory and computes all their query blocks. With
// few, the pairs are packed by all threads into shared memory and every query block is a task of
// its own.
#include "cpu/forward_schedule.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "cpu/decode_schedule.h"
#include "cpu/mask_classes.h"
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

std::int64_t round_to_line(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// One batch entry's share of the work: its tasks and pack chunks, and where they stand in the
// numbering of all.
struct EntryWork {
  std::int64_t batch = 0;
  std::int64_t seqlen_q = 0;
  Interval chunks{};              // pack() chunks of the keys that some query sees
  std::int64_t heads = 1;         // that share a block: 1, or all of a group
  std::int64_t blocks = 0;        // of a head, or of the group
  std::int64_t tasks = 0;         // of one kv head
  std::int64_t packed_bytes = 0;  // of one kv head
};

// Keys that some query of the entry sees, as pack() chunks [begin, end).
Interval chunks_of(const AttentionJob& job, const ForwardKernels& kernels, std::int64_t batch) {
  const Interval keys = job.visibility[batch].keys_of_rows(0, entry_seqlen_q(job, batch));
  if (keys.begin >= keys.end) return {0, 0};
  // The kernels read whole tiles: up to seven keys more than the last, zeros past the limit.
  const std::int64_t end = std::min(keys.end + 7, (entry_seqlen_k(job, batch) + 7) / 8 * 8);
  return {keys.begin / kernels.pack_keys, (end + kernels.pack_keys - 1) / kernels.pack_keys};
}

EntryWork work_of(const AttentionJob& job, const ForwardKernels& kernels, std::int64_t batch) {
  EntryWork work{.batch = batch, .seqlen_q = entry_seqlen_q(job, batch)};
  work.chunks = chunks_of(job, kernels, batch);
  work.packed_bytes = round_to_line(kernels.packed_bytes(job_of_entry(job, batch)));
  const auto blocks_of = [&](std::int64_t rows) {
    return (rows + kernels.block_q - 1) / kernels.block_q;
  };
  // Heads of a group share blocks where that leaves clearly fewer of them: with few queries a block
  // of one head would be mostly empty lanes.
  const std::int64_t apart = job.heads_per_kv * blocks_of(work.seqlen_q);
  const std::int64_t together = blocks_of(work.seqlen_q * job.heads_per_kv);
  work.heads = job.heads_per_kv > 1 && together * 10 <= apart * 9 ? job.heads_per_kv : 1;
  work.blocks = blocks_of(work.seqlen_q * work.heads);
  work.tasks = job.heads_per_kv / work.heads * work.blocks;
  return work;
}

// The entries that are not decode's. Of a ragged call the longest come first, which ends evenly.
std::vector<EntryWork> entries_of(const AttentionJob& job, const ForwardKernels& kernels) {
  std::vector<EntryWork> entries;
  for (std::int64_t b = 0; b < job.batch; ++b) {
    const std::int64_t rows = entry_seqlen_q(job, b);
    if (rows > 0 && !prefers_decode(job, b)) entries.push_back(work_of(job, kernels, b));
  }
  if (job.entries != nullptr) {
    std::stable_sort(entries.begin(), entries.end(), [](const EntryWork& a, const EntryWork& b) {
      return a.packed_bytes * a.tasks > b.packed_bytes * b.tasks;
    });
  }
  return entries;
}

// A pair is one kv head of one entry; pairs count through the heads of an entry, then the entries.
class ForwardRun {
 public:
  ForwardRun(const AttentionJob& job, const ForwardKernels& kernels, std::vector<EntryWork> entries)
      : job_(job),
        kernels_(kernels),
        entries_(std::move(entries)),
        scratch_bytes_(round_to_line(kernels.scratch_bytes(job))) {
    for (const EntryWork& entry : entries_) {
      most_packed_bytes_ = std::max(most_packed_bytes_, entry.packed_bytes);
    }
  }

  void run(ThreadPool& pool) const {
    const std::int64_t pairs = std::ssize(entries_) * job_.kv_heads;
    if (pairs == 0) return;
    const std::int64_t threads = small() ? 1 : pool.threads();
    if (threads == 1) {
      for (std::int64_t pair = 0; pair < pairs; ++pair) whole_pair(pair, pairs);
    } else if (pairs >= kPairsPerThread * threads &&
               threads * most_packed_bytes_ <= kPackedBudget) {
      pool.parallel_for(pairs, [&](std::int64_t pair) { whole_pair(pair, pairs); });
    } else {
      run_shared(pool, pairs);
    }
  }

 private:
  const EntryWork& entry_of(std::int64_t pair) const {
    return entries_[static_cast<std::size_t>(pair / job_.kv_heads)];
  }

  bool small() const {
    double scores = 0.0;
    for (const EntryWork& entry : entries_) {
      scores += static_cast<double>(entry.seqlen_q) *
                static_cast<double>(entry_seqlen_k(job_, entry.batch));
    }
    return scores * static_cast<double>(job_.query_heads) *
               static_cast<double>(job_.head_dim + job_.value_dim) <
           kSerialWork;
  }

  // Calls body(job) with the job of the pair's entry.
  template <class Body>
  void with_job(std::int64_t pair, const Body& body) const {
    if (job_.entries == nullptr) return body(job_);
    const AttentionJob own = job_of_entry(job_, entry_of(pair).batch);
    body(own);
  }

  void pack(const AttentionJob& job, std::int64_t pair, std::int64_t chunk,
            std::byte* packed) const {
    kernels_.pack(job, entry_of(pair).batch, pair % job_.kv_heads, chunk * kernels_.pack_keys,
                  packed);
  }

  // Task `index` of one pair. Within a head, the blocks that see most keys come first: the order
  // that ends evenly.
  ForwardTask task_of(std::int64_t pair, std::int64_t index) const {
    const EntryWork& entry = entry_of(pair);
    const std::int64_t first_head = pair % job_.kv_heads * job_.heads_per_kv;
    return {.batch = entry.batch,
            .head = first_head + index / entry.blocks,
            .heads = entry.heads,
            .first_row = (entry.blocks - 1 - index % entry.blocks) * kernels_.block_q};
  }

  void whole_pair(std::int64_t pair, std::int64_t pairs) const {
    with_job(pair, [&](const AttentionJob& job) { whole_pair(job, pair, pairs); });
  }

  // Everything of one pair.
  void whole_pair(const AttentionJob& job, std::int64_t pair, std::int64_t pairs) const {
    if (is_ending(job)) return;
    const EntryWork& entry = entry_of(pair);
    std::byte* const packed =
        thread_scratch(static_cast<std::size_t>(entry.packed_bytes + scratch_bytes_));
    for (std::int64_t c = entry.chunks.begin; c < entry.chunks.end; ++c) pack(job, pair, c, packed);
    for (std::int64_t index = 0; index < entry.tasks && !is_ending(job); ++index) {
      const ForwardAhead ahead = look_ahead(pair, pairs, index);
      ForwardTask task = task_of(pair, index);
      task.packed = packed;
      task.scratch = packed + entry.packed_bytes;
      task.ahead = &ahead;
      kernels_.block(job, task);
    }
  }

  // The queries of the next task, and task `index`'s share of the next pair's keys.
  ForwardAhead look_ahead(std::int64_t pair, std::int64_t pairs, std::int64_t index) const {
    ForwardAhead ahead;
    const std::int64_t tasks = entry_of(pair).tasks;
    const std::int64_t next_pair = pair + 1;
    if (next_pair < pairs && tasks <= kTasksToFetchAhead) {
      const EntryWork& next = entry_of(next_pair);
      ahead.batch = next.batch;
      ahead.kv_head = next_pair % job_.kv_heads;
      const Interval keys = job_.visibility[ahead.batch].keys_of_rows(0, next.seqlen_q);
      const std::int64_t length = std::max<std::int64_t>(keys.end - keys.begin, 0);
      ahead.key_begin = keys.begin + length * index / tasks;
      ahead.key_end = keys.begin + length * (index + 1) / tasks;
    }
    const bool last = index + 1 == tasks;
    const std::int64_t query_pair = last ? next_pair : pair;
    if (query_pair == pairs || entry_of(query_pair).heads > 1) return ahead;
    const ForwardTask next = task_of(query_pair, last ? 0 : index + 1);
    ahead.query_batch = next.batch;
    ahead.query_head = next.head;
    ahead.query_begin = next.first_row;
    ahead.query_end = std::min(next.first_row + kernels_.block_q, entry_of(query_pair).seqlen_q);
    return ahead;
  }

  // Pairs that share the packed memory: where each one's lies, and its place in the numbering of
  // the group's chunks and tasks.
  struct SharedPair {
    std::int64_t pair = 0;
    std::byte* packed = nullptr;
    std::int64_t first_chunk = 0;
    std::int64_t first_task = 0;
  };

  // Groups of pairs that fit the budget; within a group all threads pack, then all compute.
  void run_shared(ThreadPool& pool, std::int64_t pairs) const {
    std::vector<SharedPair> group;
    for (std::int64_t first = 0; first < pairs;) {
      std::int64_t last = first;
      std::int64_t bytes = 0;
      while (last < pairs &&
             (last == first || bytes + entry_of(last).packed_bytes <= kPackedBudget)) {
        bytes += entry_of(last++).packed_bytes;
      }
      const Workspace workspace(static_cast<std::size_t>(bytes));
      run_group(pool, place_group(first, last, workspace.data(), group));
      first = last;
    }
  }

  // Fills `group` with the pairs [first, last) and a last one that holds the totals.
  const std::vector<SharedPair>& place_group(std::int64_t first, std::int64_t last,
                                             std::byte* memory,
                                             std::vector<SharedPair>& group) const {
    group.clear();
    SharedPair at{.packed = memory};
    for (at.pair = first; at.pair < last; ++at.pair) {
      group.push_back(at);
      const EntryWork& entry = entry_of(at.pair);
      at.packed += entry.packed_bytes;
      at.first_chunk += entry.chunks.end - entry.chunks.begin;
      at.first_task += entry.tasks;
    }
    group.push_back(at);
    return group;
  }

  // The pair that index number `index` belongs to, of those counted by `first`.
  static const SharedPair& find(const std::vector<SharedPair>& group, std::int64_t index,
                                std::int64_t SharedPair::* first) {
    return *std::prev(std::upper_bound(
        group.begin(), group.end(), index,
        [first](std::int64_t value, const SharedPair& pair) { return value < pair.*first; }));
  }

  void run_group(ThreadPool& pool, const std::vector<SharedPair>& group) const {
    pool.parallel_for(group.back().first_chunk, [&](std::int64_t index) {
      if (is_ending(job_)) return;
      const SharedPair& shared = find(group, index, &SharedPair::first_chunk);
      const std::int64_t chunk = entry_of(shared.pair).chunks.begin + index - shared.first_chunk;
      with_job(shared.pair,
               [&](const AttentionJob& job) { pack(job, shared.pair, chunk, shared.packed); });
    });
    pool.parallel_for(group.back().first_task, [&](std::int64_t index) {
      if (is_ending(job_)) return;
      const SharedPair& shared = find(group, index, &SharedPair::first_task);
      ForwardTask task = task_of(shared.pair, index - shared.first_task);
      task.packed = shared.packed;
      task.scratch = thread_scratch(static_cast<std::size_t>(scratch_bytes_));
      with_job(shared.pair, [&](const AttentionJob& job) { kernels_.block(job, task); });
    });
  }

  const AttentionJob& job_;
  const ForwardKernels& kernels_;
  const std::vector<EntryWork> entries_;
  std::int64_t most_packed_bytes_ = 0;
  std::int64_t scratch_bytes_;
};

}  // namespace

void run_forward(const AttentionJob& job, const CpuKernels& kernels, ThreadPool& pool) {
  std::vector<EntryWork> entries = entries_of(job, kernels.forward);
  if (entries.empty()) return;
  const MaskClasses classes(job, kernels.forward.block_q, pool);
  AttentionJob classified = job;
  classified.mask_tiles = classes.tiles();
  ForwardRun(classified, kernels.forward, std::move(entries)).run(pool);
}

}  // namespace flashattn::cpu
