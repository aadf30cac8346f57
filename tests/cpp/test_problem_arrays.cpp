// make_problem on the optional arrays: masks, slopes, sinks, per-batch integers, gradients.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>

#include "core/make_visibility.h"
#include "core/per_batch.h"
#include "refusals.h"

namespace {

using flashattn::AttentionProblem;
using flashattn::BackwardTensors;
using flashattn::DType;
using flashattn::ForwardTensors;
using flashattn::InvalidType;
using flashattn::make_problem;
using flashattn::TensorView;
using flashattn::testing::Array;
using flashattn::testing::Call;
using flashattn::testing::expect_backward;
using flashattn::testing::expect_forward;

}  // namespace

BOOST_AUTO_TEST_SUITE(problem)

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
