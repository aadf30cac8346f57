// make_problem: what it reads out of a valid call, and the exact message of every refusal.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "core/make_visibility.h"
#include "core/per_batch.h"
#include "flashattn/error.h"
#include "flashattn/problem.h"
#include "tensors.h"

namespace {

using flashattn::AttentionOptions;
using flashattn::AttentionProblem;
using flashattn::BackwardTensors;
using flashattn::Causal;
using flashattn::DType;
using flashattn::ForwardTensors;
using flashattn::InvalidArgument;
using flashattn::InvalidType;
using flashattn::make_problem;
using flashattn::TensorView;
using flashattn::Window;
using flashattn::testing::Array;
using flashattn::testing::Call;

// What the call throws as an Error, or what else happened.
template <typename Error>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another kind of error: ") + error.what();
  }
  return "no error";
}

template <typename Error = InvalidArgument>
void expect_forward(const std::function<void(ForwardTensors&, AttentionOptions&)>& change,
                    const std::string& text) {
  Call call;
  ForwardTensors tensors = call.forward_tensors();
  AttentionOptions options;
  change(tensors, options);
  BOOST_TEST(message_of<Error>([&] { make_problem(tensors, options); }) == text);
}

template <typename Error = InvalidArgument>
void expect_backward(const std::function<void(BackwardTensors&)>& change, const std::string& text) {
  Call call;
  BackwardTensors tensors = call.backward_tensors();
  change(tensors);
  BOOST_TEST(message_of<Error>([&] { make_problem(tensors, {}); }) == text);
}

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

BOOST_AUTO_TEST_CASE(masks) {
  const auto with_mask = [](Array& mask) {
    return [&mask](auto& t, auto&) { t.inputs.mask = mask.view(); };
  };
  Array integers(DType::kInt32, {6, 6});
  expect_forward<InvalidType>(
      with_mask(integers), "attention: mask.dtype (int32) must be bool or a floating-point type");
  Array wide(DType::kFloat32, {3, 1, 6, 6});
  expect_forward(with_mask(wide),
                 "attention: mask.shape ((3, 1, 6, 6)) must broadcast to (2, 4, 6, 6)");
  Array narrow(DType::kBool, {6, 5});
  expect_forward(with_mask(narrow),
                 "attention: mask.shape ((6, 5)) must broadcast to (2, 4, 6, 6)");

  Array good(DType::kFloat64, {4, 1, 6});
  Call call;
  ForwardTensors tensors = call.forward_tensors();
  tensors.inputs.mask = good.view();
  const AttentionProblem p = make_problem(tensors, {});
  BOOST_TEST((p.mask == flashattn::MaskKind::kAdditive));
  BOOST_TEST(to_string(p) == "forward float32 B=2 H=4/2 T=6 D=8 mask=float64(1,4,1,6)");
}

BOOST_AUTO_TEST_CASE(slopes_and_sinks) {
  Array half(DType::kFloat16, {4});
  Array three(DType::kFloat32, {3});
  Array per_batch(DType::kFloat32, {2, 4});
  expect_forward<InvalidType>([&](auto& t, auto&) { t.inputs.alibi_slopes = half.view(); },
                              "attention: alibi_slopes.dtype (float16) must be float32");
  expect_forward([&](auto& t, auto&) { t.inputs.alibi_slopes = three.view(); },
                 "attention: alibi_slopes.shape ((3,)) must be (4,)");
  expect_forward<InvalidType>([&](auto& t, auto&) { t.inputs.sinks = half.view(); },
                              "attention: sinks.dtype (float16) must be float32");
  expect_forward([&](auto& t, auto&) { t.inputs.sinks = per_batch.view(); },
                 "attention: sinks.shape ((2, 4)) must be (4,)");
  Call call;
  ForwardTensors tensors = call.forward_tensors();
  tensors.inputs.alibi_slopes = per_batch.view();
  BOOST_TEST(make_problem(tensors, {}).alibi);
}

BOOST_AUTO_TEST_CASE(per_batch_integers) {
  std::int32_t lengths[] = {6, 3};
  const TensorView good = flashattn::contiguous_view(lengths, DType::kInt32, 2);
  expect_forward(
      [&](auto& t, auto&) {
        t.inputs.kv_lengths = good;
        t.inputs.kv_lengths.shape = {1};
      },
      "attention: kv_lengths.shape ((1,)) must be (2,)");
  expect_forward<InvalidType>(
      [&](auto& t, auto&) {
        t.inputs.kv_lengths = good;
        t.inputs.kv_lengths.dtype = DType::kFloat32;
      },
      "attention: kv_lengths.dtype (float32) must be int32 or int64");
  expect_forward(
      [&](auto& t, auto& o) {
        o.q_offset = 1;
        t.inputs.q_offsets = good;
      },
      "attention: q_offset (given twice) must be one number or one per batch entry, not both");
  std::int32_t too_long[] = {6, 7};
  std::int32_t negative[] = {-1, 6};
  expect_forward(
      [&](auto& t, auto&) {
        t.inputs.kv_lengths = flashattn::contiguous_view(too_long, DType::kInt32, 2);
      },
      "attention: kv_lengths[1] (7) must be between 0 and 6");
  expect_forward(
      [&](auto& t, auto&) {
        t.inputs.kv_lengths = flashattn::contiguous_view(negative, DType::kInt32, 2);
      },
      "attention: kv_lengths[0] (-1) must be between 0 and 6");
}

BOOST_AUTO_TEST_CASE(per_batch_integers_lie_in_host_memory) {
  std::int32_t lengths[] = {6, 3};
  expect_forward(
      [&](auto& t, auto&) {
        t.inputs.kv_lengths = flashattn::contiguous_view(lengths, DType::kInt32, 2);
        t.inputs.kv_lengths.device = flashattn::DeviceKind::kMetal;
        t.inputs.kv_lengths.handle = lengths;
      },
      "attention: kv_lengths.device (metal) must be cpu, also where the other arrays are not");
}

BOOST_AUTO_TEST_CASE(per_batch_integers_are_read_once) {
  std::int32_t lengths[] = {9, 4, 9, 5};
  std::int64_t offsets[] = {7, 8};
  Call call;
  flashattn::AttentionInputs inputs = call.forward_tensors().inputs;
  inputs.kv_lengths = flashattn::contiguous_view(lengths + 1, DType::kInt32, 2);
  inputs.kv_lengths.stride[0] = 2;
  inputs.q_offsets = flashattn::contiguous_view(offsets, DType::kInt64, 2);
  const TensorView given = inputs.kv_lengths;
  {
    const flashattn::PerBatchValues values(inputs);
    lengths[3] = 1 << 30;
    offsets[0] = -1;
    BOOST_TEST(flashattn::read_integer(inputs.kv_lengths, 0) == 4);
    BOOST_TEST(flashattn::read_integer(inputs.kv_lengths, 1) == 5);
    BOOST_TEST(flashattn::read_integer(inputs.q_offsets, 0) == 7);
    BOOST_TEST(flashattn::read_integer(inputs.q_offsets, 1) == 8);
  }
  // What make_problem refuses is left for it to refuse.
  inputs.kv_lengths = given;
  inputs.kv_lengths.dtype = DType::kFloat32;
  inputs.q_offsets = {};
  const flashattn::PerBatchValues values(inputs);
  BOOST_TEST(inputs.kv_lengths.data == given.data);
  BOOST_TEST(inputs.q_offsets.rank == 0);
}

BOOST_AUTO_TEST_CASE(memory) {
  expect_forward([](auto& t, auto&) { t.inputs.key.data = nullptr; },
                 "attention: key.data (null) must point to memory");
  expect_forward(
      [](auto& t, auto&) { t.inputs.key.data = static_cast<char*>(t.inputs.key.data) + 2; },
      "attention: key.data (unaligned) must be aligned to 4 bytes");
  expect_forward([](auto& t, auto&) { t.inputs.key.device = flashattn::DeviceKind::kMetal; },
                 "attention: key.device (metal) must equal query.device (cpu)");
  expect_forward([](auto& t, auto&) { t.lse.device = flashattn::DeviceKind::kMetal; },
                 "attention: lse.device (metal) must equal query.device (cpu)");
  expect_forward(
      [](auto& t, auto&) { t.out.stride[1] = 0; },
      "attention: out.stride ((192, 0, 8, 1)) must give every element of an output its own "
      "memory");
  expect_forward(
      [](auto& t, auto&) { t.out.stride[1] = 8; },
      "attention: out.stride ((192, 8, 8, 1)) must give every element of an output its own "
      "memory");
  expect_forward([](auto& t, auto&) { t.out.data = t.inputs.query.data; },
                 "attention: out (shares memory with query) must not overlap another argument");
}

BOOST_AUTO_TEST_CASE(outputs_overlap_nothing) {
  Array memory(DType::kFloat32, {4096});
  char* const start = static_cast<char*>(memory.view().data);
  const auto at = [&](TensorView view, std::int64_t items) {
    view.data = start + items * 4;
    return view;
  };
  // lse, 48 items, on the last item of out, 384 items; and just behind it.
  expect_forward(
      [&](auto& t, auto&) {
        t.out = at(t.out, 0);
        t.lse = at(t.lse, 383);
      },
      "attention: lse (shares memory with out) must not overlap another argument");
  Call call;
  ForwardTensors tensors = call.forward_tensors();
  tensors.out = at(tensors.out, 0);
  tensors.lse = at(tensors.lse, 384);
  BOOST_CHECK_NO_THROW(make_problem(tensors, {}));
  // The first item of a reversed view is its highest.
  expect_forward(
      [&](auto& t, auto&) {
        t.out = at(t.out, 0);
        t.inputs.query = at(t.inputs.query, 575);
        t.inputs.query.stride = {-192, -32, -8, -1};
      },
      "attention: out (shares memory with query) must not overlap another argument");
  expect_forward(
      [&](auto& t, auto&) {
        t.out = at(t.out, 0);
        t.inputs.sinks = at(flashattn::contiguous_view(start, DType::kFloat32, 4), 381);
      },
      "attention: out (shares memory with sinks) must not overlap another argument");
  expect_backward(
      [&](auto& t) {
        t.inputs.sinks = at(flashattn::contiguous_view(start, DType::kFloat32, 4), 600);
        t.dsinks = at(t.inputs.sinks, 3);
        t.dq = at(t.dq, 0);
      },
      "attention_backward: dsinks (shares memory with dq) must not overlap another argument");
}

BOOST_AUTO_TEST_CASE(parts_of_a_packed_array_are_told_apart) {
  // (2, 6, 4 + 2 + 2 heads, 8): dq, dk and dv as flash-attn packs them.
  Array packed(DType::kFloat32, {2, 6, 8, 8});
  Call call;
  BackwardTensors tensors = call.backward_tensors();
  const auto part = [&](TensorView view, std::int64_t first_head) {
    view.data = static_cast<float*>(packed.view().data) + first_head * 8;
    view.stride = packed.view().stride;
    return view;
  };
  tensors.dq = part(tensors.dq, 0);
  tensors.dk = part(tensors.dk, 4);
  tensors.dv = part(tensors.dv, 6);
  BOOST_CHECK_NO_THROW(make_problem(tensors, {}));
  tensors.dk = part(tensors.dk, 3);
  BOOST_TEST(message_of<InvalidArgument>([&] { make_problem(tensors, {}); }) ==
             "attention_backward: dk (shares memory with dq) must not overlap another argument");
}

BOOST_AUTO_TEST_CASE(metal_views_overlap_by_buffer_and_bytes) {
  int buffer = 0;
  int another = 0;
  Call call;
  const auto place = [](TensorView& view, int* handle, std::int64_t byte_offset) {
    view.device = flashattn::DeviceKind::kMetal;
    view.data = nullptr;
    view.handle = handle;
    view.byte_offset = byte_offset;
  };
  const auto message = [&](int* out_handle, std::int64_t out_offset) {
    ForwardTensors t = call.forward_tensors();
    place(t.inputs.query, &buffer, 0);  // 1536 bytes
    place(t.inputs.key, &buffer, 4096);
    place(t.inputs.value, &buffer, 8192);
    place(t.lse, &buffer, 12288);
    place(t.out, out_handle, out_offset);
    return message_of<InvalidArgument>([&] { make_problem(t, {}); });
  };
  BOOST_TEST(message(&buffer, 1536) == "no error");
  BOOST_TEST(message(&another, 0) == "no error");
  BOOST_TEST(message(&buffer, 1532) ==
             "attention: out (shares memory with query) must not overlap another argument");
}

BOOST_AUTO_TEST_CASE(inputs_may_have_any_stride) {
  Call call;
  ForwardTensors tensors = call.forward_tensors();
  // The strides are made up, so the arrays stand far apart, at addresses that nobody touches.
  std::uintptr_t address = 0;
  for (flashattn::TensorView* view : {&tensors.inputs.query, &tensors.inputs.key,
                                      &tensors.inputs.value, &tensors.out, &tensors.lse}) {
    address += std::uintptr_t{1} << 40;
    view->data = reinterpret_cast<void*>(address);
  }
  tensors.inputs.key.stride = {0, 0, 0, 0};
  tensors.inputs.value.stride = {-96, 16, 8, -1};
  tensors.inputs.query.stride[1] = -32;
  BOOST_CHECK_NO_THROW(make_problem(tensors, {}));
  tensors.out.stride = {192, -32, 8, 1};
  BOOST_CHECK_NO_THROW(make_problem(tensors, {}));
  // An axis of size 1 is never stepped over, so its stride means nothing.
  Call one({.batch = 1});
  ForwardTensors single = one.forward_tensors();
  single.out.stride[0] = 0;
  BOOST_CHECK_NO_THROW(make_problem(single, {}));
}

BOOST_AUTO_TEST_CASE(backward_arrays) {
  expect_backward([](auto& t) { t.dout.shape[1] = 5; },
                  "attention_backward: dout.shape ((2, 5, 4, 8)) must be (2, 6, 4, 8)");
  expect_backward([](auto& t) { t.dout = {}; },
                  "attention_backward: dout.shape (()) must be (2, 6, 4, 8)");
  expect_backward([](auto& t) { t.dlse.shape[0] = 1; },
                  "attention_backward: dlse.shape ((1, 4, 6)) must be (2, 4, 6)");
  expect_backward([](auto& t) { t.dk.shape[2] = 4; },
                  "attention_backward: dk.shape ((2, 6, 4, 8)) must be (2, 6, 2, 8)");
  expect_backward(
      [](auto& t) { t.dv.stride[0] = 0; },
      "attention_backward: dv.stride ((0, 16, 8, 1)) must give every element of an output "
      "its own memory");
  expect_backward(
      [](auto& t) { t.dk.data = t.dv.data; },
      "attention_backward: dv (shares memory with dk) must not overlap another argument");
  expect_backward<InvalidType>([](auto& t) { t.dq.dtype = DType::kFloat16; },
                               "attention_backward: dq.dtype (float16) must be float32");
  expect_backward<InvalidType>([](auto& t) { t.dout.dtype = DType::kBFloat16; },
                               "attention_backward: dout.dtype (bfloat16) must equal query.dtype "
                               "(float32)");
  Array gradient(DType::kFloat32, {4});
  expect_backward([&](auto& t) { t.dsinks = gradient.view(); },
                  "attention_backward: dsinks (given) must come with sinks");
  Array mask(DType::kBool, {6, 6});
  Array dmask(DType::kFloat32, {6, 6});
  expect_backward<InvalidType>(
      [&](auto& t) {
        t.inputs.mask = mask.view();
        t.dmask = dmask.view();
      },
      "attention_backward: mask.dtype (bool) must be a floating-point type to have a gradient");
}

BOOST_AUTO_TEST_CASE(a_mask_gradient_is_float32_or_wider) {
  Call call;
  Array mask(DType::kFloat64, {6, 6});
  Array gradient(DType::kFloat64, {6, 6});
  BackwardTensors tensors = call.backward_tensors();
  tensors.inputs.mask = mask.view();
  tensors.dmask = gradient.view();
  BOOST_TEST(make_problem(tensors, {}).mask_gradient);
  Array half(DType::kFloat16, {6, 6});
  Array wider(DType::kFloat32, {6, 6});
  tensors.inputs.mask = half.view();
  tensors.dmask = wider.view();
  BOOST_TEST(make_problem(tensors, {}).mask_gradient);
}

BOOST_AUTO_TEST_SUITE_END()
