// Each entry forwards to the threadgroup that runs on this OS thread and counts what the counters
// want.
#include "runtime_table.h"

#include <cmath>
#include <cstring>
#include <string>

#include "../checker/access.h"
#include "dispatch_state.h"
#include "threadgroup.h"

namespace metal_sim {
namespace {

Threadgroup& group() { return *Threadgroup::current(); }

// Once per simdgroup: the collective operations are called by all 32 lanes.
bool first_lane() { return group().thread().index % 32u == 0; }

const void* exchange(const void* value, std::size_t bytes, abi::ExchangeKind kind, const char* name,
                     abi::Source source) {
  if (first_lane()) {
    Counters& counters = group().dispatch().counters;
    switch (kind) {
      case abi::ExchangeKind::kShuffle:
        ++counters.shuffles;
        break;
      case abi::ExchangeKind::kVote:
        ++counters.votes;
        break;
      case abi::ExchangeKind::kReduction:
        ++counters.reductions;
        break;
    }
  }
  return group().exchange(value, bytes, name, source);
}

const ConstantValue* find_constant(std::uint32_t index) {
  for (const ConstantValue& value : group().dispatch().constants)
    if (value.index == index) return &value;
  return nullptr;
}

std::uint64_t constant(std::uint32_t index) {
  std::uint64_t bits = 0;
  if (const ConstantValue* value = find_constant(index)) {
    std::memcpy(&bits, value->bytes.data(), sizeof bits);
  } else if (!group().measuring()) {
    group().report(
        "constant|" + std::to_string(index),
        "function constant " + std::to_string(index) + " is used but was given no value");
  }
  return bits;
}

float unary_math(abi::UnaryMath function, float x) {
  Counters& counters = group().dispatch().counters;
  switch (function) {
    case abi::UnaryMath::kExp:
      ++counters.exponentials;
      return std::exp(x);
    case abi::UnaryMath::kExp2:
      ++counters.exponentials;
      return std::exp2(x);
    case abi::UnaryMath::kLog:
      ++counters.logarithms;
      return std::log(x);
    case abi::UnaryMath::kLog2:
      ++counters.logarithms;
      return std::log2(x);
    case abi::UnaryMath::kTanh:
      return std::tanh(x);
    case abi::UnaryMath::kSin:
      return std::sin(x);
    case abi::UnaryMath::kCos:
      return std::cos(x);
    case abi::UnaryMath::kErf:
      return std::erf(x);
  }
  return x;
}

}  // namespace

const abi::Runtime& runtime_table() {
  static const abi::Runtime table = [] {
    abi::Runtime t{};
    t.threadgroup_array = [](std::uint32_t site, std::size_t bytes, std::size_t alignment,
                             const char* name) {
      return group().declared_array(site, bytes, alignment, name);
    };
    t.declarations_end = [] { group().declarations_end(); };
    t.barrier = [](abi::BarrierScope scope, std::int32_t flags, abi::Source source) {
      group().barrier(scope, flags, source);
    };
    t.exchange = exchange;
    t.multiply = [](float* d, const float* a, const float* b, const float* c, abi::Source source) {
      group().multiply(d, a, b, c, source);
    };
    t.lane = [] { return static_cast<int>(group().thread().index % 32u); };
    t.matrix_positions = []() -> const std::uint8_t* {
      return group().dispatch().map.data() + (group().thread().index % 32u) * 2;
    };
    t.matrix_access_begin = [](const void* pointer, std::size_t bytes, bool store,
                               abi::Source source) {
      group().checker().matrix_access_begin(pointer, bytes, store, source);
    };
    t.matrix_access_end = [] { group().checker().matrix_access_end(); };
    t.constant = constant;
    t.constant_defined = [](std::uint32_t index) { return find_constant(index) != nullptr; };
    t.unary_math = unary_math;
    t.pow = [](float x, float y) { return std::pow(x, y); };
    t.access = [](const void* pointer, std::size_t bytes, bool write, bool atomic,
                  const void* program_counter) {
      group().checker().access(pointer, bytes, write, atomic, program_counter);
    };
    return t;
  }();
  return table;
}

}  // namespace metal_sim
