// What the second and later calls of a shape cost on the host, on the simulated device: selectors
// sent, heap allocations, locks, new Metal objects. Held against counts.txt beside this file:
// allocations and compiled kernels have to be none, the rest may not grow. With
// FLASHATTN_RECORD_OVERHEAD=1 the file is written anew.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "device/faults.h"
#include "flashattn/attention.h"
#include "flashattn/kv_cache.h"
#include "metal/stored_tuning.h"
#include "metal/stream.h"
#include "overhead/counting.h"
#include "tensors.h"

namespace {

using flashattn::AttentionOptions;
using flashattn::Causal;
using flashattn::contiguous_view;
using flashattn::DType;
using flashattn::testing::Array;
using flashattn::testing::Asked;
using flashattn::testing::Call;
using flashattn::testing::Sizes;

const char* const kFile = FLASHATTN_SOURCE_DIR "/tests/metal/overhead/counts.txt";
constexpr Sizes kSmall{.batch = 2, .seqlen_q = 37, .seqlen_k = 50, .head_dim = 16, .value_dim = 16};
const AttentionOptions kOptions{.causal = Causal::kBottomRight, .backend = "metal"};

struct Row {
  std::string name;
  Asked asked;
};

std::vector<Row> recorded() {
  std::vector<Row> rows;
  std::ifstream file(kFile);
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream fields(line);
    Row row;
    fields >> row.name >> row.asked.messages >> row.asked.allocations >> row.asked.locks >>
        row.asked.objects;
    rows.push_back(row);
  }
  return rows;
}

// Of the third call of five, after which nothing may change any more.
Asked steady(const std::function<void()>& call) {
  call();
  call();
  const std::size_t kernels = flashattn::metal::device_pipelines().size();
  flashattn::testing::start_counting();
  call();
  const Asked third = flashattn::testing::stop_counting();
  call();
  flashattn::testing::start_counting();
  call();
  const Asked fifth = flashattn::testing::stop_counting();
  BOOST_TEST(flashattn::metal::device_pipelines().size() == kernels);
  BOOST_TEST(fifth.messages == third.messages);
  BOOST_TEST(fifth.allocations == third.allocations);
  BOOST_TEST(fifth.locks == third.locks);
  return fifth;
}

Asked forward_of(const Sizes& sizes) {
  Call call(sizes);
  return steady([&call] { flashattn::forward(call.forward_tensors(), kOptions); });
}

Asked backward_of(const Sizes& sizes) {
  Call call(sizes);
  flashattn::forward(call.forward_tensors(), kOptions);
  return steady([&call] { flashattn::backward(call.backward_tensors(), kOptions); });
}

// One row and two chunks of keys, with lengths.
Asked decode() {
  Call call({.batch = 2, .seqlen_q = 1, .seqlen_k = 300, .head_dim = 16, .value_dim = 16});
  std::vector<std::int32_t> lengths = {300, 270};
  return steady([&] {
    flashattn::ForwardTensors tensors = call.forward_tensors();
    tensors.inputs.kv_lengths = contiguous_view(lengths.data(), DType::kInt32, 2);
    flashattn::forward(tensors, kOptions);
  });
}

// The same through a cache that is appended to.
Asked cached_decode() {
  Call call({.batch = 2, .seqlen_q = 1, .seqlen_k = 300, .head_dim = 16, .value_dim = 16});
  Array added(DType::kFloat32, {2, 1, 2, 16});
  added.fill_normal(3);
  std::vector<std::int32_t> lengths = {299, 270};
  return steady([&] {
    flashattn::KvCacheTensors tensors;
    tensors.call = call.forward_tensors();
    tensors.call.inputs.kv_lengths = contiguous_view(lengths.data(), DType::kInt32, 2);
    tensors.new_key = tensors.new_value = added.view();
    flashattn::attention_kvcache(tensors, kOptions);
  });
}

// With every option that has an array.
Asked modified() {
  Call call(kSmall);
  Array mask(DType::kFloat32, {2, 4, 37, 50});
  Array slopes(DType::kFloat32, {4});
  Array sinks(DType::kFloat32, {4});
  for (Array* array : {&mask, &slopes, &sinks}) array->fill_normal(5);
  return steady([&] {
    flashattn::ForwardTensors tensors = call.forward_tensors();
    tensors.inputs.mask = mask.view();
    tensors.inputs.alibi_slopes = slopes.view();
    tensors.inputs.sinks = sinks.view();
    flashattn::forward(tensors, kOptions);
  });
}

// Left pending, and awaited alone.
Asked streamed() {
  Call call(kSmall);
  flashattn::metal::open_stream();
  const Asked asked = steady([&call] {
    flashattn::forward(call.forward_tensors(), kOptions);
    BOOST_TEST(flashattn::metal::Stream::synchronize() == "");
  });
  BOOST_TEST(flashattn::metal::Stream::close() == "");
  return asked;
}

void write(const std::vector<Row>& rows) {
  std::ofstream file(kFile);
  file << "# The host's part of a Metal call whose shape was met before: test_overhead.cpp, which\n"
          "# writes this with FLASHATTN_RECORD_OVERHEAD=1.\n"
          "# call, selectors sent, heap allocations, locks, Objective-C objects made\n";
  for (const Row& row : rows) {
    file << row.name << " " << row.asked.messages << " " << row.asked.allocations << " "
         << row.asked.locks << " " << row.asked.objects << "\n";
  }
}

BOOST_AUTO_TEST_SUITE(metal_overhead)

BOOST_AUTO_TEST_CASE(a_known_shape_costs_no_more_than_recorded) {
  const std::vector<Row> now = {
      {"forward", forward_of(kSmall)}, {"backward", backward_of(kSmall)}, {"decode", decode()},
      {"kvcache", cached_decode()},    {"options", modified()},           {"stream", streamed()}};
  for (const Row& row : now) {
    BOOST_TEST(row.asked.allocations == 0, row.name << ": " << row.asked.allocations);
  }
  if (std::getenv("FLASHATTN_RECORD_OVERHEAD") != nullptr) return write(now);
  const std::vector<Row> before = recorded();
  BOOST_REQUIRE(before.size() == now.size());
  for (std::size_t i = 0; i < now.size(); ++i) {
    BOOST_TEST(now[i].name == before[i].name);
    BOOST_TEST(now[i].asked.messages <= before[i].asked.messages, now[i].name);
    BOOST_TEST(now[i].asked.locks <= before[i].asked.locks, now[i].name);
    BOOST_TEST(now[i].asked.objects <= before[i].asked.objects, now[i].name);
  }
}

// As many as may be under way, the GPU standing still, and then some more.
BOOST_AUTO_TEST_CASE(a_full_stream_allocates_nothing) {
  Call call(kSmall);
  const auto fill = [&call](int more) {
    BOOST_TEST(flashattn::metal::Stream::synchronize() == "");
    flashattn_simulated_hold_work(1);
    for (int i = 0; i < flashattn::metal::kMostInFlight; ++i) {
      flashattn::forward(call.forward_tensors(), kOptions);
    }
    flashattn_simulated_hold_work(0);
    for (int i = 0; i < more; ++i) flashattn::forward(call.forward_tensors(), kOptions);
  };
  flashattn::metal::open_stream();
  fill(0);
  fill(20);
  flashattn::testing::start_counting();
  fill(20);
  BOOST_TEST(flashattn::testing::stop_counting().allocations == 0);
  BOOST_TEST(flashattn::metal::Stream::close() == "");
}

BOOST_AUTO_TEST_CASE(counts_are_of_this_program_alone) {
  flashattn::testing::start_counting();
  ::operator delete(::operator new(100));  // not an expression that a compiler may leave out
  const Asked asked = flashattn::testing::stop_counting();
  BOOST_TEST(asked.allocations == 1);
  BOOST_TEST(asked.messages == 0);
  flashattn::testing::start_counting();
  const auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  const auto buffer = NS::TransferPtr(device->newBuffer(64, MTL::ResourceStorageModeShared));
  const Asked of_buffer = flashattn::testing::stop_counting();
  BOOST_TEST(of_buffer.allocations == 0);  // the driver's
  BOOST_TEST(of_buffer.messages == 1);
  BOOST_TEST(of_buffer.objects == 1);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
