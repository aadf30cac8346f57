// Masks for scores whose queries stand in the lanes: the bias of kBiasKeys keys at a time, [key]
// [lane], from a mask of any floating dtype or bool and any strides. True is 0, False is -inf.
// Relies on core/mask_tiles.h for what a mask is.
#pragma once

#include "cpu/job.h"
#include "cpu/math.h"
#include "cpu/rows.h"
#include "cpu/tile.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Keys whose bias is made in one go: a whole transpose of the widest vectors.
constexpr int kBiasKeys = 16;
static_assert(kBiasKeys % kLanes == 0);

// kLanes / 2 float64 as float32. What is finite stays finite: every finite value is a value.
FLASHATTN_INLINE VecFew narrow_float64(const char* from) {
  const VecDouble x = *reinterpret_cast<const VecDoubleInMemory*>(from);
  const VecDouble most = VecDouble{} + 3.4028234663852886e38;
  const VecDouble infinity = VecDouble{} + __builtin_inf();
  const VecDouble limited = x > most ? most : x < -most ? -most : x;
  const VecDouble narrowed = x == infinity || x == -infinity ? x : limited;
  return __builtin_convertvector(narrowed, VecFew);
}

template <int... lane>
FLASHATTN_INLINE Vec widen_float64_mask(const char* from, LaneList<lane...>) {
  return __builtin_shufflevector(narrow_float64(from), narrow_float64(from + kLanes * 4), lane...);
}

// kLanes contiguous mask elements as a bias.
template <DType dtype>
FLASHATTN_INLINE Vec widen_mask(const char* from) {
  if constexpr (dtype == DType::kBool) {
    return select(reinterpret_cast<VecI>(widen_uint8(from) != 0U), Vec{}, broadcast(-kInfinity));
  } else if constexpr (dtype == DType::kFloat64) {
    return widen_float64_mask(from, AllLanes{});
  } else {
    return widen<dtype>(from);
  }
}

template <DType dtype>
constexpr std::int64_t kMaskItem = static_cast<std::int64_t>(item_size(dtype));

// Elements key_bytes apart, `count` of them, at most kLanes; the rest of the lanes are 0.
template <DType dtype>
FLASHATTN_INLINE Vec gather_mask(const char* from, std::ptrdiff_t key_bytes, std::int64_t count) {
  char items[kLanes * kMaskItem<dtype>];
  __builtin_memset(items, dtype == DType::kBool ? 1 : 0, sizeof(items));
  for (std::int64_t i = 0; i < count; ++i) {
    __builtin_memcpy(items + i * kMaskItem<dtype>, from + i * key_bytes, kMaskItem<dtype>);
  }
  return widen_mask<dtype>(items);
}

// Elements [key, key + kLanes) of the row that starts at `row`, as far as they exist.
template <DType dtype>
FLASHATTN_INLINE Vec mask_keys(const char* row, std::ptrdiff_t key_bytes, std::int64_t key,
                               std::int64_t seqlen_k) {
  if (key_bytes == kMaskItem<dtype> && key + kLanes <= seqlen_k) {
    return widen_mask<dtype>(row + key * kMaskItem<dtype>);
  }
  const std::int64_t left = seqlen_k - key;
  return gather_mask<dtype>(row + key * key_bytes, key_bytes, left < kLanes ? left : kLanes);
}

// Calls body(a value whose kDType is the mask's).
template <DType dtype>
struct MaskDType {
  static constexpr DType kDType = dtype;
};

template <class Body>
FLASHATTN_INLINE void with_mask_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(MaskDType<DType::kFloat16>{});
    case DType::kBFloat16:
      return body(MaskDType<DType::kBFloat16>{});
    case DType::kFloat64:
      return body(MaskDType<DType::kFloat64>{});
    case DType::kFloat32:
      return body(MaskDType<DType::kFloat32>{});
    default:
      return body(MaskDType<DType::kBool>{});
  }
}

// The bias of some keys: of key i and lane l at[i * key_stride + l].
struct Bias {
  const float* at = nullptr;  // null: nothing to add
  std::ptrdiff_t key_stride = 0;
};

// The mask rows of the lanes of one query block.
template <int lanes>
struct MaskLanes {
  const char* row[lanes];        // key 0 of each lane's row
  std::ptrdiff_t key_bytes = 0;  // from key to key
  DType dtype = DType::kBool;
  std::int64_t seqlen_k = 0;
  bool same_row = false;            // all lanes read one row
  bool same_key = false;            // a row is one element for all keys
  alignas(64) float of_row[lanes];  // that element, where same_key

  // The bias of one pair; a slow path's.
  FLASHATTN_INLINE float at(int lane, std::int64_t key) const {
    float bias = 0.0F;
    with_mask_dtype(dtype, [&](auto type) __attribute__((always_inline)) {
      bias = gather_mask<decltype(type)::kDType>(row[lane] + key * key_bytes, key_bytes, 1)[0];
    });
    return bias;
  }
};

// row[] is filled; what follows from it.
template <int lanes>
FLASHATTN_INLINE void finish_mask_lanes(const ScoreMask& mask, std::int64_t seqlen_k,
                                        MaskLanes<lanes>& m) {
  m.dtype = mask.dtype;
  m.key_bytes = mask.key_stride * static_cast<std::int64_t>(item_size(mask.dtype));
  m.seqlen_k = seqlen_k;
  m.same_key = mask.key_stride == 0;
  m.same_row = true;
  for (int lane = 1; lane < lanes; ++lane) m.same_row = m.same_row && m.row[lane] == m.row[0];
  if (!m.same_key) return;
  for (int lane = 0; lane < lanes; ++lane) m.of_row[lane] = m.at(lane, 0);
}

// What `count` vectors of bias have in common. NaN is open, and changes scores.
FLASHATTN_INLINE TileVisibility class_of_bias(const float* bias, int count) {
  VecI open{};
  VecI changes{};
  for (int i = 0; i < count; ++i) {
    const Vec x = load(bias + i * kLanes);
    open |= x != broadcast(-kInfinity);
    changes |= x != Vec{};
  }
  if (!any(open)) return TileVisibility::kNone;
  return any(changes) ? TileVisibility::kMixed : TileVisibility::kAll;
}

// What the mask says of keys [keys.begin, keys.end) to all lanes, where it has no row or no key
// axis; it looks at every key.
template <int lanes>
FLASHATTN_NOINLINE TileVisibility class_of_keys(const MaskLanes<lanes>& m, Interval keys) {
  if (m.same_key) return class_of_bias(m.of_row, lanes / kLanes);
  if (!m.same_row) return TileVisibility::kMixed;
  if (keys.end > m.seqlen_k) keys.end = m.seqlen_k;
  bool all = true;
  bool none = true;
  with_mask_dtype(m.dtype, [&](auto type) __attribute__((always_inline)) {
    for (std::int64_t k = keys.begin; k < keys.end; k += kLanes) {
      // The last vector ends with the last key: elements past it would count as open.
      const std::int64_t end = keys.end - kLanes;
      const std::int64_t at = k > end && end >= keys.begin ? end : k;
      alignas(64) float bias[kLanes];
      store(bias, mask_keys<decltype(type)::kDType>(m.row[0], m.key_bytes, at, m.seqlen_k));
      const TileVisibility visibility = class_of_bias(bias, 1);
      all = all && visibility == TileVisibility::kAll;
      none = none && visibility == TileVisibility::kNone;
    }
  });
  if (none) return TileVisibility::kNone;
  return all ? TileVisibility::kAll : TileVisibility::kMixed;
}

// to[kBiasKeys][lanes] from masks whose rows differ: blocks of kLanes x kLanes, transposed.
template <DType dtype, int lanes>
FLASHATTN_INLINE void transpose_mask(const MaskLanes<lanes>& m, std::int64_t key, float* to) {
  for (int lane = 0; lane < lanes; lane += kLanes) {
    for (int k = 0; k < kBiasKeys; k += kLanes) {
      Vec r[kLanes];
      FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) {
        r[i] = mask_keys<dtype>(m.row[lane + i], m.key_bytes, key + k, m.seqlen_k);
      }
      transpose(r);
      FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) store(to + (k + i) * lanes + lane, r[i]);
    }
  }
}

// Fetches `keys` of the rows of some lanes, where they lie side by side. Rows lie far apart, more
// streams than the processor follows, so a few rows at a time: neighbouring lines come cheaper from
// memory (benchmarks/option_cost.py: a float32 mask costs 17 % instead of 26 % of the plain call).
template <int lanes>
FLASHATTN_INLINE void prefetch_mask(const MaskLanes<lanes>& m, Interval keys, Interval of_lanes) {
  if (m.same_row || m.key_bytes <= 0 || m.key_bytes > 8) return;
  if (keys.end > m.seqlen_k) keys.end = m.seqlen_k;
  for (std::int64_t lane = of_lanes.begin; lane < of_lanes.end; ++lane) {
    const char* const end = m.row[lane] + keys.end * m.key_bytes;
    for (const char* at = m.row[lane] + keys.begin * m.key_bytes; at < end; at += 64) {
      __builtin_prefetch(at, 0, 2);
    }
  }
}

// The bias of keys [key, key + kBiasKeys) in `to`, [kBiasKeys][lanes] of scratch, and its class:
// where that is kNone no lane may see any of the keys, where kAll there is nothing to add and bias
// is null. Masks
// whose rows and keys both differ are not looked at again: their class is the tile's (MaskTiles).
// Elements past the last key are 0.
template <int lanes>
FLASHATTN_NOINLINE TileVisibility fill_bias(const MaskLanes<lanes>& m, std::int64_t key, float* to,
                                            Bias& bias) {
  if (m.same_key) {
    const TileVisibility visibility = class_of_bias(m.of_row, lanes / kLanes);
    bias = {.at = visibility == TileVisibility::kAll ? nullptr : m.of_row, .key_stride = 0};
    return visibility;
  }
  bias = {.at = to, .key_stride = lanes};
  TileVisibility visibility = TileVisibility::kMixed;
  with_mask_dtype(m.dtype, [&](auto type) __attribute__((always_inline)) {
    constexpr DType dtype = decltype(type)::kDType;
    if (!m.same_row) return transpose_mask<dtype>(m, key, to);
    alignas(64) float of_key[kBiasKeys];
    for (int k = 0; k < kBiasKeys; k += kLanes) {
      store(of_key + k, mask_keys<dtype>(m.row[0], m.key_bytes, key + k, m.seqlen_k));
    }
    visibility = class_of_bias(of_key, kBiasKeys / kLanes);
    if (visibility == TileVisibility::kAll) return;
    for (int k = 0; k < kBiasKeys; ++k) {
      for (int lane = 0; lane < lanes; lane += kLanes)
        store(to + k * lanes + lane, broadcast(of_key[k]));
    }
  });
  if (visibility == TileVisibility::kAll) bias = {};
  return visibility;
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
