// The Metal schedule: golden texts of whole passes, and the rules that golden texts cannot show.
// Runs on every machine; no GPU, simulated or not, is involved.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "metal/schedule.h"
#include "metal/tuning.h"
#include "metal_calls.h"

namespace {

namespace fa = flashattn;
namespace metal = flashattn::metal;
using metal_calls::backward_of;
using metal_calls::Call;
using metal_calls::forward_of;
using metal_calls::kM1;
using metal_calls::make_call;
using metal_calls::Sizes;

}  // namespace

BOOST_AUTO_TEST_SUITE(metal_schedule)

BOOST_AUTO_TEST_CASE(forward_golden) {
  const Call call = make_call({2, 8, 2, 100, 130, 64, 64}, fa::DType::kFloat32,
                              {.causal = fa::Causal::kBottomRight});
  BOOST_TEST(to_string(forward_of(call)) ==
             "command_buffer 0: forward_float32_d64_v64_r32_c16 threadgroups 0+64 x 128 threads, "
             "12432 B: query,key,value,row_intervals -> out,lse\n"
             "rows of 0: [i-1073741824, i+31) below 130\n"
             "rows of 1: [i-1073741824, i+31) below 130\n");
}

BOOST_AUTO_TEST_CASE(backward_golden) {
  const Call call = make_call({1, 6, 3, 40, 40, 72, 130}, fa::DType::kBFloat16,
                              {.window = {.left = 5, .right = 2}}, {.dlse = true});
  BOOST_TEST(
      to_string(backward_of(call)) ==
      "command_buffer 0: delta_bfloat16_r8+dlse threadgroups 0+30 x 256 threads, 0 B: "
      "out,dout,dlse -> delta\n"
      "command_buffer 0: backward_dq_bfloat16_d80_v160_r16_c8 threadgroups 0+18 x 64 threads, "
      "12368 B: query,key,value,lse,dout,delta,row_intervals -> dq\n"
      "command_buffer 0: backward_dv_bfloat16_d80_v160_r16_c8 threadgroups 0+9 x 64 threads, "
      "11632 B: query,key,lse,dout,row_intervals -> dv\n"
      "command_buffer 0: backward_dk_bfloat16_d80_v160_r16_c8 threadgroups 0+9 x 64 threads, "
      "12432 B: query,key,value,lse,dout,delta,row_intervals -> dk\n"
      "rows of 0: [i-5, i+3) below 40\n"
      "delta 960 B\n");
}

BOOST_AUTO_TEST_CASE(parameters_carry_sizes_strides_and_scale) {
  Call call = make_call({1, 4, 2, 5, 7, 16, 24}, fa::DType::kFloat16, {.scale = -0.5F});
  call.tensors.inputs.key.stride = {-3, 1000000000000, 0, 2};
  const metal::Schedule schedule = forward_of(call);
  const metal::abi::AttentionParams& params = schedule.dispatches.at(0).params;
  BOOST_TEST(params.key.batch == -3);
  BOOST_TEST(params.key.row == 1000000000000);
  BOOST_TEST(params.key.head == 0);
  BOOST_TEST(params.key.dim == 2);
  BOOST_TEST(params.query.row == 4 * 16);
  BOOST_TEST(params.query.head == 16);
  BOOST_TEST(params.lse.head == 5);
  BOOST_TEST(params.heads_per_kv == 2U);
  BOOST_TEST(params.value_dim == 24U);
  BOOST_TEST(params.scale == -0.5F);
  BOOST_TEST(params.scale_log2e == -0.72134752F);
}

// A long problem is cut into command buffers that the system will not end, and nothing is lost or
// doubled.
BOOST_AUTO_TEST_CASE(long_problems_are_split) {
  const Call call = make_call({1, 32, 8, 1 << 20, 1 << 20, 128, 128}, fa::DType::kFloat16,
                              {.causal = fa::Causal::kBottomRight});
  for (const metal::Schedule& schedule : {forward_of(call), backward_of(call)}) {
    BOOST_TEST(schedule.dispatches.back().command_buffer > 100);
    std::string kernel;
    std::uint64_t next = 0;
    int command_buffer = 0;
    for (const metal::Dispatch& dispatch : schedule.dispatches) {
      if (to_string(dispatch.key) != kernel) {
        kernel = to_string(dispatch.key);
        next = 0;
      }
      BOOST_TEST_REQUIRE(dispatch.params.first_threadgroup == next);
      BOOST_TEST_REQUIRE(dispatch.command_buffer >= command_buffer);
      BOOST_TEST_REQUIRE(dispatch.command_buffer <= command_buffer + 1);
      command_buffer = dispatch.command_buffer;
      next += dispatch.threadgroups;
    }
    const bool backward = schedule.dispatches.size() > 1 && !schedule.scratch.empty();
    BOOST_TEST(next == (backward ? 8U : 32U) * ((1U << 20) / 32U));
  }
}

BOOST_AUTO_TEST_CASE(one_giant_threadgroup_gets_its_own_command_buffer) {
  metal::DeviceFacts facts = kM1;
  facts.max_flops_per_command_buffer = 1.0;
  const metal::Schedule schedule =
      forward_of(make_call({1, 1, 1, 70, 16, 16, 16}, fa::DType::kFloat32, {}), facts);
  BOOST_TEST_REQUIRE(schedule.dispatches.size() == 3U);
  BOOST_TEST(schedule.dispatches[2].command_buffer == 2);
  BOOST_TEST(schedule.dispatches[2].params.first_threadgroup == 2U);
  BOOST_TEST(schedule.dispatches[2].threadgroups == 1U);
}

// Grids are one-dimensional and count past what 16 bits hold.
BOOST_AUTO_TEST_CASE(grids_pass_65535) {
  const metal::Schedule schedule =
      forward_of(make_call({1000, 100, 100, 1, 1, 16, 16}, fa::DType::kFloat32, {}));
  BOOST_TEST_REQUIRE(schedule.dispatches.size() == 1U);
  BOOST_TEST(schedule.dispatches[0].threadgroups == 100000U);
}

// Offsets beyond 32 bits decide as they did before they were clamped.
BOOST_AUTO_TEST_CASE(row_intervals_saturate) {
  const auto interval = [](const fa::AttentionOptions& options) {
    return forward_of(make_call({1, 1, 1, 4, 9, 16, 16}, fa::DType::kFloat32, options))
        .row_intervals.at(0);
  };
  const std::int64_t far = std::int64_t{1} << 40;
  // Row 0 stands 2^40 past key 0, and its window reaches back to key 3.
  metal::abi::RowInterval both =
      interval({.causal = fa::Causal::kBottomRight, .window = {.left = far - 3}, .q_offset = far});
  BOOST_TEST(both.begin_offset == 3);
  BOOST_TEST(both.end_offset == 1 << 30);
  both = interval({.causal = fa::Causal::kBottomRight, .q_offset = -far});
  BOOST_TEST(both.end_offset == -(1 << 30));
}

BOOST_AUTO_TEST_CASE(tiles_and_names) {
  BOOST_TEST(metal::round_up_to_tile(1) == 16);
  BOOST_TEST(metal::round_up_to_tile(64) == 64);
  BOOST_TEST(metal::round_up_to_tile(65) == 80);
  BOOST_TEST(metal::round_up_to_tile(193) == 256);
  const metal::KernelKey key{.kind = metal::KernelKind::kBackwardDk,
                             .dtype = fa::DType::kBFloat16,
                             .head_tile = 64,
                             .value_tile = 128,
                             .block_rows = 32,
                             .block_columns = 16,
                             .accumulate = true};
  BOOST_TEST(instantiation(key) ==
             "FLASHATTN_INSTANTIATE(\"backward_dk_bfloat16_d64_v128_r32_c16\", backward_dk, "
             "Bfloat16, 64, 128, 32, 16)");
  BOOST_TEST(to_string(key) == "backward_dk_bfloat16_d64_v128_r32_c16+accumulate");
}

// Every shape the tuning can choose fits the threadgroup memory of every supported device.
BOOST_AUTO_TEST_CASE(every_geometry_fits) {
  for (int head_dim = 1; head_dim <= metal::kMaxTile; head_dim += 15) {
    for (int value_dim = 1; value_dim <= metal::kMaxTile; value_dim += 15) {
      const Call call = make_call({1, 2, 1, 33, 17, head_dim, value_dim}, fa::DType::kFloat32, {});
      for (const metal::Dispatch& dispatch : backward_of(call).dispatches) {
        BOOST_TEST_REQUIRE(threadgroup_memory(dispatch.key) <= kM1.max_threadgroup_memory);
        BOOST_TEST_REQUIRE(dispatch.threads_per_threadgroup <= kM1.max_threads_per_threadgroup);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(refusals_name_the_reason) {
  const auto reason = [](const Sizes& sizes, const fa::AttentionOptions& options,
                         const metal::DeviceFacts& facts = kM1) {
    const fa::Support support =
        metal::supports(make_call(sizes, fa::DType::kFloat32, options).problem, facts);
    BOOST_TEST(!support.ok);
    return support.reason;
  };
  const Sizes small{1, 1, 1, 4, 4, 16, 16};
  BOOST_TEST(metal::supports(make_call(small, fa::DType::kFloat32, {}).problem, kM1).ok);
  BOOST_TEST(reason({1, 1, 1, 4, 4, 257, 16}, {}).starts_with("head_dim and value_dim"));
  BOOST_TEST(reason({1, 1, 1, 1 << 30, 4, 16, 16}, {}).starts_with("sequences must be shorter"));
  BOOST_TEST(reason({1 << 24, 1 << 12, 1, 1, 1, 16, 16}, {}).find("2^32 blocks") !=
             std::string::npos);
  metal::DeviceFacts old = kM1;
  old.apple_family = 6;
  BOOST_TEST(reason(small, {}, old).starts_with("simdgroup matrices"));
}

// A device with less threadgroup memory gets smaller blocks, and a reason when no block fits.
BOOST_AUTO_TEST_CASE(geometry_fits_the_device) {
  const Call call = make_call({1, 2, 1, 33, 17, 256, 256}, fa::DType::kFloat32, {});
  metal::DeviceFacts facts = kM1;
  facts.max_threadgroup_memory = 18000;
  BOOST_TEST(choose_geometry(call.problem, kM1).block_rows == 16);
  BOOST_TEST(choose_geometry(call.problem, facts).block_rows == 8);
  BOOST_TEST(metal::supports(call.problem, facts).ok);
  for (const metal::Dispatch& dispatch : backward_of(call, facts).dispatches) {
    BOOST_TEST(threadgroup_memory(dispatch.key) <= facts.max_threadgroup_memory);
  }
  facts.max_threadgroup_memory = 4096;
  BOOST_TEST(metal::supports(call.problem, facts)
                 .reason.find("bytes of threadgroup memory, M1 has "
                              "4096") != std::string::npos);
  facts = kM1;
  facts.max_threads_per_threadgroup = 128;
  BOOST_TEST(metal::supports(call.problem, facts).reason ==
             "the kernels need 256 threads per threadgroup, M1 has 128");
}

BOOST_AUTO_TEST_CASE(arrays_longer_than_a_buffer_are_refused) {
  metal::DeviceFacts facts = kM1;
  facts.max_buffer_length = 1 << 20;
  const auto reason = [&](const Sizes& sizes, const metal_calls::Extras& extras = {}) {
    return metal::supports(make_call(sizes, fa::DType::kFloat16, {}, extras).problem, facts).reason;
  };
  BOOST_TEST(reason({1, 1, 1, 8, 8, 16, 16}).empty());
  BOOST_TEST(reason({1, 1, 1, 8, 32768, 16, 16}).empty());
  BOOST_TEST(reason({1, 1, 1, 8, 32769, 16, 16}) ==
             "key takes 1048608 bytes, a buffer of M1 holds at most 1048576");
  const fa::TensorView mask = fa::contiguous_view(nullptr, fa::DType::kBool, 1025, 1024);
  BOOST_TEST(reason({1, 1, 1, 1025, 1024, 16, 16}, {.mask = mask}).starts_with("mask takes"));
}

BOOST_AUTO_TEST_SUITE_END()
