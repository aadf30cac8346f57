// attention_kvcache: check everything, append, attend. Nothing is written before the last check,
// the choice of the backend, has passed.
#include "flashattn/kv_cache.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "core/kv_append.h"
#include "core/make_visibility.h"
#include "core/pending.h"
#include "core/per_batch.h"
#include "core/problem_layout.h"
#include "flashattn/backend.h"
#include "flashattn/problem.h"

namespace flashattn {

namespace {

constexpr const char* kFunction = "attention_kvcache";
constexpr std::size_t kMostKept = 4096;  // entries of a call whose lists are kept

// Rows that the cache holds for an entry.
std::int64_t capacity_of(const Checks& check, const AttentionInputs& in) {
  check.rank({"query", in.query}, 4);
  check.rank({"k_cache", in.key}, 4);
  check.rank({"v_cache", in.value}, 4);
  if (!in.block_table) return in.key.shape[1];
  check.rank({"block_table", in.block_table}, 2);
  return in.block_table.shape[1] * in.key.shape[1];
}

// The lengths under the names that this function gives them; `appended` rows must still fit.
void check_lengths(const Checks& check, const AttentionInputs& in, std::int64_t appended) {
  AttentionProblem batch;
  batch.batch = in.query.shape[0];
  const std::int64_t capacity = capacity_of(check, in);
  if (!in.kv_lengths) check.fail_value("cache_seqlens", "not given", "be given");
  if (appended > capacity) {
    check.fail_value("k.seqlen", std::to_string(appended),
                     "be at most the rows of the cache (" + std::to_string(capacity) + ")");
  }
  check_per_batch(check, {"cache_seqlens", in.kv_lengths}, batch, 0, capacity - appended);
  if (in.kv_batch_index) {
    check_per_batch(check, {"cache_batch_idx", in.kv_batch_index}, batch, 0, in.key.shape[0] - 1);
  }
  if (!in.kv_starts) return;
  check_per_batch(check, {"leftpad", in.kv_starts}, batch, 0, capacity);
  for (std::int64_t b = 0; b < batch.batch; ++b) {
    check.between("leftpad[" + std::to_string(b) + "]", read_integer(in.kv_starts, b), 0,
                  read_integer(in.kv_lengths, b));
  }
}

// k or v: what is appended to the cache.
void check_new_rows(const Checks& check, const NamedView& rows, const NamedView& cache,
                    const AttentionInputs& in, std::int64_t appended) {
  const std::int64_t heads = cache.view.shape[2];
  const std::int64_t dim = cache.view.shape[3];
  if (cache.view.device != DeviceKind::kCpu || rows.view.device != DeviceKind::kCpu) {
    check.fail_unsupported(rows.name, "on metal",
                           "be absent, or in host memory like the caches: rows are appended by "
                           "the CPU");
  }
  check.dtype_equal(rows, std::string(cache.name) + ".dtype", cache.view.dtype);
  check.shape(rows, {in.query.shape[0], appended, heads, dim}, 4);
  check.memory(rows, DeviceKind::kCpu);
  check.writable(cache, DeviceKind::kCpu);
  check.distinct(cache, rows);
  check.distinct(cache, {"query", in.query});
}

void find_places(const AttentionInputs& in, std::vector<AppendPlace>& places) {
  places.assign(static_cast<std::size_t>(in.query.shape[0]), {});
  for (std::int64_t b = 0; b < in.query.shape[0]; ++b) {
    AppendPlace& place = places[static_cast<std::size_t>(b)];
    place.first.batch = in.kv_batch_index ? read_integer(in.kv_batch_index, b) : b;
    place.first.row = read_integer(in.kv_lengths, b);
    place.position = place.first.row - (in.kv_starts ? read_integer(in.kv_starts, b) : 0);
    // int64 and dense since PerBatchValues.
    if (in.block_table) {
      place.pages =
          static_cast<const std::int64_t*>(in.block_table.data) + b * in.block_table.shape[1];
    }
  }
}

// No two entries append to one place: the result would depend on their order.
void check_own_places(const Checks& check, const std::vector<AppendPlace>& places,
                      std::int64_t appended, std::int64_t page_size,
                      std::vector<std::int64_t>& written) {
  written.clear();
  const bool paged = page_size != 0;
  for (const AppendPlace& place : places) {
    if (!paged) {
      written.push_back(place.first.batch);
      continue;
    }
    const std::int64_t end = place.first.row + appended;
    for (std::int64_t page = place.first.row / page_size; page * page_size < end; ++page) {
      written.push_back(place.pages[page]);
    }
  }
  std::sort(written.begin(), written.end());
  const auto twice = std::adjacent_find(written.begin(), written.end());
  if (twice == written.end()) return;
  check.fail_value(paged ? "block_table" : "cache_batch_idx", std::to_string(*twice) + " twice",
                   paged ? "give each entry pages of its own to append to"
                         : "give each entry a place of its own to append to");
}

void check_rotary(const Checks& check, const Rotary& rotary, const AttentionInputs& in,
                  std::int64_t positions) {
  const NamedView cos{"rotary_cos", rotary.cos};
  const NamedView sin{"rotary_sin", rotary.sin};
  check.rank(cos, 2);
  check.shape(sin, rotary.cos.shape, 2);
  for (const NamedView& table : {cos, sin}) {
    if (!is_floating(table.view.dtype)) {
      check.fail_type(std::string(table.name) + ".dtype", std::string(dtype_name(table.view.dtype)),
                      "be a floating-point type");
    }
    check.memory(table, DeviceKind::kCpu);
  }
  check.between("rotary_cos.pairs", rotary.cos.shape[1], 0, in.query.shape[3] / 2);
  if (rotary.cos.shape[0] < positions) {
    check.fail_value("rotary_cos.positions", std::to_string(rotary.cos.shape[0]),
                     "be at least " + std::to_string(positions) + ", the last position + 1");
  }
}

// What is known once everything is checked.
struct CheckedCall {
  AttentionProblem problem;
  std::vector<std::int64_t> lengths;  // [batch], what is appended included
  std::vector<AppendPlace> places;    // [batch]
  std::vector<std::int64_t> written;  // batch indices or pages that are appended to
  bool advances = false;              // query rows are turned by positions of their own
};

// The lists of this thread's last call, so that one like it allocates nothing.
CheckedCall& spare_call() {
  thread_local CheckedCall of_this_thread;
  return of_this_thread;
}

CheckedCall check_call(const KvCacheTensors& tensors, const AttentionOptions& options) {
  const Checks check(kFunction, Pass::kForward);
  const AttentionInputs& in = tensors.call.inputs;
  const std::int64_t appended = tensors.new_key ? tensors.new_key.shape[1] : 0;
  if (static_cast<bool>(tensors.new_key) != static_cast<bool>(tensors.new_value)) {
    check.fail_value(tensors.new_key ? "v" : "k", "not given", "come with the other");
  }
  if (tensors.new_key) check.rank({"k", tensors.new_key}, 4);
  check_lengths(check, in, appended);

  CheckedCall call = std::move(spare_call());
  call.lengths.clear();
  for (std::int64_t b = 0; b < in.query.shape[0]; ++b) {
    call.lengths.push_back(read_integer(in.kv_lengths, b) + appended);
  }
  ForwardTensors grown = tensors.call;
  grown.inputs.kv_lengths = contiguous_view(call.lengths.data(), DType::kInt64, in.query.shape[0]);
  call.problem = make_problem(kFunction, grown, options);
  find_places(in, call.places);
  call.advances = options.causal != Causal::kNone || options.window != Window{};
  if (tensors.new_key) {
    const NamedView k_cache{"k_cache", in.key};
    const NamedView v_cache{"v_cache", in.value};
    check_new_rows(check, {"k", tensors.new_key}, k_cache, in, appended);
    check_new_rows(check, {"v", tensors.new_value}, v_cache, in, appended);
    check.distinct(k_cache, v_cache);
    // Each cache is written before the other's rows are read.
    check.distinct(k_cache, {"v", tensors.new_value});
    check.distinct(v_cache, {"k", tensors.new_key});
    if (appended > 0) {
      check_own_places(check, call.places, appended, call.problem.page_size, call.written);
    }
  }
  if (tensors.rotary.sin && !tensors.rotary.cos) {
    check.fail_value("rotary_cos", "not given", "come with rotary_sin");
  }
  if (tensors.rotary.cos) {
    if (!tensors.new_key) {
      check.fail_value("rotary_cos", "given", "come with k and v to append");
    }
    std::int64_t positions = 0;
    const std::int64_t rows =
        std::max(appended, call.advances ? in.query.shape[1] : std::int64_t{1});
    for (const AppendPlace& place : call.places) {
      positions = std::max(positions, place.position + rows);
    }
    check_rotary(check, tensors.rotary, in, positions);
  }
  return call;
}

}  // namespace

void attention_kvcache(const KvCacheTensors& tensors, const AttentionOptions& options) {
  KvCacheTensors own = tensors;
  AttentionInputs& in = own.call.inputs;
  const PerBatchValues values(in);
  CheckedCall call = check_call(own, options);
  Backend& backend = choose_backend(call.problem, options.backend);

  if (own.new_key) {
    for (const TensorView& cache : {in.key, in.value}) settle_before_writing(cache);
    for (const TensorView& rows : {own.new_key, own.new_value}) settle_before_reading(rows);
    append_rows(in.key, own.new_key, call.places, call.problem.page_size, own.rotary);
    append_rows(in.value, own.new_value, call.places, call.problem.page_size, {});
  }
  std::vector<std::uint64_t> rotated;  // words, so that items of any dtype are aligned
  if (own.rotary.cos) {
    const auto& shape = in.query.shape;
    const std::int64_t items = shape[0] * shape[1] * shape[2] * shape[3];
    rotated.resize(static_cast<std::size_t>(items) * item_size(in.query.dtype) / 8 + 1);
    const TensorView to =
        contiguous_view(rotated.data(), in.query.dtype, shape[0], shape[1], shape[2], shape[3]);
    settle_before_reading(in.query);
    rotate_rows(to, in.query, call.places, call.advances, own.rotary);
    in.query = to;
  }
  in.kv_lengths = contiguous_view(call.lengths.data(), DType::kInt64, in.query.shape[0]);
  backend.forward(call.problem, own.call);
  if (own.rotary.cos) settle_pending();  // `rotated` goes
  if (call.places.size() < kMostKept) spare_call() = std::move(call);
}

}  // namespace flashattn
