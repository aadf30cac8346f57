// A check problem on the CPU: sizes, random inputs, float64 results, and how far from them rounding
// may lead. Tensors are (batch, row, head, dim), contiguous; tables (batch, head, row).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct Problem {
  int batch = 1;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int query_heads = 1;
  int kv_heads = 1;
  int head_dim = 0;
  int value_dim = 0;
  bool causal = false;
  // 'v': the value of the last key is NaN; 'q': query and dout of the first row are; ' ': all
  // finite.
  char non_finite = ' ';

  std::string name() const;
  int group() const { return query_heads / kv_heads; }
  // Keys [0, end) are visible to row i: causal aligns the last row with the last key.
  int shift() const { return seqlen_k - seqlen_q; }
  // The score matrix is stored for the mask's gradient: not for problems whose references are long.
  bool has_options() const { return seqlen_q <= 512 && seqlen_k <= 512; }
  int visible_end(int i) const { return causal ? i + 1 + seqlen_k - seqlen_q : seqlen_k; }
};

enum class Storage { kFloat32, kFloat16, kBFloat16 };
double rounding_unit(Storage storage);  // largest relative error of one rounding
// Largest absolute error of rounding a value near x: below the normal range the relative one grows.
double storage_rounding(double x, Storage storage);

// One result in float64 and, per element, the sum of the absolute values of what was added up to
// get it: a float32 computation may be off by a few roundings of that sum, plus one rounding to the
// storage type.
struct Expected {
  std::vector<double> value;
  std::vector<double> magnitude;
};

struct Reference {
  std::vector<float> query, key, value, dout;  // already rounded to the storage type
  Expected out, lse, delta, dq, dk, dv;
  // Gradients of options that change nothing, (batch, seqlen_q, seqlen_k) and (batch, query_heads,
  // seqlen_q): of a mask of zeros that the heads share, and what each row adds to that of an ALiBi
  // slope of 0 whose keys stand where causal alignment puts them. Empty for long problems.
  Expected dmask, slope_rows;
  // Sums over the rows of each head: of slope_rows, and the gradient of a sink that no row knows
  // of.
  Expected slopes, sinks;
};

// Deterministic inputs, results on all cores. `sink`: the one whose gradient is taken.
Reference make_reference(const Problem& problem, Storage storage, float sink);

// Values of the storage type as bytes, and back.
std::vector<std::uint8_t> to_storage(const std::vector<float>& values, Storage storage);
std::vector<float> from_storage(const std::vector<std::uint8_t>& bytes, Storage storage);
