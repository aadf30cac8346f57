// Sequences of 32768 on the GPU: forward, delta and backward one after the other, as a call runs
// them, against plain attention under the rule of tests/tolerance.py, over whole tensors.
//
//   long [FOLDER]   exit 1 when a result is off or a dropped weight is another; samples of some
//                   runs and the kept weights go to FOLDER, for long_cpu.py
//
// Of register kernels those for full blocks run (units full_*, dropout_*), and those that check
// rows (base_*) where the lengths fill no block; of staged kernels all.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "launch.cuh"
#include "long_samples.h"

namespace {

namespace abi = flashattn::metal::abi;
using namespace check;

constexpr Entry kEntries[] = {
#include "plan.inc"
};

constexpr int kLong = 32768;
constexpr double kDropoutP = 0.25;
// Every block of rows that a register kernel owns divides this many.
constexpr int kThreadgroupRows = 128;

bool starts_with(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

bool is_register(const Entry& e) { return starts_with(e.kernel, "register_"); }

// Whether calls would run the entry on such a problem.
bool suits(const Entry& e, const Problem& p, Storage storage, bool registers) {
  if (e.fault || e.splits() || e.storage != storage) return false;
  // One kernel for both designs and every dimension.
  if (e.kind == Kind::kDelta) return starts_with(e.unit, "base_");
  if (is_register(e) != registers || e.head_tile != p.head_dim || e.value_tile != p.value_dim) {
    return false;
  }
  if (p.dropout_p > 0) return starts_with(e.unit, "dropout_");
  const bool fills = p.seqlen_q % kThreadgroupRows == 0 && p.seqlen_k % kThreadgroupRows == 0;
  return starts_with(e.unit, registers && fills ? "full_" : "base_");
}

// One design's kernels on one problem. The first of several forward kernels feeds the backward
// ones.
struct Chain {
  const Problem& problem;
  Storage storage;
  const Rule& rule;
  Reference inputs;
  std::map<std::string, std::vector<float>> got;
  int runs = 0, failures = 0;

  void run(const Entry& entry) {
    const Problem& p = problem;
    Binding binding(entry, p, inputs);
    const auto start = std::chrono::steady_clock::now();
    bool good = launch(entry, p, binding);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    for (const Output& output : outputs(entry, inputs)) {
      std::vector<float> values = binding.result(output.slot, output.storage);
      if (entry.kind == Kind::kDelta) {
        inputs.delta.value.assign(values.begin(), values.end());
        return;
      }
      const Bound& bound = rule[output.name];
      const double error = largest_error(values, *bound.exact);
      const bool fine = error <= bound.allowed;
      std::printf("%-4s %-58s %-50s %-3s error %.2e = %.2f of the bound, naive %.2e, %.1f s\n",
                  fine ? "ok" : "FAIL", entry.kernel, p.name().c_str(), output.name, error,
                  error / bound.allowed, bound.naive, seconds.count());
      good = good && fine;
      keep(output.name, std::move(values));
    }
    ++runs;
    failures += good ? 0 : 1;
  }

 private:
  void keep(const std::string& name, std::vector<float> values) {
    if (got.count(name) != 0) return;
    if (name == "out") inputs.out.value.assign(values.begin(), values.end());
    if (name == "lse") inputs.lse.value.assign(values.begin(), values.end());
    got[name] = std::move(values);
  }
};

struct Total {
  int runs = 0, failures = 0;
};

constexpr Kind kOrder[] = {Kind::kForward,     Kind::kDelta,      Kind::kBackwardDq,
                           Kind::kBackwardDkv, Kind::kBackwardDv, Kind::kBackwardDk};

void run_problem(const Problem& p, Storage storage, const std::string& folder, Total& total) {
  const Reference inputs = make_inputs(p, storage);
  const auto start = std::chrono::steady_clock::now();
  const Rule rule(p, storage, inputs);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%s %s: both sides of the rule in %.1f s\n", storage_name(storage), p.name().c_str(),
              seconds.count());
  for (const bool registers : {true, false}) {
    Chain chain{p, storage, rule, inputs, {}};
    for (const Kind kind : kOrder) {
      if (kind != Kind::kForward && chain.got.empty()) continue;
      for (const Entry& entry : kEntries) {
        if (entry.kind == kind && suits(entry, p, storage, registers)) chain.run(entry);
      }
    }
    total.runs += chain.runs;
    total.failures += chain.failures;
    if (registers && !folder.empty()) Samples{folder}.write(p, storage, rule, chain.got);
  }
  std::fflush(stdout);
}

// Keys of a row in a window as wide as the head dimension, values and dout that are one-hot at
// their row's number modulo it: each weight that was kept, and no other, is an element of out, and
// one of dv. Elements (row, head, dim) of 0 and 1.
struct Kept {
  Problem problem;
  Reference inputs;
  std::vector<std::uint8_t> in_out, in_dv;
};

Kept make_kept(int dim, Storage storage) {
  Kept kept{{1, kLong, kLong, 4, 4, dim, dim, true, ' ', dim - 1, kDropoutP}, {}, {}, {}};
  const Problem& p = kept.problem;
  kept.inputs = make_inputs(p, storage);
  for (std::vector<float>* x : {&kept.inputs.value, &kept.inputs.dout}) {
    for (std::size_t e = 0; e < x->size(); ++e) {
      const int row = static_cast<int>(e / (static_cast<std::size_t>(p.query_heads) * dim));
      (*x)[e] = static_cast<int>(e % dim) == row % dim ? 1.0f : 0.0f;
    }
  }
  kept.in_out.assign(kept.inputs.dout.size(), 0);
  kept.in_dv.assign(kept.inputs.value.size(), 0);
  const std::uint32_t threshold = dropout_threshold(p);
  for (int i = 0; i < p.seqlen_q; ++i) {
    for (int h = 0; h < p.query_heads; ++h) {
      for (int j = std::max(0, p.visible_begin(i)); j < p.visible_end(i); ++j) {
        if (!keeps(p, threshold, 0, h, i, j)) continue;
        const auto at = [&](int row) {
          return (static_cast<std::size_t>(row) * p.query_heads + h) * dim;
        };
        kept.in_out[at(i) + j % dim] = 1;
        kept.in_dv[at(j) + i % dim] = 1;
      }
    }
  }
  return kept;
}

std::vector<std::uint8_t> pattern_of(const std::vector<float>& values) {
  std::vector<std::uint8_t> pattern(values.size());
  for (std::size_t e = 0; e < values.size(); ++e) pattern[e] = values[e] != 0 ? 1 : 0;
  return pattern;
}

void run_kept(int dim, Storage storage, const std::string& folder, Total& total) {
  Kept kept = make_kept(dim, storage);
  for (const Kind kind : {Kind::kForward, Kind::kBackwardDkv, Kind::kBackwardDv}) {
    for (const Entry& entry : kEntries) {
      if (entry.kind != kind) continue;
      if (!suits(entry, kept.problem, storage, true) && !suits(entry, kept.problem, storage, false))
        continue;
      const bool forward = kind == Kind::kForward;
      Binding binding(entry, kept.problem, kept.inputs);
      const bool good = launch(entry, kept.problem, binding);
      const std::vector<std::uint8_t> found =
          pattern_of(binding.result(forward ? abi::kBufferOut : abi::kBufferDv, storage));
      const bool same = found == (forward ? kept.in_out : kept.in_dv);
      std::printf("%-4s %-58s %-50s kept weights of %zu\n", good && same ? "ok" : "FAIL",
                  entry.kernel, kept.problem.name().c_str(), found.size());
      ++total.runs;
      total.failures += good && same ? 0 : 1;
      if (!forward) continue;
      const std::vector<float> lse = binding.result(abi::kBufferLse, Storage::kFloat32);
      kept.inputs.lse.value.assign(lse.begin(), lse.end());
      if (!folder.empty() && storage == Storage::kFloat32 && is_register(entry)) {
        write_kept(folder, kept.problem, found);
      }
    }
  }
}

std::vector<Problem> problems(int dim) {
  return {{1, kLong, kLong, 1, 1, dim, dim, false},
          {1, kLong, kLong, 1, 1, dim, dim, true},
          {1, kLong, kLong, 2, 1, dim, dim, false},
          {1, kLong, kLong, 1, 1, dim, dim, false, ' ', 2500},
          {1, kLong, kLong, 1, 1, dim, dim, false, ' ', -1, kDropoutP},
          {1, kLong, kLong + 1024, 4, 2, dim, dim, true, ' ', 9000, kDropoutP},
          {1, kLong + 3, kLong + 40, 2, 1, dim, dim, true}};
}

// The plain computation is itself held against problem.cpp's: everything that it can do, in small.
bool plain_is_right() {
  bool good = true;
  for (const int dim : {64, 128}) {
    for (const Problem& p :
         {Problem{1, 300, 300, 2, 2, dim, dim, false}, Problem{1, 301, 339, 4, 2, dim, dim, true},
          Problem{1, 300, 340, 2, 1, dim, dim, true, ' ', 70, kDropoutP},
          Problem{1, 300, 340, 2, 1, dim, dim, false, ' ', 11, kDropoutP}}) {
      const Reference r = make_reference(p, Storage::kFloat32, kSink);
      const PlainResult plain = plain_attention(p, Storage::kFloat32, r, Arithmetic::kExact);
      for (const auto& [got, want] : {std::pair{&plain.out, &r.out}, std::pair{&plain.lse, &r.lse},
                                      std::pair{&plain.dq, &r.dq}, std::pair{&plain.dk, &r.dk},
                                      std::pair{&plain.dv, &r.dv}}) {
        good = good && largest_error(*got, want->value) < 1e-12;
      }
      if (!good) std::printf("FAIL plain attention %s\n", p.name().c_str());
    }
  }
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string folder = count > 1 ? arguments[1] : "";
  Total total;
  if (!plain_is_right()) return 1;
  for (const Storage storage : {Storage::kFloat32, Storage::kFloat16, Storage::kBFloat16}) {
    for (const int dim : {64, 128}) {
      run_kept(dim, storage, folder, total);
      for (const Problem& p : problems(dim)) {
        const bool sampled = p.query_heads == 4 || (dim == 64 && storage == Storage::kFloat32 &&
                                                    !p.causal && p.window < 0);
        run_problem(p, storage, sampled ? folder : "", total);
      }
    }
  }
  std::printf("%d runs, %d failures\n", total.runs, total.failures);
  return total.failures > 0 ? 1 : 0;
}
