// The check program: every kernel of plan.inc on the GPU, each on its own, against float64.
//
//   check all | small | long      problems per kernel; exit 1 when a result is off
//   check fault NAME              the small problems on the unit with that planted fault
//   check list                    the entries
//
// Inputs that a kernel takes from an earlier one (lse, delta) come from the reference, so that a
// wrong kernel shows under its own name. Outputs are filled with NaN first.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "launch.cuh"

namespace {

namespace abi = flashattn::metal::abi;
using namespace check;

constexpr Entry kEntries[] = {
#include "plan.inc"
};

// Roundings of float32 that the sum of absolute terms may be off by: products, sums and one
// exponential, grown by the length of the sums' trees. The distance from the bound is printed, so
// that a drift shows.
constexpr double kRoundings = 32;

// Register kernels for float16 multiply weights, and gradients of scores, as halves: each term of a
// result is rounded once more.
double term_rounding(const Entry& e) {
  const bool half =
      e.storage == Storage::kFloat16 && std::string(e.kernel).rfind("register_", 0) == 0;
  return kRoundings * rounding_unit(Storage::kFloat32) +
         (half ? rounding_unit(Storage::kFloat16) : 0.0);
}

struct Outcome {
  double worst_error = 0;
  double worst_share = 0;  // of the bound
};

Outcome compare(const std::vector<float>& got, const Expected& expected, Storage storage,
                double of_terms) {
  Outcome outcome;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double want = expected.value[i];
    if (static_cast<double>(got[i]) == want || (std::isnan(got[i]) && std::isnan(want))) continue;
    const double error = std::fabs(got[i] - want);
    const double bound = of_terms * expected.magnitude[i] + storage_rounding(want, storage);
    const double share =
        std::isnan(error / bound) ? std::numeric_limits<double>::infinity() : error / bound;
    outcome.worst_error = std::fmax(outcome.worst_error, std::isnan(error) ? share : error);
    outcome.worst_share = std::fmax(outcome.worst_share, share);
  }
  return outcome;
}

// Several entries run the same problem, and the long ones take seconds on the CPU.
const Reference& cached_reference(const Problem& p, Storage storage) {
  static std::map<std::string, Reference> cache;
  const std::string key = p.name() + "|" + std::to_string(static_cast<int>(storage));
  const auto found = cache.find(key);
  return found != cache.end() ? found->second
                              : cache.emplace(key, make_reference(p, storage, kSink)).first->second;
}

bool run(const Entry& entry, const Problem& p) {
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
  bool good = launch(entry, p, binding);
  for (const Output& output : outputs(entry, reference)) {
    const Outcome o = compare(binding.result(output.slot, output.storage), *output.expected,
                              output.storage, term_rounding(entry));
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
  if (e.splits() && mode == "long") return {{1, 3, 3000, 4, 2, h, v, true}};
  if (e.splits())
    return {{2, 3, 150, 6, 2, h - 3, v - 5, true},
            {1, 8, 65, 2, 2, h, v, false},
            {1, 3, 150, 2, 1, h, v, true, 'v'}};
  // Kernels for rows that all exist, of dimensions that fill their tiles.
  if (e.has(abi::kConstantFullRows) && mode == "small") return {{1, 128, 64, 1, 1, h, v, false}};
  if (e.has(abi::kConstantFullRows) && e.has(abi::kConstantHasDropout))
    return {{1, 128, 256, 2, 1, h, v, true, ' ', 90, 0.3}};
  if (e.has(abi::kConstantFullRows)) return {{1, 128, 256, 2, 1, h, v, true}};
  if (mode == "long")
    return {{1, 2048, 2048, 4, 4, h, v, true}, {1, 1000, 3000, 4, 2, h, v, false}};
  if (mode == "small")
    return {{1, 37, 41, 2, 1, h - 3, v - 5, true},
            {1, 37, 41, 2, 1, h - 3, v - 5, true, 'v'},
            {1, 37, 41, 2, 1, h - 3, v - 5, true, 'q'}};
  std::vector<Problem> found = {
      {1, 1, 1, 1, 1, h, v, true},        {2, 33, 65, 4, 2, h, v, false},
      {1, 70, 40, 2, 1, h, v - 5, true},  {2, 128, 200, 3, 3, h - 3, v, true},
      {1, 37, 41, 2, 1, h, v, true, 'v'}, {1, 37, 41, 2, 1, h, v, true, 'q'},
      {1, 512, 512, 2, 1, h, v, true}};
  if (e.has(abi::kConstantHasDropout)) found.push_back({2, 70, 75, 4, 2, h, v, true, ' ', 30, 0.3});
  return found;
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
      if (entry.takes_options() && !p.has_options()) continue;
      // A row without a key has no log-sum-exp that a sink could be part of.
      if (entry.kind == Kind::kSinkGradient && p.causal && p.shift() < 0) continue;
      ++runs;
      failures += run(entry, p) ? 0 : 1;
    }
  }
  std::printf("%d runs, %d failures\n", runs, failures);
  return failures > 0 ? 1 : 0;
}
