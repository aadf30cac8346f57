// The plain structs that cross from the backend into the kernels of one instruction set. No
// standard-library type with inline functions may appear here: such functions would be compiled
// with that instruction set and could be the copy the linker keeps (the `nm` gate in tests/ checks
// it).
#pragma once

#include <cstdint>

#include "core/mask_tiles.h"
#include "core/philox.h"
#include "core/visibility.h"
#include "flashattn/tensor.h"

namespace flashattn::cpu {

// One 4-D tensor as (batch, head, row) -> row of `dim` elements. Strides are in elements and may be
// zero or negative; dim_stride 1 is the fast case. data is null for a tensor that is absent.
struct RowTensor {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t dim_stride = 1;
};

// One (batch, query head, query row) float32 table: lse, dlse.
struct RowScalars {
  float* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 1;
};

// One float32 per query head, and per batch entry where batch_stride is not 0: ALiBi slopes, sinks.
struct HeadScalars {
  const float* data = nullptr;  // null: the call has none
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;

  FLASHATTN_INLINE float at(std::int64_t batch, std::int64_t head) const {
    return data[batch * batch_stride + head * head_stride];
  }
};

// Everything a forward, backward or decode kernel needs to know about the call.
struct AttentionJob {
  // Of query, key, value, out and the gradients: float32, float16, bfloat16.
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0;
  std::int64_t query_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t heads_per_kv = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  float scale = 1.0F;
  const Visibility* visibility = nullptr;  // [batch]

  RowTensor query, key, value, out;
  RowScalars lse;

  // Modifiers of the scores; the plain kernels serve the calls that have none.
  float softcap = 0.0F;  // 0 is off
  HeadScalars slopes;
  HeadScalars sinks;
  ScoreMask mask;
  MaskTiles mask_tiles;  // of `mask`, if it was classified for this pass
  DropoutRule dropout;

  // Backward only.
  RowTensor dout, dq, dk, dv;
  RowScalars dlse;  // data may be null
};

FLASHATTN_INLINE bool has_modifiers(const AttentionJob& job) {
  return job.softcap != 0.0F || job.slopes.data != nullptr || job.sinks.data != nullptr ||
         job.mask.data != nullptr || job.dropout.threshold != 0;
}

}  // namespace flashattn::cpu
