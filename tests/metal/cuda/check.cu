// The check program: every kernel of plan.inc on the GPU, each on its own, against float64.
//
//   check all | small | long      problems per kernel; exit 1 when a result is off
//   check fault NAME              the small problems on the unit with that planted fault
//   check list                    the entries
//
// Inputs that a kernel takes from an earlier one (lse, delta) come from the reference, so that a
// wrong kernel shows under its own name. Outputs are filled with NaN first.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "problem.h"
#include "registry.h"
#include "shaders/abi.h"

namespace {

namespace abi = flashattn::metal::abi;

#define CHECK_CUDA(call)                                                    \
  do {                                                                      \
    const cudaError_t status = (call);                                      \
    if (status != cudaSuccess) {                                            \
      std::fprintf(stderr, "CUDA error at %s:%d: %s\n", __FILE__, __LINE__, \
                   cudaGetErrorString(status));                             \
      std::exit(2);                                                         \
    }                                                                       \
  } while (0)

enum class Kind { kForward, kDelta, kBackwardDq, kBackwardDv, kBackwardDk };

struct Entry {
  const char* kernel;  // host name
  const char* unit;
  Kind kind;
  Storage storage;
  int head_tile, value_tile;
  int block_rows, threads;
  int constants;  // bit n: function constant n is on
  bool fault;

  bool accumulates() const {
    return (constants >> abi::kConstantAccumulate & 1) != 0 && kind != Kind::kDelta;
  }
  bool subtracts() const {
    return (constants >> abi::kConstantHasDlse & 1) != 0 && kind == Kind::kDelta;
  }
};

constexpr Entry kEntries[] = {
#include "plan.inc"
};

// Device memory with nothing around it: an access past the end is an access past an allocation.
class Buffer {
 public:
  explicit Buffer(const std::vector<std::uint8_t>& bytes) : bytes_(bytes.size()) {
    CHECK_CUDA(cudaMalloc(&pointer_, bytes_));
    CHECK_CUDA(cudaMemcpy(pointer_, bytes.data(), bytes_, cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(pointer_); }
  void* pointer() { return pointer_; }
  std::vector<std::uint8_t> read() const {
    std::vector<std::uint8_t> bytes(bytes_);
    CHECK_CUDA(cudaMemcpy(bytes.data(), pointer_, bytes_, cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  std::size_t bytes_;
  void* pointer_ = nullptr;
};

abi::TensorStrides strides(int rows, int heads, int dim) {
  const std::int64_t d = dim;
  return {d * heads * rows, d * heads, d, 1};
}

abi::AttentionParams make_params(const Problem& p) {
  abi::AttentionParams params{};
  params.query = params.dq = strides(p.seqlen_q, p.query_heads, p.head_dim);
  params.key = params.dk = strides(p.seqlen_k, p.kv_heads, p.head_dim);
  params.value = params.dv = strides(p.seqlen_k, p.kv_heads, p.value_dim);
  params.out = params.dout = strides(p.seqlen_q, p.query_heads, p.value_dim);
  params.lse = params.dlse = {std::int64_t{p.query_heads} * p.seqlen_q, p.seqlen_q, 1};
  params.query_heads = static_cast<unsigned>(p.query_heads);
  params.kv_heads = static_cast<unsigned>(p.kv_heads);
  params.heads_per_kv = static_cast<unsigned>(p.group());
  params.batch = static_cast<unsigned>(p.batch);
  params.seqlen_q = static_cast<unsigned>(p.seqlen_q);
  params.seqlen_k = static_cast<unsigned>(p.seqlen_k);
  params.head_dim = static_cast<unsigned>(p.head_dim);
  params.value_dim = static_cast<unsigned>(p.value_dim);
  params.scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  params.scale_log2e = params.scale * 1.44269504f;
  return params;
}

std::vector<std::uint8_t> row_intervals(const Problem& p) {
  constexpr int kFar = 1 << 30;
  const int end = p.causal ? 1 + p.seqlen_k - p.seqlen_q : kFar;
  const std::vector<abi::RowInterval> table(p.batch, abi::RowInterval{-kFar, end, p.seqlen_k, 0});
  std::vector<std::uint8_t> bytes(table.size() * sizeof table[0]);
  std::memcpy(bytes.data(), table.data(), bytes.size());
  return bytes;
}

std::vector<float> narrow(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

// What is in dq, dk and dv before a kernel that adds to them, and in dlse. Exact in every storage
// type.
constexpr float kBefore = 0.5f;
constexpr float kDlse = 0.25f;

// All buffers of one kernel run, by slot.
class Binding {
 public:
  Binding(const Entry& entry, const Problem& p, const Reference& r)
      : storage_(entry.storage), params_(make_params(p)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const auto nans = [&](std::size_t count) { return std::vector<float>(count, nan); };
    const auto before = [&](std::size_t count) {
      return std::vector<float>(count, entry.accumulates() ? kBefore : nan);
    };
    const bool backward = entry.kind != Kind::kForward && entry.kind != Kind::kDelta;
    set(abi::kBufferQuery, r.query, storage_);
    set(abi::kBufferKey, r.key, storage_);
    set(abi::kBufferValue, r.value, storage_);
    set(abi::kBufferDout, r.dout, storage_);
    set(abi::kBufferOut, entry.kind == Kind::kDelta ? narrow(r.out.value) : nans(r.dout.size()),
        storage_);
    set(abi::kBufferLse, backward ? narrow(r.lse.value) : nans(r.lse.value.size()),
        Storage::kFloat32);
    set(abi::kBufferDelta, backward ? narrow(r.delta.value) : nans(r.lse.value.size()),
        Storage::kFloat32);
    set(abi::kBufferDlse, std::vector<float>(r.lse.value.size(), kDlse), Storage::kFloat32);
    set(abi::kBufferDq, before(r.query.size()), storage_);
    set(abi::kBufferDk, before(r.key.size()), storage_);
    set(abi::kBufferDv, before(r.value.size()), storage_);
    buffers_[abi::kBufferRowIntervals] = std::make_unique<Buffer>(row_intervals(p));
  }

  void launch(const metal_cuda::KernelEntry& kernel, unsigned groups, unsigned threads) {
    std::vector<void*> pointers(kernel.arguments.size());
    std::vector<void*> arguments;
    for (std::size_t i = 0; i < kernel.arguments.size(); ++i) {
      const metal_cuda::ArgumentSlot& argument = kernel.arguments[i];
      if (argument.bytes > 0) {
        if (argument.slot != abi::kBufferParams || argument.bytes != sizeof params_) {
          std::fprintf(stderr, "slot %u: not the parameters of shaders/abi.h\n", argument.slot);
          std::exit(2);
        }
        arguments.push_back(&params_);
      } else {
        pointers[i] = buffers_.at(argument.slot)->pointer();
        arguments.push_back(&pointers[i]);
      }
    }
    CHECK_CUDA(cudaLaunchKernel(kernel.function, dim3(groups), dim3(threads), arguments.data(), 0,
                                nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  std::vector<float> result(unsigned slot, Storage storage) const {
    return from_storage(buffers_.at(slot)->read(), storage);
  }

 private:
  void set(unsigned slot, const std::vector<float>& values, Storage storage) {
    buffers_[slot] = std::make_unique<Buffer>(to_storage(values, storage));
  }

  Storage storage_;
  abi::AttentionParams params_;
  std::map<unsigned, std::unique_ptr<Buffer>> buffers_;
};

// Roundings of float32 that the sum of absolute terms may be off by: products, sums and one
// exponential, grown by the length of the sums' trees. The distance from the bound is printed, so
// that a drift shows.
constexpr double kRoundings = 32;

struct Outcome {
  double worst_error = 0;
  double worst_share = 0;  // of the bound
};

Outcome compare(const std::vector<float>& got, const Expected& expected, Storage storage) {
  Outcome outcome;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double want = expected.value[i];
    if (static_cast<double>(got[i]) == want || (std::isnan(got[i]) && std::isnan(want))) continue;
    const double error = std::fabs(got[i] - want);
    const double bound = kRoundings * rounding_unit(Storage::kFloat32) * expected.magnitude[i] +
                         storage_rounding(want, storage);
    const double share =
        std::isnan(error / bound) ? std::numeric_limits<double>::infinity() : error / bound;
    outcome.worst_error = std::fmax(outcome.worst_error, std::isnan(error) ? share : error);
    outcome.worst_share = std::fmax(outcome.worst_share, share);
  }
  return outcome;
}

struct Output {
  const char* name;
  unsigned slot;
  const Expected* expected;
  Storage storage;
};

std::vector<Output> outputs(const Entry& e, const Reference& r) {
  switch (e.kind) {
    case Kind::kForward:
      return {{"out", abi::kBufferOut, &r.out, e.storage},
              {"lse", abi::kBufferLse, &r.lse, Storage::kFloat32}};
    case Kind::kDelta:
      return {{"delta", abi::kBufferDelta, &r.delta, Storage::kFloat32}};
    case Kind::kBackwardDq:
      return {{"dq", abi::kBufferDq, &r.dq, e.storage}};
    case Kind::kBackwardDv:
      return {{"dv", abi::kBufferDv, &r.dv, e.storage}};
    case Kind::kBackwardDk:
      return {{"dk", abi::kBufferDk, &r.dk, e.storage}};
  }
  return {};
}

// Several entries run the same problem, and the long ones take seconds on the CPU.
const Reference& cached_reference(const Problem& p, Storage storage) {
  static std::map<std::string, Reference> cache;
  const std::string key = p.name() + "|" + std::to_string(static_cast<int>(storage));
  const auto found = cache.find(key);
  return found != cache.end() ? found->second
                              : cache.emplace(key, make_reference(p, storage)).first->second;
}

bool run(const Entry& entry, const Problem& p) {
  const auto found = metal_cuda::registry().find({entry.kernel, entry.unit});
  if (found == metal_cuda::registry().end()) {
    std::fprintf(stderr, "no kernel %s in %s\n", entry.kernel, entry.unit);
    std::exit(2);
  }
  Reference reference = cached_reference(p, entry.storage);
  // delta reads `out` as it was stored: one more rounding of each term, in the storage type.
  if (entry.kind == Kind::kDelta) {
    const double unit = kRoundings * rounding_unit(Storage::kFloat32);
    for (double& m : reference.delta.magnitude) m *= 1 + rounding_unit(entry.storage) / unit;
  }
  if (entry.accumulates()) {
    for (Expected* e : {&reference.dq, &reference.dk, &reference.dv}) {
      for (double& x : e->value) x += kBefore;
      for (double& x : e->magnitude) x += kBefore;
    }
  }
  if (entry.subtracts())
    for (double& x : reference.delta.value) x -= kDlse;
  Binding binding(entry, p, reference);
  const bool key_side = entry.kind == Kind::kBackwardDv || entry.kind == Kind::kBackwardDk;
  const int rows = key_side ? p.seqlen_k : p.seqlen_q;
  const int heads = key_side ? p.kv_heads : p.query_heads;
  const int groups = (rows + entry.block_rows - 1) / entry.block_rows * heads * p.batch;
  binding.launch(found->second, static_cast<unsigned>(groups),
                 static_cast<unsigned>(entry.threads));
  bool good = true;
  for (const Output& output : outputs(entry, reference)) {
    const Outcome o =
        compare(binding.result(output.slot, output.storage), *output.expected, output.storage);
    const bool fine = o.worst_share <= 1.0;
    std::printf("%-4s %-34s %-14s %-44s %-6s error %.2e = %.2f of the bound\n",
                fine ? "ok" : "FAIL", entry.kernel, entry.unit, p.name().c_str(), output.name,
                o.worst_error, o.worst_share);
    good = good && fine;
  }
  return good;
}

// Problems an entry's tiles hold: head_dim and value_dim at the tile's size, or a little below it.
std::vector<Problem> problems(const Entry& e, const std::string& mode) {
  const int h = e.head_tile == 0 ? 64 : e.head_tile;
  const int v = e.value_tile == 0 ? 64 : e.value_tile;
  if (mode == "long")
    return {{1, 2048, 2048, 4, 4, h, v, true}, {1, 1000, 3000, 4, 2, h, v, false}};
  if (mode == "small")
    return {{1, 37, 41, 2, 1, h - 3, v - 5, true},
            {1, 37, 41, 2, 1, h - 3, v - 5, true, 'v'},
            {1, 37, 41, 2, 1, h - 3, v - 5, true, 'q'}};
  return {{1, 1, 1, 1, 1, h, v, true},        {2, 33, 65, 4, 2, h, v, false},
          {1, 70, 40, 2, 1, h, v - 5, true},  {2, 128, 200, 3, 3, h - 3, v, true},
          {1, 37, 41, 2, 1, h, v, true, 'v'}, {1, 37, 41, 2, 1, h, v, true, 'q'},
          {1, 512, 512, 2, 1, h, v, true}};
}

}  // namespace

int main(int count, char** arguments) {
  const std::string mode = count > 1 ? arguments[1] : "all";
  const std::string fault = mode == "fault" && count > 2 ? arguments[2] : "";
  int failures = 0, runs = 0;
  for (const Entry& entry : kEntries) {
    if (mode == "list") {
      std::printf("%s %s%s\n", entry.kernel, entry.unit, entry.fault ? " fault" : "");
      continue;
    }
    if (fault.empty() ? entry.fault : fault != entry.unit) continue;
    for (const Problem& p : problems(entry, fault.empty() ? mode : "small")) {
      ++runs;
      failures += run(entry, p) ? 0 : 1;
    }
  }
  std::printf("%d runs, %d failures\n", runs, failures);
  return failures > 0 ? 1 : 0;
}
