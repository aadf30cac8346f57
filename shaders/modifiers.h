// Score modifiers: everything that a call may do to a score between scale * (q . k) and the
// product with V, as scalar functions of a score and its place (b, h, i, j). Every kernel, whatever
// its tiles, takes them from here. They rely on the host's ModifierParams and on function
// constants: an option that is off leaves no code. Causal masks, windows and lengths are
// visibility.h's.
#pragma once

#include <metal_stdlib>

#include "abi.h"
#include "storage.h"

constant bool has_modifiers [[function_constant(kConstantHasModifiers)]];
constant bool has_softcap [[function_constant(kConstantHasSoftcap)]];
constant bool has_alibi [[function_constant(kConstantHasAlibi)]];
constant bool has_mask [[function_constant(kConstantHasMask)]];
constant bool mask_is_bool [[function_constant(kConstantMaskIsBool)]];
constant bool mask_is_half [[function_constant(kConstantMaskIsHalf)]];
constant bool mask_is_bfloat [[function_constant(kConstantMaskIsBfloat)]];
constant bool has_sinks [[function_constant(kConstantHasSinks)]];
constant bool has_dropout [[function_constant(kConstantHasDropout)]];

// What a kernel declares to be able to modify scores. An argument is there only where its option is
// on, so the host binds nothing for the others.
#define FLASHATTN_MODIFIER_ARGUMENTS                                                            \
  constant ModifierParams *modifiers                                                            \
      [[buffer(kBufferModifiers), function_constant(has_modifiers)]],                           \
      device const uchar *mask [[buffer(kBufferMask), function_constant(has_mask)]],            \
      device const uchar *mask_tiles [[buffer(kBufferMaskTiles), function_constant(has_mask)]], \
      device const float *alibi_slopes                                                          \
      [[buffer(kBufferAlibiSlopes), function_constant(has_alibi)]],                             \
      device const FLASHATTN_INT64 *row_shifts                                                  \
      [[buffer(kBufferRowShifts), function_constant(has_alibi)]]

// With one of these a kernel works on scores in natural units, scale * (q . k) and what is made of
// it; without, it may leave the scale to the exponent. Dropout alone changes no score.
inline bool changes_scores() { return has_softcap || has_alibi || has_mask || has_sinks; }

// Where dropout's random words of one (b, h) come from.
struct DropoutHead {
  FLASHATTN_UINT64 first;        // number of element (b, h, 0, 0)
  FLASHATTN_UINT64 global_keys;  // numbers from one row to the next
  FLASHATTN_UINT64 offset;
  uint seed_low;
  uint seed_high;
  uint threshold;
  float scale;
};

// The modifiers of one (b, h), ready for its scores. Members of options that are off are undefined.
struct HeadModifiers {
  float softcap;
  float inverse_softcap;
  float slope;
  FLASHATTN_INT64 row_shift;
  device const uchar* mask;
  FLASHATTN_INT64 mask_first;  // element (b, h, 0, 0)
  FLASHATTN_INT64 mask_row;
  FLASHATTN_INT64 mask_key;
  DropoutHead dropout;
};

// A score after softcap, ALiBi and mask.
struct ModifiedScore {
  float value;       // -INFINITY where the mask excludes it
  float derivative;  // d value / d (scale * (q . k))
  bool visible;      // what the mask says; 0 takes the place of any product with a hidden one
};

inline DropoutHead dropout_head(constant ModifierParams& params, uint b, uint h) {
  DropoutHead head;
  const FLASHATTN_UINT64 row =
      (FLASHATTN_UINT64(b) * params.global_heads + params.head_start + h) * params.global_queries +
      params.query_start;
  head.first = row * params.global_keys + params.key_start;
  head.global_keys = params.global_keys;
  head.offset = params.dropout_offset;
  head.seed_low = params.seed_low;
  head.seed_high = params.seed_high;
  head.threshold = params.dropout_threshold;
  head.scale = params.dropout_scale;
  return head;
}

// The arguments are those of FLASHATTN_MODIFIER_ARGUMENTS.
inline HeadModifiers head_modifiers(constant ModifierParams* params, device const uchar* mask,
                                    device const float* alibi_slopes,
                                    device const FLASHATTN_INT64* row_shifts, uint b, uint h) {
  HeadModifiers head;
  if (has_softcap) {
    head.softcap = params->softcap;
    head.inverse_softcap = params->inverse_softcap;
  }
  if (has_alibi) {
    head.slope = alibi_slopes[FLASHATTN_INT64(b) * params->slopes_batch +
                              FLASHATTN_INT64(h) * params->slopes_head];
    head.row_shift = row_shifts[b];
  }
  if (has_mask) {
    head.mask = mask;
    head.mask_first =
        FLASHATTN_INT64(b) * params->mask.batch + FLASHATTN_INT64(h) * params->mask.head;
    head.mask_row = params->mask.row;
    head.mask_key = params->mask.key;
  }
  if (has_dropout) head.dropout = dropout_head(*params, b, h);
  return head;
}

// |pos(i) - pos(j)|, the distance that ALiBi's slope is multiplied with.
inline float alibi_distance(thread const HeadModifiers& head, uint i, uint j) {
  const FLASHATTN_INT64 distance = FLASHATTN_INT64(i) + head.row_shift - FLASHATTN_INT64(j);
  return float(distance < 0 ? -distance : distance);
}

// The mask at (i, j) as what is added to the score; a boolean one adds 0 or -INFINITY.
inline float mask_value(thread const HeadModifiers& head, uint i, uint j) {
  const FLASHATTN_INT64 at =
      head.mask_first + FLASHATTN_INT64(i) * head.mask_row + FLASHATTN_INT64(j) * head.mask_key;
  if (mask_is_bool) return head.mask[at] != 0 ? 0.0f : -INFINITY;
  if (mask_is_half) return to_float(((device const half*)head.mask)[at]);
  if (mask_is_bfloat) return to_float(((device const Bfloat16*)head.mask)[at]);
  return ((device const float*)head.mask)[at];
}

// `score` is scale * (q_i . k_j), and (i, j) lies inside the mask.
inline ModifiedScore modify_score(thread const HeadModifiers& head, float score, uint i, uint j) {
  ModifiedScore modified;
  modified.value = score;
  modified.derivative = 1.0f;
  modified.visible = true;
  if (has_softcap) {
    const float capped = metal::precise::tanh(score * head.inverse_softcap);
    modified.value = head.softcap * capped;
    modified.derivative = metal::fma(-capped, capped, 1.0f);
  }
  if (has_alibi) {
    modified.value = metal::fma(-head.slope, alibi_distance(head, i, j), modified.value);
  }
  if (has_mask) {
    const float added = mask_value(head, i, j);
    modified.visible = added != -INFINITY;
    modified.value = modified.visible ? modified.value + added : -INFINITY;
    if (!modified.visible) modified.derivative = 0.0f;  // of a score that may be NaN
  }
  return modified;
}

// What the mask lets through of the tile of scores that starts at (first_row, first_key): a
// MaskTileClass. A tile is at most as large as those of the table and does not cross their borders.
inline uint mask_tile_class(constant ModifierParams* params, device const uchar* mask_tiles, uint b,
                            uint h, uint first_row, uint first_key) {
  return mask_tiles[FLASHATTN_INT64(b) * params->mask_tiles.batch +
                    FLASHATTN_INT64(h) * params->mask_tiles.head +
                    FLASHATTN_INT64(first_row / params->mask_tile_rows) * params->mask_tiles.row +
                    FLASHATTN_INT64(first_key / params->mask_tile_keys) * params->mask_tiles.key];
}

// One Philox4x32-10 block: the four random words of the 128-bit counter (counter, 0).
inline uint4 philox4x32(FLASHATTN_UINT64 counter, uint key_low, uint key_high) {
  uint4 word = uint4(uint(counter), uint(counter >> 32), 0u, 0u);
#pragma clang loop unroll(full)
  for (uint round = 0; round < 10; ++round) {
    const uint high0 = metal::mulhi(0xd2511f53u, word.x);
    const uint high1 = metal::mulhi(0xcd9e8d57u, word.z);
    word = uint4(high1 ^ word.y ^ key_low, 0xcd9e8d57u * word.z, high0 ^ word.w ^ key_high,
                 0xd2511f53u * word.x);
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
  return word;
}

// What a weight is multiplied with: 0 where it is dropped.
inline float dropout_factor_of(thread const DropoutHead& head, uint word) {
  return (word >> 8) >= head.threshold ? head.scale : 0.0f;
}

// Word n % 4 of block n / 4 decides on element n.
inline float dropout_factor(thread const DropoutHead& head, uint i, uint j) {
  const FLASHATTN_UINT64 n = head.first + FLASHATTN_UINT64(i) * head.global_keys + j;
  const uint4 word = philox4x32(head.offset + n / 4, head.seed_low, head.seed_high);
  const uint2 pair = (n & 2) != 0 ? uint2(word.z, word.w) : uint2(word.x, word.y);
  return dropout_factor_of(head, (n & 1) != 0 ? pair.y : pair.x);
}

// The factors of keys j .. j + 3 of row i: one block where the row's numbers start at a multiple of
// four, else two.
inline float4 dropout_factors(thread const DropoutHead& head, uint i, uint j) {
  const FLASHATTN_UINT64 n = head.first + FLASHATTN_UINT64(i) * head.global_keys + j;
  uint4 word = philox4x32(head.offset + n / 4, head.seed_low, head.seed_high);
  const uint skipped = uint(n & 3);
  if (skipped != 0u) {
    const uint4 next = philox4x32(head.offset + n / 4 + 1, head.seed_low, head.seed_high);
    if (skipped == 1u) word = uint4(word.y, word.z, word.w, next.x);
    if (skipped == 2u) word = uint4(word.z, word.w, next.x, next.y);
    if (skipped == 3u) word = uint4(word.w, next.x, next.y, next.z);
  }
  return float4(dropout_factor_of(head, word.x), dropout_factor_of(head, word.y),
                dropout_factor_of(head, word.z), dropout_factor_of(head, word.w));
}

// Of the keys first + c whose bit c is set, those that the mask shows to row i.
template <uint block>
uint unmasked_keys(uint bits, thread const HeadModifiers& head, uint i, uint first) {
  if (!has_mask) return bits;
  for (uint c = 0; c < block; ++c) {
    if ((bits >> c & 1u) != 0u && mask_value(head, i, first + c) == -INFINITY) bits &= ~(1u << c);
  }
  return bits;
}

// Of the rows first + c whose bit c is set, those that the mask shows key j to.
template <uint block>
uint unmasked_rows(uint bits, thread const HeadModifiers& head, uint first, uint j) {
  if (!has_mask) return bits;
  for (uint c = 0; c < block; ++c) {
    if ((bits >> c & 1u) != 0u && mask_value(head, first + c, j) == -INFINITY) bits &= ~(1u << c);
  }
  return bits;
}

// lse, natural log, as pair_weight takes it: -INFINITY stands for a row without weights either way.
inline float exponent_of_lse(float lse) { return changes_scores() ? lse : lse * M_LOG2E_F; }

// P of a pair, computed again for the backward pass.
struct PairWeight {
  float p;           // before dropout; 0 where the mask excludes the pair
  float derivative;  // of the score by scale * (q . k)
  bool visible;      // what the mask says
};

// `product` is q_i . k_j, `row_lse` what exponent_of_lse made of a row's finite log-sum-exp.
inline PairWeight pair_weight(thread const HeadModifiers& head, float product, float scale,
                              float row_lse, uint i, uint j) {
  PairWeight weight;
  weight.derivative = 1.0f;
  weight.visible = true;
  if (changes_scores()) {
    const ModifiedScore s = modify_score(head, product * scale, i, j);
    weight.p = s.visible ? metal::exp2((s.value - row_lse) * M_LOG2E_F) : 0.0f;
    weight.derivative = s.derivative;
    weight.visible = s.visible;
  } else {
    weight.p = metal::exp2(product * scale - row_lse);
  }
  return weight;
}

// The scale that pair_weight takes.
inline float pair_scale(float scale, float scale_log2e) {
  return changes_scores() ? scale : scale_log2e;
}

// dS of a pair; dp is dO_i . V_j, and i, j decide whether its weight was dropped.
inline float score_gradient(thread const HeadModifiers& head, PairWeight weight, float dp,
                            float delta, uint i, uint j) {
  if (has_dropout) dp *= dropout_factor(head.dropout, i, j);
  return weight.visible ? weight.p * (dp - delta) : 0.0f;
}
