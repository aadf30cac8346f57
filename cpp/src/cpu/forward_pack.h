// Copies keys and values of one (batch, kv head) into the packed form, once for all query blocks
// and all query heads that share them. Contiguous rows spare the tile kernel the cache-set
// conflicts of strided ones.
#pragma once

#include "cpu/forward_layout.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

static inline void pack_values_float32(const Rows& values, std::int64_t begin, std::int64_t end,
                                       std::int64_t valid_end, std::int64_t dim,
                                       const PackedHead<Float32Unit>& head) {
  pack_rows_float32(values, begin, end, valid_end, dim, head.V + begin * head.v_ld, head.v_ld);
  for (std::int64_t r = begin; r < end; ++r) {
    float* const row = head.V + r * head.v_ld;
    const bool finite = all_finite(row, head.v_ld);
    head.skip[r] = finite ? 0 : 1;
    if (!finite) zero_units(row, head.v_ld);
  }
}

#if defined(FLASHATTN_HAS_BF16_DOT)
// Row r as 16-bit elements, in place where it can be, else in `copy`; zeros where it does not exist
// or is not finite, which is what `skip` then says.
FLASHATTN_INLINE const std::uint16_t* value_row16(const Rows& values, std::int64_t r,
                                                  std::int64_t valid_end, std::int64_t dim,
                                                  std::uint16_t* copy, std::uint8_t& skip) {
  skip = 0;
  if (r < valid_end) {
    const std::uint16_t* row = copy;
    if (values.contiguous_rows()) {
      row = reinterpret_cast<const std::uint16_t*>(values.row(r));
    } else {
      read_row_bits16(values, r, dim, copy);
    }
    if (all_finite_bf16(row, dim)) return row;
    skip = 1;
  }
  __builtin_memset(copy, 0, static_cast<std::size_t>(dim) * 2);
  return copy;
}

static inline void pack_value_pairs(const Rows& values, std::int64_t begin, std::int64_t end,
                                    std::int64_t valid_end, std::int64_t dim,
                                    const PackedHead<Bf16PairUnit>& head) {
  std::uint16_t even_copy[kMaxHeadDim];
  std::uint16_t odd_copy[kMaxHeadDim];
  for (std::int64_t r = begin; r < end; r += 2) {
    const std::uint16_t* even = value_row16(values, r, valid_end, dim, even_copy, head.skip[r]);
    const std::uint16_t* odd =
        value_row16(values, r + 1, valid_end, dim, odd_copy, head.skip[r + 1]);
    float* const to = head.V + r / 2 * head.v_ld;
    interleave_rows16(even, odd, dim, to);
    zero_units(to + dim, head.v_ld - dim);
  }
}
#endif

// Query rows that share keys up to which reading these in place pays; the more often they are read,
// the less a copy on few pages costs.
constexpr std::int64_t kRowsToReadInPlace = 1024;

// Whether the keys already lie as packing would leave them, so that the kernel reads them in place.
// It reads whole tiles of keys, which then must exist.
template <class Unit>
FLASHATTN_INLINE bool keys_lie_packed(const AttentionJob& job, const Rows& keys) {
  constexpr DType kUnitDType = Unit::kElements == 2 ? DType::kBFloat16 : DType::kFloat32;
  return job.dtype == kUnitDType && job.seqlen_q * job.heads_per_kv <= kRowsToReadInPlace &&
         job.head_dim % Unit::kElements == 0 && keys.contiguous_rows() && keys.pages == nullptr &&
         keys.row_bytes == 4 * units_of<Unit>(job.head_dim) && job.seqlen_k % kTileRows == 0 &&
         reinterpret_cast<std::uintptr_t>(keys.base) % 4 == 0;
}

template <class Unit>
static void pack_head(const AttentionJob& job, std::int64_t batch, std::int64_t kv_head,
                      std::int64_t key_begin, void* packed) {
  const PackedHead<Unit> head(job, packed);
  const std::int64_t valid_end = job.visibility[batch].key_limit;
  const std::int64_t end = key_begin + kPackKeys < head.keys ? key_begin + kPackKeys : head.keys;
  const Rows keys = rows_of(job.key, job.dtype, batch, kv_head);
  const Rows values = rows_of(job.value, job.dtype, batch, kv_head);
  float* const K = head.K + key_begin * head.k_ld;
  const bool in_place = keys_lie_packed<Unit>(job, keys);
  if constexpr (Unit::kElements == 2) {
    if (!in_place) pack_rows_bf16(keys, key_begin, end, valid_end, job.head_dim, K, head.k_ld);
    pack_value_pairs(values, key_begin, end, valid_end, job.value_dim, head);
  } else {
    if (!in_place) pack_rows_float32(keys, key_begin, end, valid_end, job.head_dim, K, head.k_ld);
    pack_values_float32(values, key_begin, end, valid_end, job.value_dim, head);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
