// Which problems the kernels can do on a device, and the first reason why not; see schedule.h.
#include <algorithm>
#include <utility>

#include "metal/fixed_vector.h"
#include "metal/schedule.h"
#include "metal/tuning.h"

namespace flashattn::metal {

namespace {

constexpr std::int64_t kMaxThreadgroups = std::int64_t{1} << 32;  // a task number is 32 bits

std::int64_t blocks_of(std::int64_t length, int block) { return (length + block - 1) / block; }

std::int64_t most_threadgroups(const AttentionProblem& problem, const Geometry& geometry) {
  const int rows = std::min(geometry.block_rows, kDeltaRows);
  const auto& mask = problem.mask_shape;
  const std::int64_t mask_tiles =
      problem.mask_gradient ? mask[0] * mask[1] * blocks_of(mask[2], geometry.block_rows) *
                                  blocks_of(mask[3], geometry.block_columns)
                            : 0;
  return std::max(
      {problem.batch * problem.query_heads * blocks_of(problem.seqlen_q, rows),
       problem.batch * problem.kv_heads * blocks_of(problem.seqlen_k, geometry.block_rows),
       mask_tiles});
}

using NamedSizes = FixedVector<std::pair<const char*, double>, 6>;

// Bytes of each array that takes a buffer of its own, when it is contiguous.
NamedSizes buffer_sizes(const AttentionProblem& problem) {
  const auto size = [](std::initializer_list<std::int64_t> shape, DType dtype) {
    auto bytes = static_cast<double>(item_size(dtype));
    for (const std::int64_t n : shape) bytes *= static_cast<double>(n);
    return bytes;
  };
  AttentionProblem p = problem;
  if (p.packed) {
    p.batch = 1;
    p.seqlen_q = p.total_q;
  }
  std::int64_t keys = p.batch * p.seqlen_k;
  if (p.packed || p.page_size != 0) keys = p.total_k;
  NamedSizes sizes = {{"query", size({p.batch, p.seqlen_q, p.query_heads, p.head_dim}, p.dtype)},
                      {"key", size({keys, p.kv_heads, p.head_dim}, p.dtype)},
                      {"value", size({keys, p.kv_heads, p.value_dim}, p.dtype)},
                      {"out", size({p.batch, p.seqlen_q, p.query_heads, p.value_dim}, p.dtype)},
                      {"lse", size({p.batch, p.query_heads, p.seqlen_q}, DType::kFloat32)}};
  if (p.mask != MaskKind::kNone) {
    const auto& shape = p.mask_shape;
    const DType dtype = p.mask_gradient ? DType::kFloat32 : p.mask_dtype;
    sizes.push_back({"mask", size({shape[0], shape[1], shape[2], shape[3]}, dtype)});
  }
  return sizes;
}

std::string bytes_text(double bytes) { return std::to_string(static_cast<std::int64_t>(bytes)); }

}  // namespace

Support supports(const AttentionProblem& problem, const DeviceFacts& facts) {
  const auto no = [](std::string reason) {
    return Support{.ok = false, .reason = std::move(reason)};
  };
  if (facts.apple_family < 7) return no("simdgroup matrices need Apple GPU family 7 (M1) or later");
  if (problem.head_dim > kMaxTile || problem.value_dim > kMaxTile) {
    return no("head_dim and value_dim must be at most 256 on the metal backend");
  }
  if (problem.total_q >= kMaxLength || problem.total_k >= kMaxLength) {
    return no("packed sequences and pages must have less than 2^30 rows on the metal backend");
  }
  if (problem.seqlen_q >= kMaxLength || problem.seqlen_k >= kMaxLength) {
    return no("sequences must be shorter than 2^30 on the metal backend");
  }
  const Geometry geometry = choose_geometry(problem, facts);
  if (const std::string reason = misfit(geometry, problem.pass, facts); !reason.empty()) {
    return no(reason);
  }
  if (most_threadgroups(problem, geometry) >= kMaxThreadgroups) {
    return no("the problem has more than 2^32 blocks of rows");
  }
  const auto most = static_cast<double>(facts.max_buffer_length);
  for (const auto& [name, bytes] : buffer_sizes(problem)) {
    if (most == 0.0 || bytes <= most) continue;  // 0: not known
    return no(std::string(name) + " takes " + bytes_text(bytes) + " bytes, a buffer of " +
              facts.name + " holds at most " + bytes_text(most));
  }
  return {.ok = true, .reason = {}};
}

}  // namespace flashattn::metal
