// Packed sequences, pages and caches through the C++ API: what make_problem reads and refuses,
// where entries lie, and results that equal those of plain calls bit for bit.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/make_visibility.h"
#include "core/per_batch.h"
#include "flashattn/attention.h"
#include "flashattn/error.h"
#include "flashattn/kv_cache.h"
#include "flashattn/problem.h"
#include "tensors.h"

namespace {

using flashattn::AttentionInputs;
using flashattn::AttentionOptions;
using flashattn::AttentionProblem;
using flashattn::Causal;
using flashattn::contiguous_view;
using flashattn::DType;
using flashattn::Entry;
using flashattn::ForwardTensors;
using flashattn::TensorView;
using flashattn::testing::Array;

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kDim = 8;

// Rows [first, first + count) of a packed array as a batch of one.
TensorView rows_of(const TensorView& packed, std::int64_t first, std::int64_t count) {
  TensorView view = packed;
  view.rank = 4;
  view.shape = {1, count, packed.shape[1], packed.shape[2]};
  view.stride = {0, packed.stride[0], packed.stride[1], packed.stride[2]};
  view.data =
      static_cast<char*>(packed.data) +
      first * packed.stride[0] * static_cast<std::int64_t>(flashattn::item_size(packed.dtype));
  return view;
}

// Lengths (5, 0, 20) and (7, 3, 11), with two rows of slack on either side.
struct PackedCall {
  std::vector<std::int32_t> cu_q = {0, 5, 5, 25};
  std::vector<std::int32_t> cu_k = {0, 7, 10, 21};
  Array query{DType::kFloat32, {27, kHeads, kDim}};
  Array key{DType::kFloat32, {23, kKvHeads, kDim}};
  Array value{DType::kFloat32, {23, kKvHeads, kDim}};
  Array out{DType::kFloat32, {27, kHeads, kDim}};
  Array lse{DType::kFloat32, {kHeads, 27}};

  PackedCall() {
    query.fill_normal(1);
    key.fill_normal(2);
    value.fill_normal(3);
    out.fill(std::nanf(""));
    lse.fill(std::nanf(""));
  }

  ForwardTensors tensors() {
    ForwardTensors call{.inputs = {.query = query.view(), .key = key.view(), .value = value.view()},
                        .out = out.view(),
                        .lse = lse.view()};
    call.inputs.cu_seqlens_q = contiguous_view(cu_q.data(), DType::kInt32, cu_q.size());
    call.inputs.cu_seqlens_k = contiguous_view(cu_k.data(), DType::kInt32, cu_k.size());
    return call;
  }
};

template <typename Error>
void expect_refusal(const std::function<void(PackedCall&, ForwardTensors&)>& change,
                    const std::string& text) {
  PackedCall call;
  ForwardTensors tensors = call.tensors();
  change(call, tensors);
  BOOST_CHECK_EXCEPTION(make_problem(tensors, {}), Error,
                        [&](const Error& error) { return text == error.what(); });
}

}  // namespace

BOOST_AUTO_TEST_SUITE(packed)

BOOST_AUTO_TEST_CASE(sizes_are_those_of_the_longest_sequences) {
  PackedCall call;
  const AttentionProblem problem = make_problem(call.tensors(), {});
  BOOST_TEST(problem.packed);
  BOOST_TEST(problem.ragged());
  BOOST_TEST(problem.batch == 3);
  BOOST_TEST(problem.seqlen_q == 20);
  BOOST_TEST(problem.seqlen_k == 11);
  BOOST_TEST(problem.total_q == 27);
  BOOST_TEST(problem.total_k == 23);
  BOOST_TEST(to_string(problem) == "forward float32 B=3 H=4/2 T=20/11 D=8 packed=27/23");
}

BOOST_AUTO_TEST_CASE(entries_and_their_visibility) {
  PackedCall call;
  const ForwardTensors tensors = call.tensors();
  AttentionOptions options;
  options.causal = Causal::kBottomRight;
  const AttentionProblem problem = make_problem(tensors, options);
  const std::vector<Entry> entries = make_entries(problem, tensors.inputs);
  BOOST_REQUIRE(entries.size() == 3);
  BOOST_TEST(entries[2].query.row == 5);
  BOOST_TEST(entries[2].query.batch == 0);
  BOOST_TEST(entries[2].seqlen_q == 20);
  BOOST_TEST(entries[2].key.row == 10);
  BOOST_TEST(entries[2].seqlen_k == 11);
  const flashattn::Visibility last = make_visibility(problem, tensors.inputs, 2);
  BOOST_TEST(last.shift == 11 - 20);
  BOOST_TEST(last.key_limit == 11);
  const TensorView slack = rows_past(with_batch_axis(tensors).out, 1, tensors.inputs.cu_seqlens_q);
  BOOST_TEST(slack.shape[1] == 2);
  BOOST_TEST(slack.data == static_cast<float*>(tensors.out.data) + 25 * kHeads * kDim);
}

BOOST_AUTO_TEST_CASE(a_plain_call_has_no_entries) {
  flashattn::testing::Call call;
  const ForwardTensors tensors = call.forward_tensors();
  BOOST_TEST(make_entries(make_problem(tensors, {}), tensors.inputs).empty());
}

BOOST_AUTO_TEST_CASE(refusals) {
  using flashattn::InvalidArgument;
  expect_refusal<InvalidArgument>([](PackedCall& call, auto&) { call.cu_q[2] = 4; },
                                  "attention_varlen: cu_seqlens_q[2] (4) must be between 5 and 27");
  expect_refusal<InvalidArgument>(
      [](PackedCall& call, auto&) { call.cu_k[3] = 24; },
      "attention_varlen: cu_seqlens_k[3] (24) must be between 10 and 23");
  expect_refusal<InvalidArgument>([](auto&, ForwardTensors& t) { t.inputs.cu_seqlens_k = {}; },
                                  "attention_varlen: cu_seqlens_k (not given) must come with the "
                                  "other cu_seqlens");
  expect_refusal<InvalidArgument>([](auto&, ForwardTensors& t) { t.lse.shape[1] = 20; },
                                  "attention_varlen: lse.shape ((4, 20)) must be (4, 27)");
  expect_refusal<flashattn::InvalidType>(
      [](auto&, ForwardTensors& t) { t.inputs.cu_seqlens_q.dtype = DType::kFloat32; },
      "attention_varlen: cu_seqlens_q.dtype (float32) must be int32 or int64");
  PackedCall call;
  ForwardTensors masked = call.tensors();
  Array mask(DType::kFloat32, {1, 1, 1, 11});
  masked.inputs.mask = mask.view();
  BOOST_CHECK_THROW(make_problem(masked, {}), flashattn::Unsupported);
}

BOOST_AUTO_TEST_CASE(sequences_have_the_bits_of_calls_alone) {
  PackedCall call;
  AttentionOptions options;
  options.causal = Causal::kBottomRight;
  options.backend = "cpu";
  ForwardTensors packed = call.tensors();
  flashattn::forward(packed, options);
  for (std::size_t b = 0; b < 3; ++b) {
    const std::int64_t first = call.cu_q[b];
    const std::int64_t rows = call.cu_q[b + 1] - first;
    const std::int64_t keys = call.cu_k[b + 1] - call.cu_k[b];
    if (rows == 0) continue;
    Array out(DType::kFloat32, {1, rows, kHeads, kDim});
    Array lse(DType::kFloat32, {1, kHeads, rows});
    flashattn::forward({.inputs = {.query = rows_of(packed.inputs.query, first, rows),
                                   .key = rows_of(packed.inputs.key, call.cu_k[b], keys),
                                   .value = rows_of(packed.inputs.value, call.cu_k[b], keys)},
                        .out = out.view(),
                        .lse = lse.view()},
                       options);
    for (std::int64_t i = 0; i < out.count(); ++i) {
      BOOST_TEST(call.out.get(first * kHeads * kDim + i) == out.get(i));
    }
    for (std::int64_t h = 0; h < kHeads; ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        BOOST_TEST(call.lse.get(h * 27 + first + i) == lse.get(h * rows + i));
      }
    }
  }
  for (std::int64_t i = 25 * kHeads * kDim; i < call.out.count(); ++i) {
    BOOST_TEST(call.out.get(i) == 0.0F);
  }
  BOOST_TEST(call.lse.get(25) == -std::numeric_limits<float>::infinity());
}

BOOST_AUTO_TEST_CASE(integers_are_read_once) {
  PackedCall call;
  ForwardTensors tensors = call.tensors();
  const flashattn::PerBatchValues values(tensors.inputs);
  call.cu_q[3] = 1000;
  BOOST_TEST(flashattn::read_integer(tensors.inputs.cu_seqlens_q, 3) == 25);
  BOOST_TEST(make_problem(tensors, {}).seqlen_q == 20);
}

// Two entries with 5 and 9 rows in use, pages of 4 rows, in the order 3 0 5 / 1 4 2.
BOOST_AUTO_TEST_CASE(pages_give_the_bits_of_a_contiguous_cache) {
  constexpr std::int64_t kRows = 12;
  constexpr std::int64_t kPage = 4;
  std::vector<std::int32_t> table = {3, 0, 5, 1, 4, 2};
  std::vector<std::int64_t> lengths = {5, 9};
  Array query(DType::kFloat32, {2, 1, kHeads, kDim});
  Array new_rows(DType::kFloat32, {2, 2, kKvHeads, kDim});
  Array cache(DType::kFloat32, {2, kRows, kKvHeads, kDim});
  Array values(DType::kFloat32, {2, kRows, kKvHeads, kDim});
  Array pages(DType::kFloat32, {6, kPage, kKvHeads, kDim});
  Array value_pages(DType::kFloat32, {6, kPage, kKvHeads, kDim});
  query.fill_normal(1);
  new_rows.fill_normal(2);
  cache.fill_normal(3);
  values.fill_normal(4);
  const std::int64_t page_items = kPage * kKvHeads * kDim;
  for (std::int64_t page = 0; page < 6; ++page) {
    for (std::int64_t i = 0; i < page_items; ++i) {
      const std::int64_t to = table[static_cast<std::size_t>(page)] * page_items + i;
      pages.set(to, cache.get(page * page_items + i));
      value_pages.set(to, values.get(page * page_items + i));
    }
  }
  Array out[2] = {{DType::kFloat32, {2, 1, kHeads, kDim}}, {DType::kFloat32, {2, 1, kHeads, kDim}}};
  Array lse[2] = {{DType::kFloat32, {2, kHeads, 1}}, {DType::kFloat32, {2, kHeads, 1}}};
  for (std::size_t paged : {0U, 1U}) {
    flashattn::KvCacheTensors tensors{.new_key = new_rows.view(), .new_value = new_rows.view()};
    AttentionInputs& in = tensors.call.inputs;
    in.query = query.view();
    in.key = paged == 0 ? cache.view() : pages.view();
    in.value = paged == 0 ? values.view() : value_pages.view();
    in.kv_lengths = contiguous_view(lengths.data(), DType::kInt64, 2);
    if (paged == 1) in.block_table = contiguous_view(table.data(), DType::kInt32, 2, 3);
    tensors.call.out = out[paged].view();
    tensors.call.lse = lse[paged].view();
    AttentionOptions options;
    options.backend = "cpu";
    flashattn::attention_kvcache(tensors, options);
  }
  for (std::int64_t i = 0; i < out[0].count(); ++i) BOOST_TEST(out[0].get(i) == out[1].get(i));
  for (std::int64_t i = 0; i < lse[0].count(); ++i) BOOST_TEST(lse[0].get(i) == lse[1].get(i));
  // Entry 1's first new row is row 9, in its third page, which is page 2.
  const std::int64_t row_items = kKvHeads * kDim;
  for (std::int64_t i = 0; i < row_items; ++i) {
    BOOST_TEST(cache.get((kRows + 9) * row_items + i) == new_rows.get(2 * row_items + i));
    BOOST_TEST(pages.get(2 * page_items + row_items + i) == new_rows.get(2 * row_items + i));
  }
}

BOOST_AUTO_TEST_SUITE_END()
