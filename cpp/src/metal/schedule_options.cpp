// Options as parameters; see schedule_options.h.
#include "metal/schedule_options.h"

#include "core/make_dropout.h"
#include "metal/tuning.h"

namespace flashattn::metal {

namespace {

abi::ScoreStrides strides_of(const ScoreMask& mask) {
  return {.batch = mask.batch_stride,
          .head = mask.head_stride,
          .row = mask.row_stride,
          .key = mask.key_stride};
}

abi::ScoreStrides strides_of(const MaskTiles& tiles) {
  const std::int64_t plane = tiles.row_tiles() * tiles.key_tiles();
  return {.batch = tiles.batch_step * plane,
          .head = tiles.head_step * plane,
          .row = tiles.seqlen_q == 1 ? 0 : tiles.key_tiles(),
          .key = tiles.seqlen_k == 1 ? 0 : 1};
}

void set_mask(const AttentionProblem& problem, const OptionViews& views,
              abi::ModifierParams* params) {
  const MaskTiles tiles = mask_tiles_of(problem, views.mask);
  params->mask = strides_of(score_mask_of(views.mask));
  params->mask_tiles = strides_of(tiles);
  params->mask_tile_rows = static_cast<std::uint32_t>(tiles.tile_rows);
  params->mask_tile_keys = static_cast<std::uint32_t>(tiles.tile_keys);
  params->dmask = strides_of(score_mask_of(views.dmask));
  params->mask_batch = static_cast<std::uint32_t>(problem.mask_shape[0]);
  params->mask_heads = static_cast<std::uint32_t>(problem.mask_shape[1]);
  params->mask_rows = static_cast<std::uint32_t>(problem.mask_shape[2]);
  params->mask_keys = static_cast<std::uint32_t>(problem.mask_shape[3]);
}

void set_dropout(const AttentionProblem& problem, abi::ModifierParams* params) {
  const DropoutRule rule = make_dropout_rule(problem);
  params->dropout_offset = rule.offset;
  params->global_heads = rule.numbering.global_heads;
  params->head_start = rule.numbering.head_start;
  params->global_queries = rule.numbering.global_queries;
  params->query_start = rule.numbering.query_start;
  params->global_keys = rule.numbering.global_keys;
  params->key_start = rule.numbering.key_start;
  params->seed_low = static_cast<std::uint32_t>(rule.seed);
  params->seed_high = static_cast<std::uint32_t>(rule.seed >> 32);
  params->dropout_threshold = rule.threshold;
  params->dropout_scale = rule.keep_scale;
}

// Strides of (query_heads) or (batch, query_heads).
void set_head_strides(const TensorView& view, std::int64_t* batch, std::int64_t* head) {
  if (!view) return;
  *batch = view.rank == 2 ? view.stride[0] : 0;
  *head = view.rank == 2 ? view.stride[1] : view.stride[0];
}

}  // namespace

abi::ModifierParams modifier_params(const AttentionProblem& problem, const OptionViews& views) {
  abi::ModifierParams params{};
  if (problem.softcap != 0.0F) {
    params.softcap = problem.softcap;
    params.inverse_softcap = 1.0F / problem.softcap;
  }
  if (problem.mask != MaskKind::kNone) set_mask(problem, views, &params);
  if (problem.dropout.probability != 0.0) set_dropout(problem, &params);
  set_head_strides(views.alibi_slopes, &params.slopes_batch, &params.slopes_head);
  set_head_strides(views.dalibi_slopes, &params.dslopes_batch, &params.dslopes_head);
  params.slopes_per_batch = views.alibi_slopes.rank == 2 ? 1 : 0;
  std::int64_t none = 0;
  set_head_strides(views.sinks, &none, &params.sinks_head);
  set_head_strides(views.dsinks, &none, &params.dsinks_head);
  return params;
}

KernelOptions kernel_options(KernelKind kind, const AttentionProblem& problem) {
  KernelOptions options{.softcap = problem.softcap != 0.0F,
                        .alibi = problem.alibi,
                        .dropout = problem.dropout.probability != 0.0};
  // Backward, a sink is part of the log-sum-exp, which is all that its kernels need.
  options.sinks = problem.sinks && kind == KernelKind::kForward;
  if (problem.mask != MaskKind::kNone) {
    // The binder hands float64 masks over as float32.
    options.mask = problem.mask_dtype == DType::kFloat64 ? DType::kFloat32 : problem.mask_dtype;
  }
  return options;
}

MaskTiles mask_tiles_of(const AttentionProblem& problem, const TensorView& mask) {
  const ScoreMask scores = score_mask_of(mask);
  return flashattn::mask_tiles_of(scores,
                                  {.batch = problem.batch,
                                   .query_heads = problem.query_heads,
                                   .seqlen_q = scores.row_stride == 0 ? 1 : problem.seqlen_q,
                                   .seqlen_k = scores.key_stride == 0 ? 1 : problem.seqlen_k,
                                   .tile_rows = kMaskTile,
                                   .tile_keys = kMaskTile});
}

}  // namespace flashattn::metal
