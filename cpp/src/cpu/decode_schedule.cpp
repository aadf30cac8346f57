// Chunks of a batch entry cover only the keys that some row of it sees, so a short entry or a
// window costs in proportion to what it sees. Each chunk has its own partial result, which is
// merged in ascending order.
#include "cpu/decode_schedule.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/decode_table.h"
#include "cpu/scratch.h"

namespace flashattn::cpu {
namespace {

constexpr std::int64_t kMaxSeqlenQ = 16;
// Partial results grow with the rows that share a key: at this many they take an eighth of the
// float32 keys and values.
constexpr std::int64_t kMaxRowsPerKey = 128;
// Up to this many rows a key the lane kernel wastes most of its lanes, whatever the number of keys
// (decision 0008 has the measurements).
constexpr std::int64_t kFewRows = 8;
// With more rows the lane kernel is faster over few keys, where packing them costs little and
// dividing them among threads gains little: up to kFewKeys, in float32 with rows for at most
// kHalfFilledRows lanes up to kVeryFewKeys.
constexpr std::int64_t kHalfFilledRows = 32;
constexpr std::int64_t kVeryFewKeys = 128;
constexpr std::int64_t kFewKeys = 1024;

// Keys and values of a task of this size take longer to read than a helper takes to wake up.
constexpr std::int64_t kMinTaskBytes = std::int64_t{128} << 10;

std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

// The keys of one batch entry, and the place of its chunks and partial results among all.
struct EntryWork {
  std::int64_t batch = 0;
  Interval keys{};
  std::int64_t first_chunk = 0;  // in the call
  std::int64_t chunks = 0;
  std::int64_t first_float = 0;     // of its partial results
  std::int64_t partial_floats = 0;  // of one chunk

  Interval chunk(std::int64_t index) const {
    const std::int64_t begin = (keys.begin / kDecodeChunkKeys + index) * kDecodeChunkKeys;
    return {std::max(keys.begin, begin), std::min(keys.end, begin + kDecodeChunkKeys)};
  }
};

EntryWork work_of(const AttentionJob& job, std::int64_t batch) {
  EntryWork entry{.batch = batch};
  entry.keys = job.visibility[batch].keys_of_rows(0, entry_seqlen_q(job, batch));
  entry.partial_floats = decode_partial_floats(job_of_entry(job, batch));
  if (entry.keys.begin < entry.keys.end) {
    entry.chunks =
        divide_up(entry.keys.end, kDecodeChunkKeys) - entry.keys.begin / kDecodeChunkKeys;
  }
  return entry;
}

// The entries that are decode's.
std::vector<EntryWork> entries_of(const AttentionJob& job) {
  std::vector<EntryWork> entries;
  std::int64_t chunks = 0;
  std::int64_t floats = 0;
  for (std::int64_t b = 0; b < job.batch; ++b) {
    const std::int64_t rows = entry_seqlen_q(job, b);
    if (rows == 0 || !prefers_decode(job, b)) continue;
    EntryWork entry = work_of(job, b);
    entry.first_chunk = chunks;
    entry.first_float = floats;
    chunks += entry.chunks;
    floats += entry.chunks * entry.partial_floats;
    entries.push_back(entry);
  }
  return entries;
}

// Into how many groups the kv heads of a chunk are divided, to give every thread work. Heads are
// independent, so the number changes no result and may depend on the threads; one group reads
// memory best.
std::int64_t head_groups(const AttentionJob& job, std::int64_t chunks, int threads) {
  if (threads <= 1 || chunks == 0) return 1;
  const std::int64_t item = static_cast<std::int64_t>(item_size(job.dtype));
  const std::int64_t head_bytes = kDecodeChunkKeys * (job.head_dim + job.value_dim) * item;
  const std::int64_t heads_per_task =
      std::max<std::int64_t>(1, divide_up(kMinTaskBytes, head_bytes));
  const std::int64_t wanted = divide_up(4 * std::int64_t{threads}, chunks);
  return std::clamp<std::int64_t>(wanted, 1, divide_up(job.kv_heads, heads_per_task));
}

// Calls task(index) for [0, count) with `per_body` of them in one body, so that small tasks do not
// wake anyone.
template <class Task>
void grouped_for(ThreadPool& pool, std::int64_t count, std::int64_t per_body, const Task& task) {
  pool.parallel_for(divide_up(count, per_body), [&](std::int64_t body) {
    const std::int64_t end = std::min(count, (body + 1) * per_body);
    for (std::int64_t index = body * per_body; index < end; ++index) task(index);
  });
}

}  // namespace

bool prefers_decode(const AttentionJob& job, std::int64_t entry) {
  const std::int64_t seqlen_q = entry_seqlen_q(job, entry);
  const std::int64_t rows = seqlen_q * job.heads_per_kv;
  if (seqlen_q > kMaxSeqlenQ || rows > kMaxRowsPerKey) return false;
  if (rows <= kFewRows) return true;
  const Interval keys = job.visibility[entry].keys_of_rows(0, seqlen_q);
  const bool half_filled = job.dtype == DType::kFloat32 && rows <= kHalfFilledRows;
  return keys.end - keys.begin > (half_filled ? kVeryFewKeys : kFewKeys);
}

void run_decode(const AttentionJob& job, const CpuKernels& kernels, ThreadPool& pool) {
  const std::vector<EntryWork> entries = entries_of(job);
  if (entries.empty()) return;
  const EntryWork& last = entries.back();
  const std::int64_t chunks = last.first_chunk + last.chunks;
  const std::int64_t groups = head_groups(job, chunks, pool.threads());
  const std::int64_t heads_per_group = divide_up(job.kv_heads, groups);
  const std::int64_t floats = last.first_float + last.chunks * last.partial_floats;
  const Workspace workspace(static_cast<std::size_t>(floats) * sizeof(float));
  float* partials = reinterpret_cast<float*>(workspace.data());

  const std::int64_t item = static_cast<std::int64_t>(item_size(job.dtype));
  const std::int64_t row_bytes = (job.head_dim + job.value_dim) * item;
  std::int64_t keys = 0;
  for (const EntryWork& entry : entries) keys += entry.keys.end - entry.keys.begin;
  const std::int64_t tasks = chunks * groups;
  const std::int64_t task_bytes =
      tasks == 0 ? 1 : std::max<std::int64_t>(1, keys * job.kv_heads * row_bytes / tasks);
  grouped_for(pool, tasks, divide_up(kMinTaskBytes, task_bytes), [&](std::int64_t task) {
    if (is_ending(job)) return;
    const std::int64_t chunk = task / groups;
    const EntryWork& entry = *std::prev(std::upper_bound(
        entries.begin(), entries.end(), chunk, [](std::int64_t index, const EntryWork& candidate) {
          return index < candidate.first_chunk;
        }));
    const std::int64_t index = chunk - entry.first_chunk;
    const std::int64_t head = task % groups * heads_per_group;
    const AttentionJob own = job_of_entry(job, entry.batch);
    const auto scratch = static_cast<std::size_t>(decode_scratch_floats(own));
    kernels.decode.chunk(
        {.job = &own,
         .batch = entry.batch,
         .key_begin = entry.chunk(index).begin,
         .key_end = entry.chunk(index).end,
         .kv_head_begin = std::min(head, job.kv_heads),
         .kv_head_end = std::min(head + heads_per_group, job.kv_heads),
         .partial =
             decode_partial_at(own, partials + entry.first_float + index * entry.partial_floats),
         .scratch = reinterpret_cast<float*>(thread_scratch(scratch * sizeof(float)))});
  });

  // What a head's merge reads, and at least its output.
  const auto count = static_cast<std::int64_t>(entries.size());
  const std::int64_t merge_bytes =
      divide_up(floats, count * job.query_heads) * 4 + job.seqlen_q * job.value_dim * 4;
  grouped_for(pool, count * job.query_heads, divide_up(kMinTaskBytes, merge_bytes),
              [&](std::int64_t index) {
                if (is_ending(job)) return;
                const EntryWork& entry = entries[static_cast<std::size_t>(index / job.query_heads)];
                const AttentionJob own = job_of_entry(job, entry.batch);
                const auto scratch = static_cast<std::size_t>(decode_padded(job.value_dim));
                kernels.decode.merge(
                    {.job = &own,
                     .batch = entry.batch,
                     .head = index % job.query_heads,
                     .partials = partials + entry.first_float,
                     .chunks = entry.chunks,
                     .scratch = reinterpret_cast<float*>(thread_scratch(scratch * sizeof(float)))});
              });
}

}  // namespace flashattn::cpu
