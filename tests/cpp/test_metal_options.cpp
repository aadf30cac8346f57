// The Metal schedule with options: golden texts, what kernels are specialised for, and how dmask is
// split. Runs on every machine; no GPU, simulated or not, is involved.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>

#include "metal/schedule.h"
#include "metal/schedule_options.h"
#include "metal_calls.h"

namespace {

namespace fa = flashattn;
namespace metal = flashattn::metal;
using metal_calls::backward_of;
using metal_calls::Call;
using metal_calls::forward_of;
using metal_calls::kM1;
using metal_calls::make_call;

fa::TensorView mask_of(fa::DType dtype, int batch, int heads, int rows, int keys) {
  return fa::contiguous_view(nullptr, dtype, batch, heads, rows, keys);
}

bool constant_of(const metal::KernelKey& key, metal::abi::FunctionConstantId id) {
  for (const metal::FunctionConstantValue& constant : function_constants(key)) {
    if (constant.id == static_cast<std::uint32_t>(id)) return constant.value;
  }
  BOOST_FAIL("the kernel does not declare the constant");
  return false;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(metal_options)

BOOST_AUTO_TEST_CASE(forward_with_every_option_golden) {
  const Call call =
      make_call({2, 4, 2, 40, 50, 64, 64}, fa::DType::kFloat16,
                {.softcap = 5.0F, .dropout = {.probability = 0.5}, .q_offset = 1000},
                {.mask = mask_of(fa::DType::kBool, 2, 1, 1, 50), .slopes = 1, .sinks = true});
  BOOST_TEST(to_string(forward_of(call)) ==
             "command_buffer 0: forward_float16_d64_v64_r32_c16+softcap+alibi+bool_mask+sinks"
             "+dropout threadgroups 0+16 x 128 threads, 12432 B: query,key,value,row_intervals,"
             "mask,mask_tiles,alibi_slopes,row_shifts,sinks -> out,lse\n"
             "rows of 0: [i-1073741824, i+1073741824) below 50\n"
             "row 0 of 0 at key 1000\n"
             "rows of 1: [i-1073741824, i+1073741824) below 50\n"
             "row 0 of 1 at key 1000\n");
}

BOOST_AUTO_TEST_CASE(backward_with_every_gradient_golden) {
  const Call call = make_call({2, 4, 2, 40, 50, 64, 64}, fa::DType::kFloat32, {},
                              {.mask = mask_of(fa::DType::kBFloat16, 1, 4, 40, 1),
                               .slopes = 2,
                               .sinks = true,
                               .gradients = true});
  BOOST_TEST(
      to_string(backward_of(call)) ==
      "command_buffer 0: delta_float32_r8 threadgroups 0+40 x 256 threads, 0 B: out,dout -> delta\n"
      "command_buffer 0: sink_gradient_r8 threadgroups 0+1 x 256 threads, 0 B: lse,delta,sinks -> "
      "dsinks\n"
      "command_buffer 0: backward_dq_float32_d64_v64_r32_c16+alibi+bfloat16_mask+slope_rows "
      "threadgroups 0+16 x 128 threads, 14992 B: query,key,value,lse,dout,delta,row_intervals,"
      "mask,mask_tiles,alibi_slopes,row_shifts -> dq,slope_rows\n"
      "command_buffer 0: backward_dv_float32_d64_v64_r32_c16+alibi+bfloat16_mask threadgroups 0+8 "
      "x 128 threads, 12496 B: query,key,lse,dout,row_intervals,mask,mask_tiles,alibi_slopes,"
      "row_shifts -> dv\n"
      "command_buffer 0: backward_dk_float32_d64_v64_r32_c16+alibi+bfloat16_mask threadgroups 0+8 "
      "x 128 threads, 15120 B: query,key,value,lse,dout,delta,row_intervals,mask,mask_tiles,"
      "alibi_slopes,row_shifts -> dk\n"
      "command_buffer 0: slope_gradient_r8 threadgroups 0+1 x 256 threads, 0 B: slope_rows -> "
      "dalibi_slopes\n"
      "command_buffer 0: mask_gradient_float32_d64_v64_r32_c16+alibi+bfloat16_mask threadgroups "
      "0+8 x 128 threads, 13824 B: query,key,value,lse,dout,delta,row_intervals,mask,mask_tiles,"
      "alibi_slopes,row_shifts -> dmask, tiles 0+8\n"
      "rows of 0: [i-1073741824, i+1073741824) below 50\n"
      "row 0 of 0 at key 10\n"
      "rows of 1: [i-1073741824, i+1073741824) below 50\n"
      "row 0 of 1 at key 10\n"
      "delta 1280 B\n"
      "slope_rows 1280 B\n");
}

// Plain kernels read nothing of the options, and a key has one pipeline.
BOOST_AUTO_TEST_CASE(plain_kernels_have_no_options) {
  const Call call = make_call({1, 2, 2, 40, 50, 64, 64}, fa::DType::kFloat32, {});
  for (const metal::Dispatch& dispatch : backward_of(call).dispatches) {
    BOOST_TEST(!takes_modifiers(dispatch.key));
    for (const metal::FunctionConstantValue& constant : function_constants(dispatch.key)) {
      BOOST_TEST(!constant.value);
    }
  }
}

BOOST_AUTO_TEST_CASE(function_constants_name_the_mask) {
  namespace abi = metal::abi;
  for (const fa::DType dtype : {fa::DType::kBool, fa::DType::kFloat16, fa::DType::kBFloat16,
                                fa::DType::kFloat32, fa::DType::kFloat64}) {
    const Call call = make_call({1, 2, 2, 4, 5, 16, 16}, fa::DType::kFloat32, {},
                                {.mask = mask_of(dtype, 1, 1, 4, 5)});
    const metal::KernelKey key = forward_of(call).dispatches.at(0).key;
    BOOST_TEST(constant_of(key, abi::kConstantHasModifiers));
    BOOST_TEST(constant_of(key, abi::kConstantHasMask));
    BOOST_TEST(constant_of(key, abi::kConstantMaskIsBool) == (dtype == fa::DType::kBool));
    BOOST_TEST(constant_of(key, abi::kConstantMaskIsHalf) == (dtype == fa::DType::kFloat16));
    BOOST_TEST(constant_of(key, abi::kConstantMaskIsBfloat) == (dtype == fa::DType::kBFloat16));
    BOOST_TEST(!constant_of(key, abi::kConstantHasSinks));
  }
}

// A sink is part of the log-sum-exp: backward its kernels are the plain ones.
BOOST_AUTO_TEST_CASE(sinks_change_no_backward_product) {
  const Call call = make_call({1, 2, 2, 4, 5, 16, 16}, fa::DType::kFloat32, {}, {.sinks = true});
  BOOST_TEST(forward_of(call).dispatches.at(0).key.options.sinks);
  for (const metal::Dispatch& dispatch : backward_of(call).dispatches) {
    BOOST_TEST(!dispatch.key.options.any());
  }
}

BOOST_AUTO_TEST_CASE(parameters_carry_the_options) {
  Call call =
      make_call({2, 4, 2, 40, 50, 64, 64}, fa::DType::kFloat32,
                {.softcap = 4.0F,
                 .dropout = {.probability = 0.25,
                             .seed = 0x123456789abcdef0,
                             .offset = std::uint64_t{1} << 40,
                             .shard = fa::DropoutShard{8, 4, 1000, 7, std::int64_t{1} << 33, 3}}},
                {.mask = mask_of(fa::DType::kFloat32, 2, 1, 40, 50), .slopes = 2});
  call.tensors.inputs.mask.stride = {-7, 99, std::int64_t{1} << 40, 2};
  const metal::abi::ModifierParams p = forward_of(call).dispatches.at(0).modifiers;
  BOOST_TEST(p.mask.batch == -7);
  BOOST_TEST(p.mask.head == 0);  // broadcast by its shape
  BOOST_TEST(p.mask.row == std::int64_t{1} << 40);
  BOOST_TEST(p.mask.key == 2);
  BOOST_TEST(p.mask_tiles.batch == 2 * 2);
  BOOST_TEST(p.mask_tiles.row == 2);
  BOOST_TEST(p.mask_tiles.key == 1);
  BOOST_TEST(p.slopes_batch == 4);
  BOOST_TEST(p.slopes_per_batch == 1U);
  BOOST_TEST(p.softcap == 4.0F);
  BOOST_TEST(p.inverse_softcap == 0.25F);
  BOOST_TEST(p.seed_high == 0x12345678U);
  BOOST_TEST(p.seed_low == 0x9abcdef0U);
  BOOST_TEST(p.dropout_offset == std::uint64_t{1} << 40);
  BOOST_TEST(p.dropout_threshold == 1U << 22);
  BOOST_TEST(p.dropout_scale == 1.0F / 0.75F);
  BOOST_TEST(p.global_keys == std::uint64_t{1} << 33);
  BOOST_TEST(p.query_start == 7U);
}

// One threadgroup that adds up many tiles of scores does so in parts that rise without a gap.
BOOST_AUTO_TEST_CASE(long_mask_gradients_are_split) {
  const Call call =
      make_call({4, 32, 8, 1 << 14, 1 << 14, 128, 128}, fa::DType::kFloat16, {},
                {.mask = mask_of(fa::DType::kFloat16, 1, 1, 1, 1 << 14), .gradients = true});
  metal::DeviceFacts slow = kM1;
  slow.max_flops_per_command_buffer = 1e9;
  for (const metal::DeviceFacts& facts : {kM1, slow}) {
    std::uint64_t next = 0;
    int parts = 0;
    for (const metal::Dispatch& dispatch : backward_of(call, facts).dispatches) {
      if (dispatch.key.kind != metal::KernelKind::kMaskGradient) continue;
      if (dispatch.params.first_threadgroup != 0) continue;
      BOOST_TEST(dispatch.modifiers.first_tile == next);
      next += dispatch.modifiers.tile_count;
      ++parts;
    }
    BOOST_TEST(parts > 1);
    BOOST_TEST(next == 4U * 32U * (1U << 14) / 32U);
  }
}

// Without a key only a sink has a gradient.
BOOST_AUTO_TEST_CASE(no_keys_leave_the_sinks) {
  const Call call = make_call({1, 2, 2, 4, 0, 16, 16}, fa::DType::kFloat32, {},
                              {.slopes = 1, .sinks = true, .gradients = true});
  const metal::Schedule schedule = backward_of(call);
  BOOST_TEST_REQUIRE(schedule.dispatches.size() == 2U);
  BOOST_TEST((schedule.dispatches[0].key.kind == metal::KernelKind::kDelta));
  BOOST_TEST((schedule.dispatches[1].key.kind == metal::KernelKind::kSinkGradient));
}

// dalibi_slopes alone: dq's kernel computes it, into memory that nobody sees.
BOOST_AUTO_TEST_CASE(slopes_without_dq) {
  Call call =
      make_call({1, 2, 2, 4, 6, 16, 16}, fa::DType::kFloat16, {}, {.slopes = 1, .gradients = true});
  call.tensors.dq = {};
  call.tensors.dk = {};
  call.tensors.dv = {};
  const metal::Schedule schedule = backward_of(call);
  BOOST_TEST(schedule.dispatches.size() == 3U);
  BOOST_TEST(schedule.dispatches.at(1).params.dq.row == 2 * 16);
  BOOST_TEST_REQUIRE(schedule.scratch.size() == 3U);
  BOOST_TEST(schedule.scratch[2].bytes == 4 * 2 * 16 * 2);
}

BOOST_AUTO_TEST_SUITE_END()
