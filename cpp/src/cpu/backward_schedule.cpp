// The order of work of a backward call; see backward_schedule.h.
#include "cpu/backward_schedule.h"

#include <algorithm>
#include <cstddef>

#include "cpu/scratch.h"

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

// One (batch, kv head) at a time on each thread, everything in that thread's scratch while it is
// warm.
void run_whole_heads(const AttentionJob& job, const BackwardKernels& kernels, ThreadPool& pool) {
  const BackwardSizes sizes = kernels.sizes(job);
  const std::int64_t heads = job.batch * job.kv_heads;
  const std::int64_t threads = pool.threads();
  pool.parallel_for(heads, [&](std::int64_t index) {
    std::byte* memory =
        thread_scratch(static_cast<std::size_t>(sizes.packed + sizes.sums + sizes.scratch));
    const std::int64_t batch = index / job.kv_heads;
    const std::int64_t kv_head = index % job.kv_heads;
    const std::int64_t next = std::min(index + threads, heads - 1);
    const QueryBlocks blocks = query_subset(job.visibility[batch], 0, 1);
    const Interval keys = keys_of_blocks(job.visibility[batch], blocks);
    std::byte* sums = memory + sizes.packed;
    kernels.pack_keys(job, batch, kv_head, whole_blocks(keys), memory);
    kernels.accumulate(job, {.batch = batch,
                             .kv_head = kv_head,
                             .blocks = blocks,
                             .packed = memory,
                             .sums = sums,
                             .scratch = memory + sizes.packed + sizes.sums,
                             .whole_head = true,
                             .next_batch = next / job.kv_heads,
                             .next_kv_head = next % job.kv_heads});
    kernels.write_key_gradients(
        job,
        {.batch = batch, .kv_head = kv_head, .first = sums, .stride_bytes = sizes.sums, .count = 1},
        {0, job.seqlen_k});
  });
}

// Waves of heads. In each: pack the keys and values, run the subsets, add their sums.
class SplitRun {
 public:
  SplitRun(const AttentionJob& job, const BackwardKernels& kernels, ThreadPool& pool)
      : job_(job),
        kernels_(kernels),
        pool_(pool),
        sizes_(kernels.sizes(job)),
        subsets_(query_subsets(job)),
        chunks_(ceil_div(job.seqlen_k, kKeyChunk)),
        head_bytes_(sizes_.packed + subsets_ * sizes_.sums) {}

  void run() {
    const std::int64_t heads = job_.batch * job_.kv_heads;
    const std::int64_t per_wave = heads_per_wave();
    const Workspace workspace(static_cast<std::size_t>(per_wave * head_bytes_));
    for (std::int64_t first = 0; first < heads; first += per_wave) {
      const std::int64_t count = std::min(per_wave, heads - first);
      pool_.parallel_for(count * chunks_, [&](std::int64_t index) {
        pack(first + index / chunks_, index % chunks_, slot(workspace, index / chunks_));
      });
      // Descending subsets: under a causal mask the last of an interleaved division is the longest.
      pool_.parallel_for(count * subsets_, [&](std::int64_t index) {
        accumulate(first + index % count, subsets_ - 1 - index / count,
                   slot(workspace, index % count));
      });
      pool_.parallel_for(count * chunks_, [&](std::int64_t index) {
        write(first + index / chunks_, index % chunks_, slot(workspace, index / chunks_));
      });
    }
  }

 private:
  std::int64_t heads_per_wave() const {
    const std::int64_t head_bytes = std::max<std::int64_t>(head_bytes_, 1);
    const std::int64_t threads = pool_.threads();
    const std::int64_t feeding = ceil_div(threads, subsets_);
    const std::int64_t balancing = threads == 1 ? 1 : ceil_div(kTasksPerThread * threads, subsets_);
    const std::int64_t wanted =
        std::max({kCacheBytes / head_bytes, feeding, std::min(balancing, kWaveBytes / head_bytes)});
    return std::min(wanted, job_.batch * job_.kv_heads);
  }

  std::byte* slot(const Workspace& workspace, std::int64_t index) const {
    return workspace.data() + index * head_bytes_;
  }

  Interval chunk_keys(std::int64_t chunk, std::int64_t limit) const {
    return {chunk * kKeyChunk, std::min((chunk + 1) * kKeyChunk, limit)};
  }

  void pack(std::int64_t head, std::int64_t chunk, std::byte* memory) const {
    const Interval all = whole_blocks(
        keys_of_blocks(job_.visibility[head / job_.kv_heads],
                       {.first = 0, .step = 1, .end = ceil_div(job_.seqlen_q, kBackwardBlockQ)}));
    Interval keys = chunk_keys(chunk, all.end);
    keys.begin = std::max(keys.begin, all.begin);
    if (keys.begin >= keys.end) return;
    kernels_.pack_keys(job_, head / job_.kv_heads, head % job_.kv_heads, keys, memory);
  }

  void accumulate(std::int64_t head, std::int64_t index, std::byte* memory) const {
    const std::int64_t batch = head / job_.kv_heads;
    kernels_.accumulate(job_, {.batch = batch,
                               .kv_head = head % job_.kv_heads,
                               .blocks = query_subset(job_.visibility[batch], index, subsets_),
                               .packed = memory,
                               .sums = memory + sizes_.packed + index * sizes_.sums,
                               .scratch = thread_scratch(static_cast<std::size_t>(sizes_.scratch)),
                               .next_batch = batch,
                               .next_kv_head = head % job_.kv_heads});
  }

  void write(std::int64_t head, std::int64_t chunk, const std::byte* memory) const {
    const std::int64_t batch = head / job_.kv_heads;
    kernels_.write_key_gradients(job_,
                                 {.batch = batch,
                                  .kv_head = head % job_.kv_heads,
                                  .first = memory + sizes_.packed,
                                  .stride_bytes = sizes_.sums,
                                  .count = subsets_},
                                 chunk_keys(chunk, job_.seqlen_k));
  }

  const AttentionJob& job_;
  const BackwardKernels& kernels_;
  ThreadPool& pool_;
  const BackwardSizes sizes_;
  const std::int64_t subsets_;
  const std::int64_t chunks_;
  const std::int64_t head_bytes_;
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

void run_backward(const AttentionJob& job, const CpuKernels& kernels, ThreadPool& pool) {
  if (job.batch == 0 || job.kv_heads == 0) return;
  if (query_subsets(job) == 1) {
    run_whole_heads(job, kernels.backward, pool);
  } else {
    SplitRun(job, kernels.backward, pool).run();
  }
}

}  // namespace flashattn::cpu
