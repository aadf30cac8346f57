// Scores as the forward register kernel exponentiates them, and the log-sum-exp that comes of it.
// merge_chunks.metal puts the parts of a split row together in the same units.
#pragma once

#include <metal_stdlib>

#include "modifiers.h"

using namespace metal;

// What turns the scores of a strip into exponents of 2 and into natural ones.
struct ScoreUnits {
  float sign;    // 1 unless the scale is negative, or 0, and has not been applied yet
  float factor;  // c, positive: what the difference of two scores is multiplied with
  float scale;   // what makes a score natural
};

inline ScoreUnits score_units(float scale, float scale_log2e) {
  ScoreUnits units;
  units.sign = 1.0f;
  units.factor = M_LOG2E_F;
  units.scale = 1.0f;
  if (changes_scores()) return units;
  units.sign = scale < 0.0f ? -1.0f : (scale > 0.0f ? 1.0f : 0.0f);
  // With scale 0 all scores are 0 and any factor will do.
  units.factor = units.sign == 0.0f ? 1.0f : units.sign * scale_log2e;
  units.scale = units.sign * scale;
  return units;
}

// Log-sum-exp of a row; without a weight it saw no key.
inline float row_lse(float row_max, float row_sum, ScoreUnits units) {
  return row_sum == 0.0f ? -INFINITY : fma(units.scale, row_max, log(row_sum));
}
