// The order of work of a backward call; see backward_schedule.h.
#include "cpu/backward_schedule.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

#include "cpu/backward_mask_schedule.h"
#include "cpu/head_sums.h"
#include "cpu/mask_classes.h"
#include "cpu/scratch.h"
#include "cpu/weight_sums.h"

namespace flashattn::cpu {
namespace {

// Blocks of a subset when there are enough of them, and the most subsets. More subsets feed more
// threads and shorten the float32 sums; each one costs sums of its own, which are added in the end:
// at (1, 8, 2048, 64) on one thread, four subsets ran 2 % (float32) and 6 % (bf16) faster than
// eight.
constexpr std::int64_t kBlocksPerSubset = 8;
constexpr std::int64_t kMaxSubsets = 8;
// What the sums of one pair may take before there are fewer of them, down to two: memory stays in
// proportion to the keys, and below 100 MB at 16384 keys of 128 + 128 dimensions.
constexpr std::int64_t kSumsBytes = std::int64_t{48} << 20;

// Keys per index of the packing and summing loops.
constexpr std::int64_t kKeyChunk = 256;

// What the buffers of the (batch, kv head) pairs that are worked on together should take:
// kCacheBytes stays in a last-level cache; up to kWaveBytes goes into having kTasksPerThread tasks
// for each thread, so that threads idle less at the end of a wave; more than that only to feed
// every thread.
constexpr std::int64_t kCacheBytes = std::int64_t{8} << 20;
constexpr std::int64_t kWaveBytes = std::int64_t{64} << 20;
constexpr std::int64_t kTasksPerThread = 4;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Interval whole_blocks(Interval keys) {
  return {keys.begin / kBackwardBlockK * kBackwardBlockK,
          ceil_div(keys.end, kBackwardBlockK) * kBackwardBlockK};
}

// Whether a gradient is asked for that takes the scores; those of the sinks take lse and delta.
bool wants_scores(const AttentionJob& job) {
  return job.dq.data != nullptr || job.dk.data != nullptr || job.dv.data != nullptr ||
         job.dslopes.data != nullptr;
}

// What all tasks of a call share.
struct Call {
  const AttentionJob& job;
  const BackwardKernels& kernels;
  HeadPartials partials;
};

// One (entry, kv head) at a time on each thread, everything in that thread's scratch while it is
// warm. `entries` are batch indices.
void run_whole_heads(const Call& call, ThreadPool& pool, const std::vector<std::int64_t>& entries) {
  const AttentionJob& job = call.job;
  const BackwardKernels& kernels = call.kernels;
  const std::int64_t heads = std::ssize(entries) * job.kv_heads;
  const std::int64_t threads = pool.threads();
  const auto entry_of = [&](std::int64_t index) {
    return entries[static_cast<std::size_t>(index / job.kv_heads)];
  };
  pool.parallel_for(heads, [&](std::int64_t index) {
    if (is_ending(job)) return;
    const std::int64_t batch = entry_of(index);
    const AttentionJob own = job_of_entry(job, batch);
    const BackwardSizes sizes = kernels.sizes(own);
    std::byte* memory =
        thread_scratch(static_cast<std::size_t>(sizes.packed + sizes.sums + sizes.scratch));
    const std::int64_t kv_head = index % job.kv_heads;
    const std::int64_t next = std::min(index + threads, heads - 1);
    const QueryBlocks blocks = query_subset(job.visibility[batch], 0, 1);
    const Interval keys = keys_of_blocks(job.visibility[batch], blocks);
    std::byte* sums = memory + sizes.packed;
    if (wants_scores(job)) kernels.pack_keys(own, batch, kv_head, whole_blocks(keys), memory);
    kernels.accumulate(own, {.batch = batch,
                             .kv_head = kv_head,
                             .blocks = blocks,
                             .packed = memory,
                             .sums = sums,
                             .scratch = memory + sizes.packed + sizes.sums,
                             .partials = call.partials,
                             .whole_head = true,
                             .next_batch = entry_of(next),
                             .next_kv_head = next % job.kv_heads});
    kernels.write_key_gradients(
        own,
        {.batch = batch, .kv_head = kv_head, .first = sums, .stride_bytes = sizes.sums, .count = 1},
        {0, own.seqlen_k});
  });
}

// Waves of heads. In each: pack the keys and values, run the subsets, add their sums. Every head
// has the room and the number of subsets and key chunks that the largest needs; what is past a
// head's own is skipped.
class SplitRun {
 public:
  SplitRun(const Call& call, ThreadPool& pool, const std::vector<std::int64_t>& entries)
      : job_(call.job),
        kernels_(call.kernels),
        partials_(call.partials),
        pool_(pool),
        entries_(entries) {
    for (const std::int64_t batch : entries) {
      const AttentionJob own = job_of_entry(job_, batch);
      const BackwardSizes sizes = kernels_.sizes(own);
      const std::int64_t subsets = query_subsets(own);
      subsets_ = std::max(subsets_, subsets);
      chunks_ = std::max(chunks_, ceil_div(own.seqlen_k, kKeyChunk));
      head_bytes_ = std::max(head_bytes_, sizes.packed + subsets * sizes.sums);
    }
  }

  void run() {
    const std::int64_t heads = std::ssize(entries_) * job_.kv_heads;
    const std::int64_t per_wave = heads_per_wave();
    const Workspace workspace(static_cast<std::size_t>(per_wave * head_bytes_));
    for (std::int64_t first = 0; first < heads; first += per_wave) {
      const std::int64_t count = std::min(per_wave, heads - first);
      pool_.parallel_for(count * chunks_, [&](std::int64_t index) {
        const Head head = head_at(first + index / chunks_, workspace, index / chunks_);
        pack(head, index % chunks_);
      });
      // Descending subsets: under a causal mask the last of an interleaved division is the longest.
      pool_.parallel_for(count * subsets_, [&](std::int64_t index) {
        const Head head = head_at(first + index % count, workspace, index % count);
        accumulate(head, subsets_ - 1 - index / count);
      });
      pool_.parallel_for(count * chunks_, [&](std::int64_t index) {
        const Head head = head_at(first + index / chunks_, workspace, index / chunks_);
        write(head, index % chunks_);
      });
    }
  }

 private:
  // One (entry, kv head) with its own sizes and its buffers.
  struct Head {
    AttentionJob job;
    std::int64_t batch = 0;
    std::int64_t kv_head = 0;
    BackwardSizes sizes{};
    std::int64_t subsets = 1;
    std::byte* memory = nullptr;
  };

  Head head_at(std::int64_t number, const Workspace& workspace, std::int64_t slot) const {
    const std::int64_t batch = entries_[static_cast<std::size_t>(number / job_.kv_heads)];
    Head head{.job = job_of_entry(job_, batch),
              .batch = batch,
              .kv_head = number % job_.kv_heads,
              .memory = workspace.data() + slot * head_bytes_};
    head.sizes = kernels_.sizes(head.job);
    head.subsets = query_subsets(head.job);
    return head;
  }

  std::int64_t heads_per_wave() const {
    const std::int64_t head_bytes = std::max<std::int64_t>(head_bytes_, 1);
    const std::int64_t threads = pool_.threads();
    const std::int64_t feeding = ceil_div(threads, subsets_);
    const std::int64_t balancing = threads == 1 ? 1 : ceil_div(kTasksPerThread * threads, subsets_);
    const std::int64_t wanted =
        std::max({kCacheBytes / head_bytes, feeding, std::min(balancing, kWaveBytes / head_bytes)});
    return std::min(wanted, std::ssize(entries_) * job_.kv_heads);
  }

  static Interval chunk_keys(std::int64_t chunk, std::int64_t limit) {
    return {chunk * kKeyChunk, std::min((chunk + 1) * kKeyChunk, limit)};
  }

  void pack(const Head& head, std::int64_t chunk) const {
    if (is_ending(job_)) return;
    const Interval all = whole_blocks(keys_of_blocks(
        job_.visibility[head.batch],
        {.first = 0, .step = 1, .end = ceil_div(head.job.seqlen_q, kBackwardBlockQ)}));
    Interval keys = chunk_keys(chunk, all.end);
    keys.begin = std::max(keys.begin, all.begin);
    if (keys.begin >= keys.end || !wants_scores(job_)) return;
    kernels_.pack_keys(head.job, head.batch, head.kv_head, keys, head.memory);
  }

  void accumulate(const Head& head, std::int64_t index) const {
    if (index >= head.subsets || is_ending(job_)) return;
    const auto scratch = static_cast<std::size_t>(head.sizes.scratch);
    kernels_.accumulate(head.job,
                        {.batch = head.batch,
                         .kv_head = head.kv_head,
                         .blocks = query_subset(job_.visibility[head.batch], index, head.subsets),
                         .packed = head.memory,
                         .sums = head.memory + head.sizes.packed + index * head.sizes.sums,
                         .scratch = thread_scratch(scratch),
                         .partials = partials_,
                         .next_batch = head.batch,
                         .next_kv_head = head.kv_head});
  }

  void write(const Head& head, std::int64_t chunk) const {
    if (is_ending(job_)) return;
    const Interval keys = chunk_keys(chunk, head.job.seqlen_k);
    if (keys.begin >= keys.end) return;
    kernels_.write_key_gradients(head.job,
                                 {.batch = head.batch,
                                  .kv_head = head.kv_head,
                                  .first = head.memory + head.sizes.packed,
                                  .stride_bytes = head.sizes.sums,
                                  .count = head.subsets},
                                 keys);
  }

  const AttentionJob& job_;
  const BackwardKernels& kernels_;
  const HeadPartials partials_;
  ThreadPool& pool_;
  const std::vector<std::int64_t>& entries_;
  std::int64_t subsets_ = 1;     // the most
  std::int64_t chunks_ = 0;      // likewise
  std::int64_t head_bytes_ = 0;  // likewise
};

}  // namespace

std::int64_t query_subsets(const AttentionJob& job) {
  const std::int64_t blocks = ceil_div(job.seqlen_q, kBackwardBlockQ);
  // A subset takes its blocks of every head that shares the keys, so a group counts as often.
  const std::int64_t enough = std::min(blocks, blocks * job.heads_per_kv / kBlocksPerSubset);
  const std::int64_t sum_bytes = std::max<std::int64_t>(
      job.seqlen_k * (job.head_dim + job.value_dim) * std::int64_t{sizeof(float)}, 1);
  const std::int64_t affordable = std::max<std::int64_t>(kSumsBytes / sum_bytes, 2);
  return std::clamp<std::int64_t>(std::min(enough, affordable), 1, kMaxSubsets);
}

QueryBlocks query_subset(const Visibility& visibility, std::int64_t index, std::int64_t count) {
  const std::int64_t blocks = ceil_div(visibility.seqlen_q, kBackwardBlockQ);
  if (visibility.left < kUnlimited && visibility.right < kUnlimited) {
    return {.first = blocks * index / count, .step = 1, .end = blocks * (index + 1) / count};
  }
  return {.first = index, .step = count, .end = blocks};
}

Interval keys_of_blocks(const Visibility& visibility, const QueryBlocks& blocks) {
  if (blocks.first >= blocks.end) return {0, 0};
  const std::int64_t last =
      blocks.first + (blocks.end - 1 - blocks.first) / blocks.step * blocks.step;
  return visibility.keys_of_rows(blocks.first * kBackwardBlockQ,
                                 std::min((last + 1) * kBackwardBlockQ, visibility.seqlen_q));
}

namespace {

void run_blocks(const Call& call, ThreadPool& pool) {
  const AttentionJob& job = call.job;
  std::vector<std::int64_t> whole;
  std::vector<std::int64_t> split;
  for (std::int64_t b = 0; b < job.batch; ++b) {
    (query_subsets(job_of_entry(job, b)) == 1 ? whole : split).push_back(b);
  }
  if (!whole.empty()) run_whole_heads(call, pool, whole);
  if (!split.empty()) SplitRun(call, pool, split).run();
}

}  // namespace

void run_backward(const AttentionJob& call, const CpuKernels& kernels, ThreadPool& pool) {
  if (call.batch == 0 || call.kv_heads == 0) return;
  const MaskClasses classes(call, kBackwardBlockQ, pool);
  AttentionJob job = call;
  job.mask_tiles = classes.tiles();
  const WeightSums weight_sums(job, kernels.backward, pool);
  job.sum_log2 = weight_sums.log2();
  if (wants_scores(job) || job.dsinks.data != nullptr) {
    HeadSums head_sums(job);
    run_blocks({.job = job, .kernels = kernels.backward, .partials = head_sums.partials()}, pool);
    head_sums.write();
  }
  if (job.dmask.data != nullptr) run_mask_gradient(job, kernels.backward, pool);
}

}  // namespace flashattn::cpu
