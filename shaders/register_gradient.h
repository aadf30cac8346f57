// Score gradients in registers, shared by dQ (rows are queries) and by dK and dV (rows are keys).
//   P = exp2(c S - L');  dS = P (dP - delta);  L' is the log-sum-exp in the units of the exponent
#pragma once

#include "block_ranges.h"
#include "register_modifiers.h"
#include "register_tile.h"

// A row's log-sum-exp as an exponent takes it: +inf, and so P = 0, for a row without weights.
inline float gradient_lse(float lse) { return lse == -INFINITY ? INFINITY : exponent_of_lse(lse); }

// exp2's argument for one score. Natural scores may be as large as float goes: difference first.
inline float weight_from_lse(float score, float lse, float scale_log2e) {
  if (changes_scores()) return fast::exp2((score - lse) * M_LOG2E_F);
  return fast::exp2(fma(score, scale_log2e, -lse));
}

// With softcap, what a natural score's gradient is multiplied with on its way to the product's.
template <uint columns>
void softcap_derivatives(thread simdgroup_float8x8 (&derivatives)[columns],
                         thread simdgroup_float8x8 (&products)[columns],
                         thread const HeadModifiers& head, float scale) {
  const float factor = scale * head.inverse_softcap;
#pragma clang loop unroll(full)
  for (uint j = 0; j < columns; ++j) {
#pragma clang loop unroll(full)
    for (uint e = 0; e < 2; ++e) {
      const float capped = precise::tanh(products[j].thread_elements()[e] * factor);
      // A NaN score has a NaN gradient where it is seen and must not spoil the 0 where it is not.
      derivatives[j].thread_elements()[e] = isnan(capped) ? 1.0f : fma(-capped, capped, 1.0f);
    }
  }
}

template <uint columns>
void multiply_elements(thread simdgroup_float8x8 (&strip)[columns],
                       thread simdgroup_float8x8 (&factors)[columns]) {
#pragma clang loop unroll(full)
  for (uint j = 0; j < columns; ++j) {
    strip[j].thread_elements()[0] *= factors[j].thread_elements()[0];
    strip[j].thread_elements()[1] *= factors[j].thread_elements()[1];
  }
}

template <uint row_fragments, uint columns>
void multiply_strips(thread simdgroup_float8x8 (&strips)[row_fragments][columns],
                     thread simdgroup_float8x8 (&factors)[row_fragments][columns]) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) multiply_elements(strips[r], factors[r]);
}
