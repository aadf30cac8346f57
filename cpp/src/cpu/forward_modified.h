// What the modified kernel does beside the plain one (forward_block.h): its scores are in natural
// units, so its softmax is too; keys that the mask hides from all lanes are skipped; and weights
// are dropped. Relies on modifiers.h for the scores themselves.
#pragma once

#include "cpu/forward_scores.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// score_block's third part: bias for kBiasKeys keys at a time, then tile by tile.
struct ModifiedScores {
  const ForwardModifiers& modifiers;
  bool masked = false;       // in this key block
  float* scratch = nullptr;  // [kBiasKeys][kBlockQ]
  Bias bias{};

  FLASHATTN_INLINE void start_keys(std::int64_t first_key, int k) {
    if (!masked) return;
    if (k % kBiasKeys == 0) fill_bias(modifiers.mask, first_key + k, scratch, bias);
    prefetch_mask(modifiers.mask, {first_key + kBlockK, first_key + 2 * kBlockK},
                  {k * kBlockQ / kBlockK, (k + kTileRows) * kBlockQ / kBlockK});
  }
  template <int vecs>
  FLASHATTN_INLINE void modify(int k, int lane, Vec (&s)[kTileRows][vecs]) const {
    ModifiedTile tile{.lane = lane, .key = k, .bias = bias};
    if (bias.at != nullptr) tile.bias.at += k % kBiasKeys * bias.key_stride;
    modify_scores(modifiers, tile, s);
  }
};

// What the mask says of a key block as a whole, without regard to causal, window and lengths.
FLASHATTN_INLINE TileVisibility mask_class(const AttentionJob& job, const ForwardTask& task,
                                           const QueryRows& rows, const ForwardModifiers& modifiers,
                                           const KeyBlock& block) {
  if (!modifiers.masked) return TileVisibility::kAll;
  const Interval keys{block.first_key, block.first_key + block.length};
  if (!is_dense(job.mask)) return class_of_keys(modifiers.mask, keys);
  const std::int64_t column = first_mask_key(job, task.batch);
  const Interval columns{keys.begin + column, keys.end + column};
  const Interval queries{rows.query(0), rows.query(rows.count - 1) + 1};
  const TileVisibility first = job.mask_tiles.of(task.batch, task.head, queries, columns);
  for (std::int64_t h = 1; h < rows.heads; ++h) {
    if (job.mask_tiles.of(task.batch, task.head + h, queries, columns) != first) {
      return TileVisibility::kMixed;
    }
  }
  return first;
}

// A lane starts with its head's sink: a logit whose value row is 0.
template <class Unit>
FLASHATTN_INLINE void start_modified_rows(const AttentionJob& job, const ForwardTask& task,
                                          const QueryRows& rows,
                                          const BlockScratch<Unit>& scratch) {
  for (int lane = 0; lane < kBlockQ; ++lane) {
    float sink = -kInfinity;
    if (job.sinks.data != nullptr) {
      sink = job.sinks.at(task.batch, task.head + rows.head(lane < rows.count ? lane : 0));
    }
    scratch.row_max[lane] = sink;
    // exp(sink - sink): a sink that is not a number, or +inf, spoils its rows.
    scratch.row_sum[lane] = sink == -kInfinity ? 0.0F : 1.0F + (sink - sink);
  }
}

// In the place of a DropoutRun where nothing is dropped.
struct KeepsAll {
  static constexpr bool kDrops = false;
  FLASHATTN_INLINE void next(VecI (&)[kTileRows]) {}
};

// P = exp(S - max) of vector n, in place of S (float32) or as pairs of keys; returns the sum over
// keys, dropped ones included. The subtraction comes first: max may be the largest float there is.
// Always of the higher degree: a sink moves the maximum away from equal scores, whose weights then
// share one error that no averaging takes out of lse.
template <class Unit, class Run>
FLASHATTN_INLINE Vec modified_exponentials(const BlockScratch<Unit>& scratch, const KeyBlock& block,
                                           int n, Vec max, Run run) {
  Vec sums[2] = {};
  const int lane = n * kLanes;
  float* S = scratch.S + block.begin[n] * kBlockQ + lane;
  for (int k = block.begin[n]; k < block.end[n]; k += kTileRows, S += kTileRows * kBlockQ) {
    Vec p[kTileRows];
    VecI keep[kTileRows];
    run.next(keep);
    FLASHATTN_UNROLL for (int i = 0; i < kTileRows; ++i) {
      p[i] = exp2<6>((load(S + i * kBlockQ) - max) * broadcast(kLog2E));
      sums[i % 2] += p[i];
      if constexpr (Run::kDrops) p[i] = select(keep[i], p[i], Vec{});
    }
    FLASHATTN_UNROLL for (int i = 0; i < kTileRows; i += Unit::kElements) {
      if constexpr (Unit::kElements == 2) {
        store(scratch.P + (k + i) / 2 * kBlockQ + lane, Unit::pair(p[i], p[i + 1]));
      } else {
        store(S + i * kBlockQ, p[i]);
      }
    }
  }
  return sums[0] + sums[1];
}

// As softmax_block, for scores in natural units.
template <class Unit>
FLASHATTN_INLINE bool modified_softmax_block(const BlockScratch<Unit>& scratch,
                                             const KeyBlock& block,
                                             const ForwardModifiers& modifiers) {
  bool rose = false;
  for (int n = 0; n < kBlockVecs; ++n) {
    const int lane = n * kLanes;
    if (block.begin[n] == block.end[n]) {
      store(scratch.rescale + lane, broadcast(1.0F));
      continue;
    }
    const Vec old_max = load(scratch.row_max + lane);
    const Vec new_max = load(scratch.block_max + lane);
    store(scratch.row_max + lane, new_max);
    // A lane that has seen nothing above -inf subtracts 0.
    const Vec max = select(new_max == broadcast(-kInfinity), Vec{}, new_max);
    const Vec rescale = exp2<6>((old_max - max) * broadcast(kLog2E));
    store(scratch.rescale + lane, rescale);
    rose |= any(old_max != new_max);
    Vec sum;
    if (modifiers.drops) {
      const std::int64_t key = block.first_key + block.begin[n];
      const DropoutRun<kBlockQ> run(modifiers.dropout, lane, key);
      sum = modified_exponentials(scratch, block, n, max, run);
    } else {
      sum = modified_exponentials(scratch, block, n, max, KeepsAll{});
    }
    store(scratch.row_sum + lane, load(scratch.row_sum + lane) * rescale + sum);
  }
  return rose;
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
