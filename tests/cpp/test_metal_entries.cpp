// The Metal schedule of ragged calls: the table of entries, the block table, and kernels that read
// them. Runs on every machine.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "core/make_visibility.h"
#include "metal/schedule.h"
#include "metal_calls.h"
#include "tensors.h"

namespace {

namespace fa = flashattn;
namespace metal = flashattn::metal;
using fa::DType;
using fa::testing::Array;

metal::Schedule forward_schedule(const fa::ForwardTensors& tensors) {
  const fa::AttentionProblem problem = make_problem(tensors, {});
  BOOST_TEST(metal::supports(problem, metal_calls::kM1).ok);
  const fa::ForwardTensors views = problem.packed ? with_batch_axis(tensors) : tensors;
  return metal::schedule_forward(problem, views, make_visibilities(problem, views.inputs),
                                 {.facts = metal_calls::kM1});
}

}  // namespace

BOOST_AUTO_TEST_SUITE(metal_entries)

BOOST_AUTO_TEST_CASE(packed_sequences) {
  Array query(DType::kFloat32, {60, 4, 16});
  Array key(DType::kFloat32, {30, 2, 16});
  Array value(DType::kFloat32, {30, 2, 16});
  Array out(DType::kFloat32, {60, 4, 16});
  Array lse(DType::kFloat32, {4, 60});
  std::vector<std::int32_t> cu_q = {0, 10, 10, 55};
  std::vector<std::int32_t> cu_k = {0, 12, 15, 30};
  fa::ForwardTensors tensors{
      .inputs = {.query = query.view(), .key = key.view(), .value = value.view()},
      .out = out.view(),
      .lse = lse.view()};
  tensors.inputs.cu_seqlens_q = fa::contiguous_view(cu_q.data(), DType::kInt32, 4);
  tensors.inputs.cu_seqlens_k = fa::contiguous_view(cu_k.data(), DType::kInt32, 4);
  const metal::Schedule schedule = forward_schedule(tensors);
  BOOST_REQUIRE(schedule.entries.size() == 3);
  const metal::abi::EntryRows& last = schedule.entries[2];
  BOOST_TEST(last.query_batch == 0U);
  BOOST_TEST(last.query_row == 10U);
  BOOST_TEST(last.key_row == 15U);
  BOOST_TEST(last.seqlen_q == 45U);
  BOOST_TEST(last.seqlen_k == 15U);
  BOOST_TEST(schedule.block_table.empty());
  // Three entries, four heads, two blocks of the longest sequence, in one dispatch.
  BOOST_TEST(to_string(schedule) ==
             "command_buffer 0: forward_float32_d16_v16_r32_c16+ragged threadgroups 0+24 x 128 "
             "threads, 6288 B: query,key,value,row_intervals,entries -> out,lse\n"
             "rows of 0: [i-1073741824, i+1073741824) below 12\n"
             "rows of 1: [i-1073741824, i+1073741824) below 3\n"
             "rows of 2: [i-1073741824, i+1073741824) below 15\n");
  BOOST_TEST(schedule.dispatches.at(0).params.table_rows == 60U);
}

BOOST_AUTO_TEST_CASE(pages_behind_left_padding) {
  Array query(DType::kFloat32, {2, 1, 4, 16});
  Array key(DType::kFloat32, {6, 8, 2, 16});
  Array value(DType::kFloat32, {6, 8, 2, 16});
  Array out(DType::kFloat32, {2, 1, 4, 16});
  Array lse(DType::kFloat32, {2, 4, 1});
  std::vector<std::int32_t> table = {5, 3, 0, 1, 2, -7};
  std::vector<std::int32_t> lengths = {20, 11};
  std::vector<std::int32_t> starts = {2, 0};
  fa::ForwardTensors tensors{
      .inputs = {.query = query.view(), .key = key.view(), .value = value.view()},
      .out = out.view(),
      .lse = lse.view()};
  tensors.inputs.block_table = fa::contiguous_view(table.data(), DType::kInt32, 2, 3);
  tensors.inputs.kv_lengths = fa::contiguous_view(lengths.data(), DType::kInt32, 2);
  tensors.inputs.kv_starts = fa::contiguous_view(starts.data(), DType::kInt32, 2);
  const metal::Schedule schedule = forward_schedule(tensors);
  BOOST_TEST(schedule.entries.at(0).key_row == 2U);
  BOOST_TEST(schedule.entries.at(0).page_rows == 8U);
  BOOST_TEST(schedule.entries.at(1).first_page == 3U);
  BOOST_TEST(schedule.block_table.at(4) == 2U);
  BOOST_TEST(schedule.row_intervals.at(0).key_limit == 18);
  BOOST_TEST(schedule.dispatches.at(0).key.paged);
  BOOST_TEST(to_string(schedule).find("entries,block_table -> out,lse") != std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()
