// make_problem on sizes, dtypes and scalars: what it reads out of a valid call, and the exact
// message of every refusal.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "refusals.h"

namespace {

using flashattn::AttentionOptions;
using flashattn::AttentionProblem;
using flashattn::Causal;
using flashattn::DType;
using flashattn::InvalidArgument;
using flashattn::InvalidType;
using flashattn::make_problem;
using flashattn::TensorView;
using flashattn::Window;
using flashattn::testing::Call;
using flashattn::testing::expect_forward;
using flashattn::testing::message_of;

Window normalised(std::int64_t seqlen_q, std::int64_t seqlen_k, AttentionOptions options) {
  Call call({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k});
  return make_problem(call.forward_tensors(), options).window;
}

}  // namespace

namespace flashattn {

std::ostream& operator<<(std::ostream& stream, const Window& window) {
  return stream << '(' << window.left << ',' << window.right << ')';
}

}  // namespace flashattn

BOOST_AUTO_TEST_SUITE(problem)

BOOST_AUTO_TEST_CASE(a_plain_call_is_read_and_printed) {
  Call call({.seqlen_k = 9, .value_dim = 4});
  const AttentionProblem p = make_problem(call.forward_tensors(), {.causal = Causal::kBottomRight});
  BOOST_TEST(p.batch == 2);
  BOOST_TEST(p.heads_per_kv() == 2);
  BOOST_TEST(p.seqlen_q == 6);
  BOOST_TEST(p.seqlen_k == 9);
  BOOST_TEST(p.value_dim == 4);
  BOOST_TEST(p.scale == 1.0F / std::sqrt(8.0F));
  BOOST_TEST(to_string(p) == "forward float32 B=2 H=4/2 T=6/9 D=8/4 causal=bottom_right");
  const AttentionProblem b = make_problem(call.backward_tensors(), {.softcap = 30.0F});
  BOOST_TEST(to_string(b) == "backward float32 B=2 H=4/2 T=6/9 D=8/4 softcap=30");
}

BOOST_AUTO_TEST_CASE(empty_sizes_are_problems_too) {
  for (const flashattn::testing::Sizes& sizes :
       {flashattn::testing::Sizes{.batch = 0}, flashattn::testing::Sizes{.seqlen_q = 0},
        flashattn::testing::Sizes{.seqlen_k = 0}}) {
    Call call(sizes);
    BOOST_CHECK_NO_THROW(make_problem(call.forward_tensors(), {}));
    BOOST_CHECK_NO_THROW(make_problem(call.backward_tensors(), {}));
  }
}

BOOST_AUTO_TEST_CASE(a_probability_of_zero_is_the_call_without_dropout) {
  Call call;
  AttentionOptions options;
  options.dropout = {.probability = 0.0, .seed = 5, .offset = 6};
  BOOST_TEST(
      (make_problem(call.forward_tensors(), options) == make_problem(call.forward_tensors(), {})));
}

BOOST_AUTO_TEST_CASE(shapes) {
  const auto shape = [](TensorView view, int axis, std::int64_t size) {
    view.shape[static_cast<std::size_t>(axis)] = size;
    return view;
  };
  expect_forward([&](auto& t, auto&) { t.inputs.key = shape(t.inputs.key, 3, 4); },
                 "attention: key.head_dim (4) must equal query.head_dim (8)");
  expect_forward([&](auto& t, auto&) { t.inputs.key = shape(t.inputs.key, 0, 3); },
                 "attention: key.batch (3) must equal query.batch (2)");
  expect_forward([&](auto& t, auto&) { t.inputs.value = shape(t.inputs.value, 0, 1); },
                 "attention: value.batch (1) must equal query.batch (2)");
  expect_forward([&](auto& t, auto&) { t.inputs.value = shape(t.inputs.value, 1, 5); },
                 "attention: value.seqlen (5) must equal key.seqlen (6)");
  expect_forward([&](auto& t, auto&) { t.inputs.value = shape(t.inputs.value, 2, 1); },
                 "attention: value.heads (1) must equal key.heads (2)");
  expect_forward([&](auto& t, auto&) { t.inputs.query = shape(t.inputs.query, 2, 5); },
                 "attention: query.heads (5) must be a multiple of key.heads (2)");
  expect_forward([&](auto& t, auto&) { t.inputs.query = shape(t.inputs.query, 2, 0); },
                 "attention: query.heads (0) must be a multiple of key.heads (2)");
  expect_forward(
      [&](auto& t, auto&) {
        t.inputs.key = shape(t.inputs.key, 2, 0);
        t.inputs.value = shape(t.inputs.value, 2, 0);
      },
      "attention: key.heads (0) must be at least 1");
  expect_forward([&](auto& t, auto&) { t.inputs.query.rank = 3; },
                 "attention: query.ndim (3) must be 4");
  expect_forward([&](auto& t, auto&) { t.inputs.value = {}; },
                 "attention: value.ndim (0) must be 4");
  expect_forward([&](auto& t, auto&) { t.inputs.key = shape(t.inputs.key, 1, -1); },
                 "attention: key.shape ((2, -1, 2, 8)) must not be negative");
  expect_forward([&](auto& t, auto&) { t.out = shape(t.out, 3, 4); },
                 "attention: out.shape ((2, 6, 4, 4)) must be (2, 6, 4, 8)");
  expect_forward([&](auto& t, auto&) { t.lse = {}; },
                 "attention: lse.shape (()) must be (2, 4, 6)");
  expect_forward([&](auto& t, auto&) { t.lse = shape(t.lse, 2, 5); },
                 "attention: lse.shape ((2, 4, 5)) must be (2, 4, 6)");
}

BOOST_AUTO_TEST_CASE(head_dims_from_1_to_512) {
  const auto dims = [](std::int64_t head_dim, std::int64_t value_dim) {
    Call call({.head_dim = head_dim, .value_dim = value_dim});
    return message_of<InvalidArgument>([&] { make_problem(call.forward_tensors(), {}); });
  };
  BOOST_TEST(dims(1, 512) == "no error");
  BOOST_TEST(dims(512, 1) == "no error");
  BOOST_TEST(dims(0, 8) == "attention: query.head_dim (0) must be between 1 and 512");
  BOOST_TEST(dims(513, 8) == "attention: query.head_dim (513) must be between 1 and 512");
  BOOST_TEST(dims(8, 0) == "attention: value.value_dim (0) must be between 1 and 512");
  BOOST_TEST(dims(8, 513) == "attention: value.value_dim (513) must be between 1 and 512");
}

BOOST_AUTO_TEST_CASE(dtypes) {
  expect_forward<InvalidType>(
      [](auto& t, auto&) { t.inputs.query.dtype = DType::kFloat64; },
      "attention: query.dtype (float64) must be float32, float16 or bfloat16");
  expect_forward<InvalidType>(
      [](auto& t, auto&) { t.inputs.query.dtype = DType::kInt32; },
      "attention: query.dtype (int32) must be float32, float16 or bfloat16");
  expect_forward<InvalidType>([](auto& t, auto&) { t.inputs.key.dtype = DType::kFloat16; },
                              "attention: key.dtype (float16) must equal query.dtype (float32)");
  expect_forward<InvalidType>([](auto& t, auto&) { t.inputs.value.dtype = DType::kBFloat16; },
                              "attention: value.dtype (bfloat16) must equal query.dtype (float32)");
  expect_forward<InvalidType>([](auto& t, auto&) { t.out.dtype = DType::kFloat16; },
                              "attention: out.dtype (float16) must equal query.dtype (float32)");
  expect_forward<InvalidType>([](auto& t, auto&) { t.lse.dtype = DType::kFloat64; },
                              "attention: lse.dtype (float64) must be float32");
}

BOOST_AUTO_TEST_CASE(scalars) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  expect_forward([&](auto&, auto& o) { o.scale = nan; }, "attention: scale (nan) must be finite");
  expect_forward([&](auto&, auto& o) { o.scale = -infinity; },
                 "attention: scale (-inf) must be finite");
  expect_forward([&](auto&, auto& o) { o.softcap = -1.5F; },
                 "attention: softcap (-1.5) must be finite and not negative");
  expect_forward([&](auto&, auto& o) { o.softcap = nan; },
                 "attention: softcap (nan) must be finite and not negative");
  expect_forward([&](auto&, auto& o) { o.dropout.probability = 1.5; },
                 "attention: dropout_p (1.5) must be between 0 and 1");
  expect_forward([&](auto&, auto& o) { o.dropout.probability = std::nan(""); },
                 "attention: dropout_p (nan) must be between 0 and 1");
  expect_forward([&](auto&, auto& o) { o.window.left = -2; },
                 "attention: window.left (-2) must be at least -1");
  expect_forward([&](auto&, auto& o) { o.window.right = -7; },
                 "attention: window.right (-7) must be at least -1");
  expect_forward(
      [&](auto&, auto& o) { o.k_offset = std::int64_t{1} << 60; },
      "attention: k_offset (1152921504606846976) must be between -576460752303423488 and "
      "576460752303423488");
  for (const float scale : {0.0F, -2.0F}) {
    Call call;
    BOOST_TEST(make_problem(call.forward_tensors(), {.scale = scale}).scale == scale);
  }
}

BOOST_AUTO_TEST_CASE(a_dropout_shard_lies_inside_the_whole) {
  const auto shard = [](flashattn::DropoutShard s) {
    return [s](auto&, auto& o) { o.dropout = {.probability = 0.5, .shard = s}; };
  };
  expect_forward(shard({4, 1, 6, 0, 6, 0}),
                 "attention: dropout_shard.head_start (1) must place 4 inside the global 4");
  expect_forward(shard({4, 0, 8, 3, 6, 0}),
                 "attention: dropout_shard.query_start (3) must place 6 inside the global 8");
  expect_forward(shard({4, 0, 6, 0, 5, 0}),
                 "attention: dropout_shard.key_start (0) must place 6 inside the global 5");
  expect_forward(shard({4, -1, 6, 0, 6, 0}),
                 "attention: dropout_shard.head_start (-1) must place 4 inside the global 4");
  Call call;
  AttentionOptions options;
  options.dropout = {.probability = 0.5, .shard = flashattn::DropoutShard{8, 4, 6, 0, 12, 6}};
  BOOST_CHECK_NO_THROW(make_problem(call.forward_tensors(), options));
}

BOOST_AUTO_TEST_CASE(window_sides_that_exclude_nothing_are_dropped) {
  // Bottom-right: right from seqlen_q - 1, left from seqlen_k - 1.
  BOOST_TEST(normalised(5, 3, {.window = {.left = 2, .right = 4}}) == (Window{-1, -1}));
  BOOST_TEST(normalised(5, 3, {.window = {.left = 1, .right = 3}}) == (Window{1, 3}));
  BOOST_TEST(normalised(3, 5, {.window = {.left = 4, .right = 2}}) == (Window{-1, -1}));
  BOOST_TEST(normalised(3, 5, {.window = {.left = 3, .right = 1}}) == (Window{3, 1}));
  // Top-left: row 0 stands at key 0, the last row at key seqlen_q - 1; causal answers for the right
  // side.
  const auto top_left = [](Window window) {
    return AttentionOptions{.causal = Causal::kTopLeft, .window = window};
  };
  BOOST_TEST(normalised(3, 5, top_left({1, 0})) == (Window{1, -1}));
  BOOST_TEST(normalised(3, 5, top_left({2, 0})) == (Window{-1, -1}));
  // With an offset the last row stands at q_offset - k_offset + seqlen_q - 1.
  const auto offset = [](Window window) {
    return AttentionOptions{.window = window, .q_offset = 10, .k_offset = 4};
  };
  BOOST_TEST(normalised(3, 5, offset({7, 0})) == (Window{7, -1}));
  BOOST_TEST(normalised(3, 5, offset({8, 0})) == (Window{-1, -1}));
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  BOOST_TEST(normalised(3, 5, {.window = {.left = huge, .right = huge}}) == (Window{-1, -1}));
}

BOOST_AUTO_TEST_SUITE_END()
