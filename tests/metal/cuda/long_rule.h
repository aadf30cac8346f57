// The rule of tests/tolerance.py for one problem: the exact results, how far the plain computation
// is from them, and how far a kernel may be, over whole tensors.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "plain_attention.h"

// As tests/tolerance.py has them.
constexpr double kForwardFactor = 2, kGradientFactor = 3;

// Largest |(x + 0.3 - 0.3) - x| in the storage type.
inline double storage_error(const std::vector<double>& exact, Storage storage) {
  const float third = round_to(0.3f, storage);
  double worst = 0;
  for (const double value : exact) {
    const float x = round_to(static_cast<float>(value), storage);
    if (!std::isfinite(x)) continue;
    const float moved = round_to(round_to(x + third, storage) - third, storage);
    worst = std::fmax(worst, std::fabs(static_cast<double>(moved) - x));
  }
  return worst;
}

template <class T>
double largest_error(const std::vector<T>& got, const std::vector<double>& exact) {
  double worst = got.size() == exact.size() ? 0 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < std::min(got.size(), exact.size()); ++i) {
    const double error = std::fabs(static_cast<double>(got[i]) - exact[i]);
    // A NaN is no small error.
    if (!(error <= worst))
      worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  }
  return worst;
}

// One tensor of a problem: what is right, how far the plain computation is from it, what is
// allowed.
struct Bound {
  const char* name;
  const std::vector<double>* exact;
  double naive, allowed;
};

// The two sides of the rule for one problem.
class Rule {
 public:
  Rule(const Problem& p, Storage storage, const Reference& inputs)
      : exact_(plain_attention(p, storage, inputs, Arithmetic::kExact)) {
    const PlainResult chain = plain_attention(p, storage, inputs, Arithmetic::kNaive);
    const PlainResult stored =
        plain_attention(p, storage, inputs, Arithmetic::kNaiveFromStored, &exact_);
    add("out", exact_.out, largest_error(chain.out, exact_.out), kForwardFactor, storage);
    add("lse", exact_.lse, largest_error(chain.lse, exact_.lse), kForwardFactor, Storage::kFloat32);
    add("dq", exact_.dq, worse(chain.dq, stored.dq, exact_.dq), kGradientFactor, storage);
    add("dk", exact_.dk, worse(chain.dk, stored.dk, exact_.dk), kGradientFactor, storage);
    add("dv", exact_.dv, worse(chain.dv, stored.dv, exact_.dv), kGradientFactor, storage);
  }
  Rule(const Rule&) = delete;
  Rule& operator=(const Rule&) = delete;

  const Bound& operator[](const std::string& name) const {
    return *std::find_if(bounds_.begin(), bounds_.end(),
                         [&](const Bound& bound) { return bound.name == name; });
  }
  const std::vector<Bound>& bounds() const { return bounds_; }

 private:
  static double worse(const std::vector<double>& a, const std::vector<double>& b,
                      const std::vector<double>& exact) {
    return std::fmax(largest_error(a, exact), largest_error(b, exact));
  }
  void add(const char* name, const std::vector<double>& exact, double naive, double factor,
           Storage storage) {
    bounds_.push_back({name, &exact, naive, factor * naive + 2 * storage_error(exact, storage)});
  }

  PlainResult exact_;
  std::vector<Bound> bounds_;
};
