// The online softmax of the forward register kernel: running maxima and sums of the rows in its
// lanes, and scores that become weights.
#pragma once

#include "exchange.h"
#include "score_units.h"
#include "tile.h"

// What a row has seen so far. A lane holds two elements of each of its fragments: lane_rows is 1
// where both are known to stand in one row. Sums stay per element until the end.
template <uint row_fragments, uint lane_rows>
struct SoftmaxState {
  float row_max[row_fragments][lane_rows];  // in the units of S
  float row_sum[row_fragments][2];
};

// sink: the head's extra logit, -INFINITY for none; it has a weight of 1 in column 0 of each row.
template <uint row_fragments, uint lane_rows>
void start_softmax(thread SoftmaxState<row_fragments, lane_rows>& state, float sink, LaneMap map) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    // Finite, so that a hidden score less this maximum is -inf and not NaN; and no more than any
    // finite score, which then has a weight.
#pragma clang loop unroll(full)
    for (uint e = 0; e < lane_rows; ++e) {
      state.row_max[r][e] = sink == -INFINITY ? -FLT_MAX : sink;
    }
    state.row_sum[r][0] = sink != -INFINITY && map.column0 == 0 ? 1.0f : 0.0f;
    state.row_sum[r][1] = sink != -INFINITY && map.column1 == 0 ? 1.0f : 0.0f;
  }
}

template <uint row_fragments, uint columns>
void scale_fragments(thread simdgroup_float8x8 (&S)[row_fragments][columns], float factor) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) scale_strip(S[r], factor);
}

// Raises the running maxima to those of S where they moved, and scales what was summed before.
template <uint exchange, uint row_fragments, uint lane_rows, uint columns, uint value_fragments>
void raise_maxima(thread SoftmaxState<row_fragments, lane_rows>& state,
                  thread simdgroup_float8x8 (&O)[row_fragments][value_fragments],
                  thread simdgroup_float8x8 (&S)[row_fragments][columns], float factor,
                  float max_slack, LaneMap map, threadgroup float* table, uint lane) {
  float block_max[row_fragments][2];
  bool moved = false;
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    float max0 = S[r][0].thread_elements()[0];
    float max1 = S[r][0].thread_elements()[1];
#pragma clang loop unroll(full)
    for (uint j = 1; j < columns; ++j) {
      max0 = max(max0, S[r][j].thread_elements()[0]);
      max1 = max(max1, S[r][j].thread_elements()[1]);
    }
    block_max[r][0] = max0;
    block_max[r][1] = max1;
    moved = moved || (max0 - state.row_max[r][0]) * factor > max_slack ||
            (max1 - state.row_max[r][lane_rows - 1]) * factor > max_slack;
  }
  if (!simd_any(moved)) return;
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    combine_rows<exchange>(block_max[r][0], block_max[r][1], map, table, lane, MaxOf());
    float correction[lane_rows];
#pragma clang loop unroll(full)
    for (uint e = 0; e < lane_rows; ++e) {
      const float before = state.row_max[r][e];
      const bool rises = (block_max[r][e] - before) * factor > max_slack;
      const float after = rises ? block_max[r][e] : before;
      correction[e] = fast::exp2((before - after) * factor);
      state.row_max[r][e] = after;
    }
    state.row_sum[r][0] *= correction[0];
    state.row_sum[r][1] *= correction[lane_rows - 1];
#pragma clang loop unroll(full)
    for (uint d = 0; d < value_fragments; ++d) {
      O[r][d].thread_elements()[0] *= correction[0];
      O[r][d].thread_elements()[1] *= correction[lane_rows - 1];
    }
  }
}

// S becomes P = exp2(factor (S - row_max)) in place. The difference is taken before it is scaled:
// it is exact near the maximum, so that a row's largest score has a weight of 1 and not of
// nearly 1.
template <uint row_fragments, uint lane_rows, uint columns>
void exponentiate(thread simdgroup_float8x8 (&S)[row_fragments][columns],
                  thread SoftmaxState<row_fragments, lane_rows>& state, float factor) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    const float max0 = state.row_max[r][0];
    const float max1 = state.row_max[r][lane_rows - 1];
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) {
      const float p0 = fast::exp2((S[r][j].thread_elements()[0] - max0) * factor);
      const float p1 = fast::exp2((S[r][j].thread_elements()[1] - max1) * factor);
      state.row_sum[r][0] += p0;
      state.row_sum[r][1] += p1;
      S[r][j].thread_elements()[0] = p0;
      S[r][j].thread_elements()[1] = p1;
    }
  }
}
