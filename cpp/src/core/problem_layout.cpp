// Sizes and places of a call's rows; see problem_layout.h.
#include "core/problem_layout.h"

#include <algorithm>

#include "core/make_visibility.h"
#include "flashattn/error.h"

namespace flashattn {

namespace {

constexpr std::int64_t kMaxHeadDim = 512;

std::string element_name(const NamedView& arg, std::int64_t b) {
  return std::string(arg.name) + "[" + std::to_string(b) + "]";
}

void check_integers(const Checks& check, const NamedView& arg) {
  const TensorView& view = arg.view;
  if (view.dtype != DType::kInt32 && view.dtype != DType::kInt64) {
    check.fail_type(std::string(arg.name) + ".dtype", std::string(dtype_name(view.dtype)),
                    "be int32 or int64");
  }
  if (view.device != DeviceKind::kCpu) {
    check.fail_value(std::string(arg.name) + ".device", "metal",
                     "be cpu, also where the other arrays are not");
  }
  check.memory(arg, DeviceKind::kCpu);
}

// Starts at 0, rises, and ends within `total` rows. Returns the longest sequence.
std::int64_t read_cu_seqlens(const Checks& check, const NamedView& arg, std::int64_t total) {
  const TensorView& view = arg.view;
  check_integers(check, arg);
  if (view.rank != 1 || view.shape[0] < 1) {
    check.fail_value(std::string(arg.name) + ".shape", shape_text(view), "be (batch + 1,)");
  }
  check.between(element_name(arg, 0), read_integer(view, 0), 0, 0);
  std::int64_t longest = 0;
  for (std::int64_t b = 1; b < view.shape[0]; ++b) {
    const std::int64_t begin = read_integer(view, b - 1);
    check.between(element_name(arg, b), read_integer(view, b), begin, total);
    longest = std::max(longest, read_integer(view, b) - begin);
  }
  return longest;
}

// The sequences of a packed call; `key_rows` bounds the last number of cu_seqlens_k.
void read_sequences(const Checks& check, const AttentionInputs& in, std::int64_t key_rows,
                    AttentionProblem& problem) {
  const NamedView rows{"cu_seqlens_q", in.cu_seqlens_q};
  const NamedView keys{"cu_seqlens_k", in.cu_seqlens_k};
  for (const NamedView& arg : {rows, keys}) {
    if (!arg.view) check.fail_value(arg.name, "not given", "come with the other cu_seqlens");
  }
  problem.packed = true;
  problem.total_q = in.query.shape[0];
  if (problem.page_size == 0) problem.total_k = in.key.shape[0];
  problem.seqlen_q = read_cu_seqlens(check, rows, problem.total_q);
  problem.seqlen_k = read_cu_seqlens(check, keys, key_rows);
  check.equal("cu_seqlens_k.length", keys.view.shape[0], "cu_seqlens_q.length", rows.view.shape[0]);
  problem.batch = rows.view.shape[0] - 1;
  // Per sequence it would have to be ragged itself.
  if (in.mask) {
    check.fail_unsupported("mask", "given",
                           "be absent for packed sequences, which have no common (seqlen_q, "
                           "seqlen_k): call `attention` per sequence, or use causal, window and "
                           "kv_lengths");
  }
}

// Pages hold as many rows for every entry as a row of the table has numbers.
std::int64_t read_table_shape(const Checks& check, const AttentionInputs& in,
                              AttentionProblem& problem) {
  const NamedView table{"block_table", in.block_table};
  check_integers(check, table);
  check.rank(table, 2);
  problem.page_size = in.key.shape[1];
  if (problem.page_size < 1) {
    check.fail_value(std::string(check.key()) + ".page_size", "0", "be at least 1");
  }
  problem.total_k = in.key.shape[0] * problem.page_size;
  return table.view.shape[1] * problem.page_size;
}

// Sizes of heads and rows: what the three arrays must have in common.
void check_dimensions(const Checks& check, const AttentionInputs& in, AttentionProblem& problem) {
  const std::size_t q_heads = in.query.rank == 4 ? 2 : 1;
  const std::size_t k_heads = in.key.rank == 4 ? 2 : 1;
  const auto& q = in.query.shape;
  const auto& k = in.key.shape;
  const auto& v = in.value.shape;
  const std::string key = check.key();
  const std::string value = check.value();
  check.equal(key + ".head_dim", k[k_heads + 1], "query.head_dim", q[q_heads + 1]);
  const char* const rows = in.block_table ? ".page_size" : ".seqlen";
  check.equal(value + rows, v[k_heads - 1], key + rows, k[k_heads - 1]);
  check.equal(value + ".heads", v[k_heads], key + ".heads", k[k_heads]);
  check.between("query.head_dim", q[q_heads + 1], 1, kMaxHeadDim);
  check.between(value + ".value_dim", v[k_heads + 1], 1, kMaxHeadDim);
  if (k[k_heads] < 1) check.fail_value(key + ".heads", std::to_string(k[k_heads]), "be at least 1");
  if (q[q_heads] < 1 || q[q_heads] % k[k_heads] != 0) {
    check.fail_value("query.heads", std::to_string(q[q_heads]),
                     "be a multiple of " + key + ".heads (" + std::to_string(k[k_heads]) + ")");
  }
  problem.query_heads = q[q_heads];
  problem.head_dim = q[q_heads + 1];
  problem.kv_heads = k[k_heads];
  problem.value_dim = v[k_heads + 1];
}

// Keys that entry b owns, before any length or start.
std::int64_t keys_of_entry(const AttentionProblem& problem, const AttentionInputs& in,
                           std::int64_t b) {
  if (!problem.packed) return problem.seqlen_k;
  return read_integer(in.cu_seqlens_k, b + 1) - read_integer(in.cu_seqlens_k, b);
}

// Values of one per-batch array, each between 0 and `most(b)`.
template <typename Most>
void check_rows(const Checks& check, const NamedView& arg, const AttentionProblem& problem,
                const Most& most) {
  check_integers(check, arg);
  check.shape(arg, {problem.batch}, 1);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    check.between(element_name(arg, b), read_integer(arg.view, b), 0, most(b));
  }
}

// The pages that hold rows [start, end) of each entry exist.
template <typename Rows>
void check_pages(const Checks& check, const AttentionInputs& in, const AttentionProblem& problem,
                 const Rows& rows) {
  const NamedView table{"block_table", in.block_table};
  check.shape(table, {problem.batch, table.view.shape[1]}, 2);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const auto [start, end] = rows(b);
    for (std::int64_t page = start / problem.page_size; page * problem.page_size < end; ++page) {
      check.between(element_name(table, b) + "[" + std::to_string(page) + "]",
                    read_integer(table.view, b, page), 0, in.key.shape[0] - 1);
    }
  }
}

}  // namespace

bool is_floating(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat64;
}

void read_shapes(const Checks& check, const AttentionInputs& in, AttentionProblem& problem) {
  const NamedView query{"query", in.query};
  const NamedView key{check.key(), in.key};
  const NamedView value{check.value(), in.value};
  const bool packed = in.cu_seqlens_q || in.cu_seqlens_k;
  check.rank(query, packed ? 3 : 4);
  for (const NamedView& arg : {key, value}) check.rank(arg, packed && !in.block_table ? 3 : 4);

  problem.dtype = in.query.dtype;
  if (problem.dtype == DType::kFloat64 || !is_floating(problem.dtype)) {
    check.fail_type("query.dtype", std::string(dtype_name(problem.dtype)),
                    "be float32, float16 or bfloat16");
  }
  check.dtype_equal(key, "query.dtype", problem.dtype);
  check.dtype_equal(value, "query.dtype", problem.dtype);
  problem.device = in.query.device;
  for (const NamedView& arg : {query, key, value}) check.memory(arg, problem.device);

  const auto& q = in.query.shape;
  const auto& k = in.key.shape;
  const auto& v = in.value.shape;
  if (in.block_table) {
    check.equal(value.name + std::string(".pages"), v[0], key.name + std::string(".pages"), k[0]);
  } else if (!packed) {
    const std::string key_batch = key.name + std::string(".batch");
    if (!in.kv_batch_index) check.equal(key_batch, k[0], "query.batch", q[0]);
    check.equal(value.name + std::string(".batch"), v[0],
                in.kv_batch_index ? key_batch : "query.batch", in.kv_batch_index ? k[0] : q[0]);
  }
  check_dimensions(check, in, problem);
  const std::int64_t table_rows = in.block_table ? read_table_shape(check, in, problem) : 0;
  if (packed) {
    // Rows of different entries lie in different pages, so a sum of lengths is bounded by nothing.
    constexpr std::int64_t kAny = std::int64_t{1} << 59;
    read_sequences(check, in, in.block_table ? kAny : k[0], problem);
    if (in.block_table) check.between("cu_seqlens_k", problem.seqlen_k, 0, table_rows);
    return;
  }
  problem.batch = q[0];
  problem.seqlen_q = q[1];
  problem.seqlen_k = in.block_table ? table_rows : k[1];
}

void check_per_batch(const Checks& check, const NamedView& arg, const AttentionProblem& problem,
                     std::int64_t low, std::int64_t high) {
  check_integers(check, arg);
  check.shape(arg, {problem.batch}, 1);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    check.between(element_name(arg, b), read_integer(arg.view, b), low, high);
  }
}

void read_places(const Checks& check, const AttentionInputs& in, AttentionProblem& problem) {
  const auto owned = [&](std::int64_t b) { return keys_of_entry(problem, in, b); };
  if (in.kv_lengths) {
    check_rows(check, {"kv_lengths", in.kv_lengths}, problem, owned);
    problem.kv_lengths = true;
  }
  const auto end = [&](std::int64_t b) {
    return in.kv_lengths ? read_integer(in.kv_lengths, b) : owned(b);
  };
  if (in.kv_starts) {
    check_rows(check, {"kv_starts", in.kv_starts}, problem, end);
    problem.kv_starts = true;
  }
  if (in.kv_batch_index) {
    const bool misplaced = in.block_table || problem.packed;
    if (misplaced) {
      check.fail_value("kv_batch_index", "given", "not come with block_table or packed sequences");
    }
    check_rows(check, {"kv_batch_index", in.kv_batch_index}, problem,
               [&](std::int64_t) { return in.key.shape[0] - 1; });
    problem.kv_batch_index = true;
  }
  if (in.block_table) {
    struct Rows {
      std::int64_t start;
      std::int64_t end;
    };
    check_pages(check, in, problem, [&](std::int64_t b) {
      return Rows{in.kv_starts ? read_integer(in.kv_starts, b) : 0, end(b)};
    });
  }
}

}  // namespace flashattn
