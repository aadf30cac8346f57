// Score modifiers on scores in registers: modifiers.h element by element, for the elements that a
// lane holds of a strip of fragments. An option that is off leaves no code.
#pragma once

#include "block_ranges.h"
#include "modifiers.h"
#include "register_tile.h"

// Whether the mask lets through anything of `rows` rows from first_row on and of the block of keys
// at first_key. Answers for tiles of the mask's class table, which a block of keys does not cross.
inline bool mask_shows(constant ModifierParams* modifiers, device const uchar* mask_tiles, uint b,
                       uint h, uint first_row, uint rows, uint seqlen_q, uint first_key) {
  if (!has_mask) return true;
  const uint step = modifiers->mask_tile_rows;
  const uint end = min(first_row + rows, seqlen_q);
  for (uint row = first_row / step * step; row < end; row += step) {
    if (mask_tile_class(modifiers, mask_tiles, b, h, row, first_key) != kMaskTileNone) return true;
  }
  return false;
}

// The same for a block of query rows at first_row, which does not cross a tile, and `keys` keys.
inline bool mask_shows_keys(constant ModifierParams* modifiers, device const uchar* mask_tiles,
                            uint b, uint h, uint first_row, uint first_key, uint keys,
                            uint seqlen_k) {
  if (!has_mask) return true;
  const uint step = modifiers->mask_tile_keys;
  const uint end = min(first_key + keys, seqlen_k);
  for (uint key = first_key / step * step; key < end; key += step) {
    if (mask_tile_class(modifiers, mask_tiles, b, h, first_row, key) != kMaskTileNone) return true;
  }
  return false;
}

// Where a strip stands among the scores: its rows are queries or, transposed, keys.
struct StripPlace {
  uint row0;  // of the lane's two elements
  uint row1;
  uint column0;  // of its elements of fragment 0
  uint column1;
};

inline StripPlace strip_place(uint first_row, uint first_column, LaneMap map) {
  StripPlace place;
  place.row0 = first_row + map.row0;
  place.row1 = first_row + map.row1;
  place.column0 = first_column + map.column0;
  place.column1 = first_column + map.column1;
  return place;
}

// The modified score of one element: 0 where it is hidden, which `bits` then says.
template <uint columns>
void modify_element(thread simdgroup_float8x8 (&strip)[columns], uint j, uint element,
                    thread uint& bits, thread const HeadModifiers& head, float scale, uint query,
                    uint key) {
  if (!has_element(bits, j, element)) return;
  const ModifiedScore score =
      modify_score(head, strip[j].thread_elements()[element] * scale, query, key);
  strip[j].thread_elements()[element] = score.value;
  if (!score.visible) bits &= ~(1u << (2 * j + element));
}

// Products become modified scores; bits lose what the mask hides. transposed: the strip's rows are
// keys.
template <bool transposed, uint columns>
void modify_strip(thread simdgroup_float8x8 (&strip)[columns], thread uint& bits,
                  thread const HeadModifiers& head, float scale, StripPlace place) {
#pragma clang loop unroll(full)
  for (uint j = 0; j < columns; ++j) {
    const uint column0 = place.column0 + j * kFragment;
    const uint column1 = place.column1 + j * kFragment;
    modify_element(strip, j, 0, bits, head, scale, transposed ? column0 : place.row0,
                   transposed ? place.row0 : column0);
    modify_element(strip, j, 1, bits, head, scale, transposed ? column1 : place.row1,
                   transposed ? place.row1 : column1);
  }
}

// The factor of element `element` of fragment j; 1 for a hidden one.
template <bool transposed>
float strip_dropout(uint bits, uint j, uint element, thread const DropoutHead& head,
                    StripPlace place) {
  if (!has_element(bits, j, element)) return 1.0f;
  const uint row = element == 0 ? place.row0 : place.row1;
  const uint column = (element == 0 ? place.column0 : place.column1) + j * kFragment;
  return transposed ? dropout_factor(head, column, row) : dropout_factor(head, row, column);
}

inline StripPlace strip_below(StripPlace place, uint r) {
  place.row0 += r * kFragment;
  place.row1 += r * kFragment;
  return place;
}

// Multiplies weights, or their gradients, with what dropout makes of them. `place` is the first
// strip's.
template <bool transposed, uint row_fragments, uint columns>
void drop_strips(thread simdgroup_float8x8 (&strips)[row_fragments][columns],
                 thread uint (&visible)[row_fragments], thread const DropoutHead& head,
                 StripPlace place) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    const StripPlace at = strip_below(place, r);
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) {
      strips[r][j].thread_elements()[0] *= strip_dropout<transposed>(visible[r], j, 0, head, at);
      strips[r][j].thread_elements()[1] *= strip_dropout<transposed>(visible[r], j, 1, head, at);
    }
  }
}

// The same into the factors of the next product.
template <bool transposed, uint row_fragments, uint columns, typename F>
void dropped_factors(thread simdgroup_matrix<F, 8, 8> (&factors)[row_fragments][columns],
                     thread simdgroup_float8x8 (&strips)[row_fragments][columns],
                     thread uint (&visible)[row_fragments], thread const DropoutHead& head,
                     StripPlace place) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    const StripPlace at = strip_below(place, r);
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) {
      factors[r][j].thread_elements()[0] = F(strips[r][j].thread_elements()[0] *
                                             strip_dropout<transposed>(visible[r], j, 0, head, at));
      factors[r][j].thread_elements()[1] = F(strips[r][j].thread_elements()[1] *
                                             strip_dropout<transposed>(visible[r], j, 1, head, at));
    }
  }
}

// Bit c: row i sees key first + c of a block. In loops that stay loops, for a path that is hardly
// ever taken.
template <uint block>
uint seen_keys(Range keys, thread const HeadModifiers& head, uint i, uint first) {
  uint bits = 0;
#pragma clang loop unroll(disable)
  for (uint c = 0; c < block; ++c) {
    const int key = int(first + c);
    bool seen = key >= keys.begin && key < keys.end;
    if (has_mask && seen) seen = mask_value(head, i, first + c) != -INFINITY;
    if (seen) bits |= 1u << c;
  }
  return bits;
}

// Bit c: row first + c sees key j and has weights, by its log-sum-exp as gradient_lse makes it.
template <uint block>
uint seen_rows(Range rows, threadgroup const float* column_lse, thread const HeadModifiers& head,
               uint first, uint j) {
  uint bits = 0;
#pragma clang loop unroll(disable)
  for (uint c = 0; c < block; ++c) {
    const int row = int(first + c);
    bool seen = row >= rows.begin && row < rows.end && column_lse[c] != INFINITY;
    if (has_mask && seen) seen = mask_value(head, first + c, j) != -INFINITY;
    if (seen) bits |= 1u << c;
  }
  return bits;
}
