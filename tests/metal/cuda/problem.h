// A check problem on the CPU: sizes, random inputs, float64 results, and how far from them rounding
// may lead. Tensors are (batch, row, head, dim), contiguous; tables (batch, head, row).
#pragma once

#include <string>
#include <vector>

#include "storage.h"

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
  int window = -1;       // keys on either side of its own position that a row sees; -1: all
  double dropout_p = 0;  // see dropout.h

  std::string name() const;
  constexpr int group() const { return query_heads / kv_heads; }
  // Row i stands at key i + shift: causal and windows align the last row with the last key. It sees
  // the keys of [begin, end) that exist.
  constexpr int shift() const { return seqlen_k - seqlen_q; }
  constexpr int visible_begin(int i) const { return window < 0 ? 0 : i + shift() - window; }
  constexpr int visible_end(int i) const {
    if (causal) return i + 1 + shift();
    return window < 0 ? seqlen_k : i + 1 + shift() + window;
  }
  // The score matrix is stored for the mask's gradient: not for problems whose references are long.
  bool has_options() const { return seqlen_q <= 512 && seqlen_k <= 512; }
};

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

// Deterministic inputs, tables of their sizes, and no results.
Reference make_inputs(const Problem& problem, Storage storage);
// With results, on all cores. `sink`: the one whose gradient is taken.
Reference make_reference(const Problem& problem, Storage storage, float sink);
