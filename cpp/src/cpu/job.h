// The plain structs that cross from the backend into the kernels of one instruction set. No
// standard-library type with inline functions may appear here: such functions would be compiled
// with that instruction set and could be the copy the linker keeps (the `nm` gate in tests/ checks
// it).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/entry.h"
#include "core/inline.h"
#include "core/mask_tiles.h"
#include "core/philox.h"
#include "core/visibility.h"
#include "flashattn/tensor.h"

namespace flashattn::cpu {

// Where the rows of each entry of a tensor begin. Without entries: at row 0 of batch index b.
struct RowPlaces {
  const Entry* entries = nullptr;  // [batch]
  bool of_keys = false;            // the place is Entry::key, else Entry::query

  FLASHATTN_INLINE const RowPlace& operator[](std::int64_t entry) const {
    return of_keys ? entries[entry].key : entries[entry].query;
  }
};

// One 4-D tensor as (batch, head, row) -> row of `dim` elements. Strides are in elements and may be
// zero or negative; dim_stride 1 is the fast case. data is null for a tensor that is absent.
struct RowTensor {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t dim_stride = 1;
  RowPlaces places{};
  // Pages: row r of an entry whose place is (t, s) is row (s + r) % page_rows of batch index
  // pages[t * pages_stride + (s + r) / page_rows]. null: rows lie one row_stride apart.
  const std::int64_t* pages = nullptr;
  std::int64_t pages_stride = 0;
  std::int64_t page_rows = 0;

  // In elements, of row 0 of an entry; of pages, of row 0 of the first page.
  FLASHATTN_INLINE std::int64_t offset(std::int64_t entry, std::int64_t head) const {
    std::int64_t at = head * head_stride;
    if (pages != nullptr) return at;
    if (places.entries == nullptr) return at + entry * batch_stride;
    const RowPlace& place = places[entry];
    return at + place.batch * batch_stride + place.row * row_stride;
  }
};

// One (batch, query head, query row) float32 table: lse, dlse.
struct RowScalars {
  float* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 1;
  RowPlaces places{};

  // Row 0 of an entry's head; rows follow row_stride apart.
  FLASHATTN_INLINE float* head(std::int64_t entry, std::int64_t query_head) const {
    float* at = data + query_head * head_stride;
    if (places.entries == nullptr) return at + entry * batch_stride;
    const RowPlace& place = places[entry];
    return at + place.batch * batch_stride + place.row * row_stride;
  }
};

// Keys of a tile of AttentionJob::mask_tiles; every pass's key blocks start at a multiple of it
// where there is a mask.
inline constexpr std::int64_t kMaskTileKeys = 64;

// One float32 per query head, and per batch entry where batch_stride is not 0: ALiBi slopes, sinks.
struct HeadScalars {
  const float* data = nullptr;  // null: the call has none
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;

  FLASHATTN_INLINE float at(std::int64_t batch, std::int64_t head) const {
    return data[batch * batch_stride + head * head_stride];
  }
};

// The gradient of such scalars: one per head, summed over the batch where it has no axis for it.
struct HeadGradients {
  float* data = nullptr;  // null: not asked for
  bool per_batch = false;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
};

// The gradient of an additive mask. An axis of size 1 is a sum over the call's own. Strides in
// elements.
struct MaskGradient {
  void* data = nullptr;           // null: not asked for
  DType dtype = DType::kFloat32;  // or float64
  std::int64_t batches = 1;
  std::int64_t heads = 1;
  std::int64_t rows = 1;
  std::int64_t keys = 1;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t key_stride = 0;
};

// Whether a call is to end early: see interruption.h. By address, because a kernel calls no code
// outside of its object.
struct EndingCheck {
  bool (*requested)(void* call) = nullptr;  // null: nothing ends the call early
  void* call = nullptr;
};

// Everything a forward, backward or decode kernel needs to know about the call, or of a ragged call
// about one entry: then seqlen_q and seqlen_k are that entry's, and `batch` still numbers all.
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
  const Entry* entries = nullptr;          // [batch], or null: all are alike
  EndingCheck ending{};

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
  RowScalars dlse;      // data may be null
  RowScalars sum_log2;  // log2 of the sum of a row's exp(s - lse), see weight_sums.h; null: all 0
  HeadGradients dslopes, dsinks;
  MaskGradient dmask;
};

FLASHATTN_INLINE bool has_modifiers(const AttentionJob& job) {
  return job.softcap != 0.0F || job.slopes.data != nullptr || job.sinks.data != nullptr ||
         job.mask.data != nullptr || job.dropout.threshold != 0;
}

// Asked between blocks of rows; the rest of an ending call stays undone.
FLASHATTN_INLINE bool is_ending(const AttentionJob& job) {
  return job.ending.requested != nullptr && job.ending.requested(job.ending.call);
}

FLASHATTN_INLINE std::int64_t entry_seqlen_q(const AttentionJob& job, std::int64_t entry) {
  return job.entries == nullptr ? job.seqlen_q : job.entries[entry].seqlen_q;
}

FLASHATTN_INLINE std::int64_t entry_seqlen_k(const AttentionJob& job, std::int64_t entry) {
  return job.entries == nullptr ? job.seqlen_k : job.entries[entry].seqlen_k;
}

// Column of the mask at which key 0 of an entry stands: its row on key's axis, whose rows before an
// entry's start the mask counts too. (Packed calls have no mask.)
FLASHATTN_INLINE std::int64_t first_mask_key(const AttentionJob& job, std::int64_t entry) {
  return job.entries == nullptr ? 0 : job.entries[entry].key.row;
}

// Key 0 of one row of an entry in its mask.
FLASHATTN_INLINE const char* mask_row(const AttentionJob& job, std::int64_t entry,
                                      std::int64_t head, std::int64_t i) {
  const std::int64_t key_bytes =
      job.mask.key_stride * static_cast<std::int64_t>(item_size(job.mask.dtype));
  return job.mask.row(entry, head, i) + first_mask_key(job, entry) * key_bytes;
}

// The job as the kernels of one entry see it.
FLASHATTN_INLINE AttentionJob job_of_entry(const AttentionJob& job, std::int64_t entry) {
  AttentionJob own = job;
  own.seqlen_q = entry_seqlen_q(job, entry);
  own.seqlen_k = entry_seqlen_k(job, entry);
  return own;
}

}  // namespace flashattn::cpu
