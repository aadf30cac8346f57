// make_problem on memory: null, unaligned, on the wrong device, overlapping, strides.
#include <boost/test/unit_test.hpp>
#include <cstdint>

#include "refusals.h"

namespace {

using flashattn::BackwardTensors;
using flashattn::DType;
using flashattn::ForwardTensors;
using flashattn::InvalidArgument;
using flashattn::make_problem;
using flashattn::TensorView;
using flashattn::testing::Array;
using flashattn::testing::Call;
using flashattn::testing::expect_backward;
using flashattn::testing::expect_forward;
using flashattn::testing::message_of;

}  // namespace

BOOST_AUTO_TEST_SUITE(problem)

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

BOOST_AUTO_TEST_SUITE_END()
