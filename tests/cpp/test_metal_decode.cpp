// Few query rows in the Metal schedule: whose keys are split into chunks, and what runs then.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "core/make_visibility.h"
#include "metal/tuning.h"
#include "metal_calls.h"
#include "tensors.h"

namespace {

using namespace metal_calls;
using fa::DType;
using fa::testing::Array;

metal::DeviceFacts with_map(metal::LaneMap map) {
  metal::DeviceFacts facts = kM1;
  facts.float_map = facts.half_map = map;
  return facts;
}

const metal::DeviceFacts kApple = with_map(metal::LaneMap::kApple);

std::string kernels(const metal::Schedule& schedule) {
  std::string text;
  for (const metal::Dispatch& dispatch : schedule.dispatches) {
    text += to_string(dispatch.key) + " x" + std::to_string(dispatch.threadgroups) + "\n";
  }
  return text;
}

// Whether a forward call of so many rows and keys is split.
bool splits(int rows, int keys, const metal::DeviceFacts& facts) {
  const Call call = make_call({1, 2, 2, rows, keys, 64, 64}, DType::kFloat32, {});
  return forward_of(call, facts).dispatches.front().key.registers.split;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(metal_decode)

// Four chunks for each of 3 entries and 2 heads of keys; the merging has one threadgroup a head.
BOOST_AUTO_TEST_CASE(golden) {
  const Call call =
      make_call({3, 8, 2, 2, 777, 64, 32}, DType::kFloat16, {.causal = fa::Causal::kBottomRight});
  BOOST_TEST(
      to_string(forward_of(call, kApple)) ==
      "command_buffer 0: register_forward_float16_d64_v32_r32_c32_s4_apple+vectors+exact+split "
      "threadgroups 0+24 x 128 threads, 8208 B: query,key,value,row_intervals -> "
      "out,lse,status,partial_out,partial_state, 4 chunks of 256 keys\n"
      "command_buffer 0: merge_chunks_float16_r8 threadgroups 0+24 x 256 threads, 0 B: "
      "partial_out,partial_state -> out,lse\n"
      "rows of 0: [i-1073741824, i+776) below 777\n"
      "rows of 1: [i-1073741824, i+776) below 777\n"
      "rows of 2: [i-1073741824, i+776) below 777\n"
      "partial_out 24576 B\n"
      "partial_state 1536 B\n");
}

BOOST_AUTO_TEST_CASE(only_few_rows_of_many_keys_are_split) {
  BOOST_TEST(splits(1, metal::kChunkKeys + 1, kApple));
  BOOST_TEST(splits(metal::kFewRows, 5000, kApple));
  BOOST_TEST(!splits(1, metal::kChunkKeys, kApple));
  BOOST_TEST(!splits(metal::kFewRows + 1, 5000, kApple));
  BOOST_TEST(!splits(1, 5000, kM1));  // the staged kernels have no such path
  metal::DeviceFacts small = kApple;
  small.max_buffer_length = 2 * 2 * 20 * 64 * 4;  // parts of 20 chunks of two rows
  BOOST_TEST(splits(2, 20 * metal::kChunkKeys, small));
  BOOST_TEST(!splits(2, 20 * metal::kChunkKeys + 1, small));
}

// Keys past the longest entry's length are nobody's chunk.
BOOST_AUTO_TEST_CASE(chunks_follow_the_longest_entry) {
  Call call = make_call({2, 2, 2, 1, 5000, 64, 64}, DType::kFloat32, {});
  call.visibility.at(0).key_limit = 700;
  call.visibility.at(1).key_limit = 513;
  BOOST_TEST(forward_of(call, kApple).dispatches.front().params.chunks == 3U);
  call.visibility.at(0).key_limit = call.visibility.at(1).key_limit = 256;
  BOOST_TEST(!forward_of(call, kApple).dispatches.front().key.registers.split);
}

// A chunk is whole blocks of every kernel, so that its blocks are those of a call that is not
// split.
BOOST_AUTO_TEST_CASE(chunks_are_whole_blocks) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int tile : {16, 64, 80, 128, 256}) {
      const metal::KernelKey key{.dtype = dtype, .head_tile = tile, .value_tile = tile};
      const metal::KernelKey split = *choose_split(key, 8, kApple);
      BOOST_TEST(metal::kChunkKeys % split.block_columns == 0);
      BOOST_TEST(split.block_columns == choose_register(key, 1000, kApple)->block_columns);
      BOOST_TEST(split.registers.simdgroups == 4);
      BOOST_TEST(split.registers.held == (tile < 256));
      BOOST_TEST(choose_split(key, 1, kApple)->registers.simdgroups == 1);
    }
  }
}

// Sequences of a packed call: the short ones are split, the tall ones are not, whoever is beside
// them; the table of parts has room for the rows of the short ones alone.
BOOST_AUTO_TEST_CASE(packed_sequences_are_split_one_by_one) {
  Array query(DType::kFloat32, {43, 2, 16});
  Array key(DType::kFloat32, {700, 2, 16});
  Array value(DType::kFloat32, {700, 2, 16});
  Array out(DType::kFloat32, {43, 2, 16});
  Array lse(DType::kFloat32, {2, 43});
  std::vector<std::int32_t> cu_q = {0, 1, 41, 43};
  std::vector<std::int32_t> cu_k = {0, 300, 600, 700};
  fa::ForwardTensors tensors{
      .inputs = {.query = query.view(), .key = key.view(), .value = value.view()},
      .out = out.view(),
      .lse = lse.view()};
  tensors.inputs.cu_seqlens_q = fa::contiguous_view(cu_q.data(), DType::kInt32, 4);
  tensors.inputs.cu_seqlens_k = fa::contiguous_view(cu_k.data(), DType::kInt32, 4);
  const fa::AttentionProblem problem = make_problem(tensors, {});
  const fa::ForwardTensors views = with_batch_axis(tensors);
  const metal::Schedule schedule = flashattn::metal::schedule_forward(
      problem, views, make_visibilities(problem, views.inputs), {.facts = kApple});
  BOOST_TEST(kernels(schedule) ==
             "register_forward_float32_d16_v16_r8_c32_s1_apple+ragged+vectors+exact+split x12\n"
             "merge_chunks_float32_r8+ragged x6\n"
             "register_forward_float32_d16_v16_r64_c32_s4_apple+ragged+vectors+exact x6\n");
  for (const metal::Dispatch& dispatch : schedule.dispatches) {
    BOOST_TEST(dispatch.params.few_rows == 2U);
    BOOST_TEST(dispatch.params.chunks == 2U);
  }
  BOOST_TEST(schedule.scratch.at(0).bytes == 3 * 2 * 2 * 2 * 16 * 4);
}

BOOST_AUTO_TEST_SUITE_END()
