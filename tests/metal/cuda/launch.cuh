// From a row of plan.inc and a problem to the launch of its kernel.
#pragma once

#include "binding.cuh"

namespace check {

inline unsigned threadgroups(const Entry& entry, const Problem& p) {
  if (entry.sums()) return static_cast<unsigned>(blocks_of(p.query_heads, entry.block_rows));
  if (entry.kind == Kind::kMaskGradient) {
    return static_cast<unsigned>(blocks_of(p.seqlen_q, entry.block_rows) *
                                 blocks_of(p.seqlen_k, entry.block_columns) * p.batch);
  }
  if (entry.splits()) {
    const int simdgroups = entry.threads / static_cast<int>(abi::kSimdWidth);
    return static_cast<unsigned>(blocks_of(p.seqlen_k, kChunkKeys) * p.batch * p.kv_heads *
                                 blocks_of(p.group(), simdgroups));
  }
  const int groups = blocks_of(entry.key_side() ? p.seqlen_k : p.seqlen_q, entry.block_rows) *
                     (entry.key_side() ? p.kv_heads : p.query_heads) * p.batch;
  return static_cast<unsigned>(groups);
}

inline const metal_cuda::KernelEntry& find_kernel(const char* kernel, const char* unit) {
  const auto found = metal_cuda::registry().find({kernel, unit});
  if (found == metal_cuda::registry().end()) {
    std::fprintf(stderr, "no kernel %s in %s\n", kernel, unit);
    std::exit(2);
  }
  return found->second;
}

// Runs the entry's kernel, and what puts its chunks together. False: the kernel says that its
// results are void.
inline bool launch(const Entry& entry, const Problem& p, Binding& binding) {
  binding.launch(find_kernel(entry.kernel, entry.unit), threadgroups(entry, p),
                 static_cast<unsigned>(entry.threads));
  if (entry.splits()) {
    binding.launch(find_kernel(entry.merge, "base_merge_chunks"),
                   static_cast<unsigned>(p.batch * p.query_heads), 8 * abi::kSimdWidth);
  }
  if (binding.status() == abi::kStatusGood) return true;
  std::printf("FAIL %s %s: status %u\n", entry.kernel, entry.unit, binding.status());
  return false;
}

// One result of a kernel, the slot that it is in, and how it is stored.
struct Output {
  const char* name;
  unsigned slot;
  const Expected* expected;
  Storage storage;
};

inline std::vector<Output> outputs(const Entry& e, const Reference& r) {
  switch (e.kind) {
    case Kind::kForward:
      return {{"out", abi::kBufferOut, &r.out, e.storage},
              {"lse", abi::kBufferLse, &r.lse, Storage::kFloat32}};
    case Kind::kDelta:
      return {{"delta", abi::kBufferDelta, &r.delta, Storage::kFloat32}};
    case Kind::kBackwardDq:
      if (!e.has(abi::kConstantSlopeGradient)) return {{"dq", abi::kBufferDq, &r.dq, e.storage}};
      return {{"dq", abi::kBufferDq, &r.dq, e.storage},
              {"slopes", abi::kBufferSlopeRows, &r.slope_rows, Storage::kFloat32}};
    case Kind::kBackwardDv:
      return {{"dv", abi::kBufferDv, &r.dv, e.storage}};
    case Kind::kBackwardDk:
      return {{"dk", abi::kBufferDk, &r.dk, e.storage}};
    case Kind::kBackwardDkv:
      return {{"dk", abi::kBufferDk, &r.dk, e.storage}, {"dv", abi::kBufferDv, &r.dv, e.storage}};
    case Kind::kMaskGradient:
      return {{"dmask", abi::kBufferDmask, &r.dmask, Storage::kFloat32}};
    case Kind::kSlopeGradient:
      return {{"slopes", abi::kBufferDalibiSlopes, &r.slopes, Storage::kFloat32}};
    case Kind::kSinkGradient:
      return {{"sinks", abi::kBufferDsinks, &r.sinks, Storage::kFloat32}};
  }
  return {};
}

}  // namespace check
