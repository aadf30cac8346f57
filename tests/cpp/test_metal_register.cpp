// Register kernels in the Metal schedule: when they are chosen, what a pass becomes, and what must
// not depend on the problem's lengths.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "metal/tuning.h"
#include "metal_calls.h"

namespace {

using namespace metal_calls;

metal::DeviceFacts with_map(metal::LaneMap map) {
  metal::DeviceFacts facts = kM1;
  facts.float_map = facts.half_map = map;
  return facts;
}

const metal::DeviceFacts kApple = with_map(metal::LaneMap::kApple);
const metal::DeviceFacts kAny = with_map(metal::LaneMap::kAny);

std::string kernels(const metal::Schedule& schedule) {
  std::string text;
  for (const metal::Dispatch& dispatch : schedule.dispatches) {
    text += to_string(dispatch.key) + " " + std::to_string(dispatch.params.first_block) + "+" +
            std::to_string(dispatch.params.blocks) + " x" + std::to_string(dispatch.threadgroups) +
            "\n";
  }
  return text;
}

metal::Schedule selecting_forward_of(const Call& call, const metal::DeviceFacts& facts) {
  const fa::ForwardTensors tensors{
      .inputs = call.tensors.inputs, .out = call.tensors.out, .lse = call.tensors.lse};
  return metal::schedule_forward(call.problem, tensors, call.visibility,
                                 {.facts = facts, .selects = true});
}

}  // namespace

BOOST_AUTO_TEST_SUITE(metal_register)

// 100 rows are one whole block of 64 and a ragged one, for each of 2 x 8 heads.
BOOST_AUTO_TEST_CASE(a_pass_is_whole_blocks_and_a_ragged_one) {
  const Call call = make_call({2, 8, 2, 100, 130, 64, 64}, fa::DType::kFloat32, {});
  BOOST_TEST(kernels(forward_of(call, kApple)) ==
             "register_forward_float32_d64_v64_r64_c32_s4_apple+full+vectors+exact 0+1 x16\n"
             "register_forward_float32_d64_v64_r64_c32_s4_apple+vectors+exact 1+1 x16\n");
  BOOST_TEST(kernels(selecting_forward_of(call, kAny)) ==
             "register_forward_float32_d64_v64_r64_c32_s8_any+full+vectors+exact+selects 0+1 x16\n"
             "register_forward_float32_d64_v64_r64_c32_s8_any+vectors+exact+selects 1+1 x16\n");
  BOOST_TEST(metal::has_status(forward_of(call, kAny)));
  BOOST_TEST(!metal::has_status(forward_of(call, kM1)));
}

BOOST_AUTO_TEST_CASE(small_tiles_fuse_the_key_side_and_large_ones_do_not) {
  const Call small = make_call({1, 2, 1, 64, 64, 60, 33}, fa::DType::kFloat32, {});
  BOOST_TEST(kernels(backward_of(small, kApple)) ==
             "delta_float32_r8 0+0 x16\n"
             "register_backward_dq_float32_d64_v48_r64_c32_s8_apple+full 0+1 x2\n"
             "register_backward_dkv_float32_d64_v48_r32_c16_s4_any+full 0+2 x2\n");
  const Call large = make_call({1, 2, 1, 64, 64, 128, 128}, fa::DType::kFloat16, {});
  BOOST_TEST(
      kernels(backward_of(large, kApple)) ==
      "delta_float16_r8 0+0 x16\n"
      "register_backward_dq_float16_d128_v128_r64_c32_s8_apple+full+vectors+exact 0+1 x2\n"
      "register_backward_dv_float16_d128_v128_r64_c32_s8_read_value_apple+full+vectors+exact 0+1 "
      "x1\n"
      "register_backward_dk_float16_d128_v128_r64_c16_s8_apple+full+vectors+exact 0+1 x1\n");
}

// Lengths change how many rows a threadgroup owns, never the block of the other side, which is what
// the bits of a row depend on.
BOOST_AUTO_TEST_CASE(lengths_do_not_change_the_other_side) {
  for (const fa::DType dtype : {fa::DType::kFloat32, fa::DType::kFloat16, fa::DType::kBFloat16}) {
    for (const int tile : {16, 64, 80, 128, 160, 256}) {
      for (const auto kind : {metal::KernelKind::kForward, metal::KernelKind::kBackwardDq,
                              metal::KernelKind::kBackwardDv, metal::KernelKind::kBackwardDk,
                              metal::KernelKind::kBackwardDkv}) {
        const metal::KernelKey key{
            .kind = kind, .dtype = dtype, .head_tile = tile, .value_tile = tile};
        const int columns = choose_register(key, 1 << 20, kApple)->block_columns;
        for (const std::int64_t rows : {1, 8, 9, 40, 100}) {
          for (const metal::DeviceFacts& facts : {kApple, kAny}) {
            const auto found = choose_register(key, rows, facts);
            BOOST_TEST_REQUIRE((found || (tile > 128 && facts.float_map == metal::LaneMap::kAny)));
            if (!found) continue;
            const metal::KernelKey& chosen = *found;
            BOOST_TEST_REQUIRE(chosen.block_columns == columns);
            BOOST_TEST_REQUIRE(chosen.block_rows ==
                               8 * chosen.registers.row_fragments * chosen.registers.simdgroups);
            BOOST_TEST_REQUIRE(metal::kMaskTile % columns == 0);
            BOOST_TEST_REQUIRE(threadgroup_memory(chosen) <= kM1.max_threadgroup_memory);
          }
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(staged_kernels_do_the_rest) {
  const metal::KernelKey wide{
      .kind = metal::KernelKind::kBackwardDk, .head_tile = 64, .value_tile = 160};
  BOOST_TEST(choose_register(wide, 100, kApple)->block_columns == 8);
  BOOST_TEST(!choose_register(wide, 100, kAny).has_value());  // too many registers
  const metal::KernelKey key{.head_tile = 64, .value_tile = 64};
  BOOST_TEST(!choose_register(key, 100, kM1).has_value());
  metal::DeviceFacts small = kApple;
  small.max_threadgroup_memory = 8192;
  BOOST_TEST(!choose_register(key, 100, small).has_value());
  metal::DeviceFacts no_half = kApple;
  no_half.half_map = metal::LaneMap::kUnknown;
  BOOST_TEST(choose_register(key, 100, no_half).has_value());
  metal::KernelKey half = key;
  half.dtype = fa::DType::kFloat16;
  BOOST_TEST(!choose_register(half, 100, no_half).has_value());
}

// Rows that are not contiguous, run backwards or lie very far apart are read one by one.
BOOST_AUTO_TEST_CASE(strides_decide_about_vectors) {
  const Call call = make_call({1, 1, 1, 64, 64, 64, 64}, fa::DType::kFloat32, {});
  const auto vectors = [&](std::int64_t row, std::int64_t dim) {
    Call changed = call;
    changed.tensors.inputs.key.stride[1] = row;
    changed.tensors.inputs.key.stride[3] = dim;
    return forward_of(changed, kApple).dispatches.at(0).key.registers.vector_rows;
  };
  BOOST_TEST(vectors(64, 1));
  BOOST_TEST(!vectors(0, 1));
  BOOST_TEST(!vectors(-64, 1));
  BOOST_TEST(!vectors(64, 2));
  BOOST_TEST(!vectors(std::int64_t{1} << 24, 1));
}

BOOST_AUTO_TEST_CASE(names_tell_instances_apart) {
  metal::KernelKey key = *choose_register({.kind = metal::KernelKind::kBackwardDk,
                                           .dtype = fa::DType::kBFloat16,
                                           .head_tile = 128,
                                           .value_tile = 96},
                                          1000, kApple);
  BOOST_TEST(shader_file(key) == "register_dkv");
  BOOST_TEST(instantiation(key) ==
             "FLASHATTN_INSTANTIATE(\"register_backward_dk_bfloat16_d128_v96_r64_c16_s8_read_value_"
             "apple\", register_dkv, Bfloat16, float, 128, 96, 1, 16, 8, 16, 1, false, true, "
             "kExchangeApple)");
  BOOST_TEST(threads_per_threadgroup(key) == 256);
}

BOOST_AUTO_TEST_SUITE_END()
