// The two products of decode on a few query rows and up to kDecodeBlockKeys keys: scores = q k, acc
// += p v. Vectors lie along the head dimension, because there are too few rows to fill the lanes
// with. Relies on vec.h and rows.h; the online softmax between the two is in decode.h.
//
// Element order ("tailed"): a row of `dim` elements is held as dim / kLanes full vectors and, when
// dim % kLanes is not 0, one more vector with the remaining elements in its top lanes and zeros
// below. Such a vector is one load that ends with the row, so nothing outside of the row is read.
#pragma once

#include "cpu/decode_table.h"
#include "cpu/math.h"
#include "cpu/rows.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Accumulators of a tile: what the register file holds beside the operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kDecodeAccumulators = 16;
#else
constexpr int kDecodeAccumulators = 8;
#endif

struct TailedDim {
  std::int64_t dim = 0;
  std::int64_t full = 0;  // elements in full vectors
  VecI top{};             // the lanes that the remaining elements take

  FLASHATTN_INLINE std::int64_t rest() const { return dim - full; }
};

FLASHATTN_INLINE TailedDim tailed(std::int64_t dim) {
  const std::int64_t full = dim / kLanes * kLanes;
  const auto first = static_cast<std::int32_t>(kLanes - (dim - full));
  return {.dim = dim, .full = full, .top = lane_numbers() >= broadcast(first)};
}

// The last, partial vector of a contiguous row.
template <DType dtype>
FLASHATTN_INLINE Vec load_rest(const char* row, const TailedDim& dim) {
  constexpr std::int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  if (dim.full != 0) {
    const Vec last = widen<dtype>(row + (dim.dim - kLanes) * item);
    return select(dim.top, last, Vec{});
  }
  char lanes[kLanes * item] = {};
  __builtin_memcpy(lanes + (kLanes - dim.dim) * item, row,
                   static_cast<std::size_t>(dim.dim * item));
  return widen<dtype>(lanes);
}

// Rows of one kv head: key or value number `k` of the tile starts at base + k * row_bytes.
struct TileRows {
  const char* base = nullptr;
  std::ptrdiff_t row_bytes = 0;
  // Where the rows to be read next lie, relative to these; 0 for none. They are fetched into the
  // cache one line at a time in step with the arithmetic: a burst of prefetches stalls.
  std::ptrdiff_t ahead = 0;
};

// One level of the tree below: adds two halves of a and two halves of b, lane by lane, into one
// vector. `level` 0 and 1 work inside groups of four lanes, the others on whole groups; on x86 each
// is two shuffles of one instruction.
template <int level, int... lane>
FLASHATTN_INLINE Vec add_halves(Vec a, Vec b, LaneList<lane...>) {
  if constexpr (level == 0) {
    return __builtin_shufflevector(a, b, (lane / 4 * 4 + lane % 4 / 2 + lane % 2 * kLanes)...) +
           __builtin_shufflevector(a, b, (lane / 4 * 4 + lane % 4 / 2 + lane % 2 * kLanes + 2)...);
  } else if constexpr (level == 1) {
    return __builtin_shufflevector(a, b, (lane / 4 * 4 + lane % 2 + lane % 4 / 2 * kLanes)...) +
           __builtin_shufflevector(a, b, (lane / 4 * 4 + lane % 2 + lane % 4 / 2 * kLanes + 2)...);
  } else {
    constexpr int half = kLanes / 2;
    return __builtin_shufflevector(a, b,
                                   (lane % half / 4 * 8 + lane % 4 + lane / half * kLanes)...) +
           __builtin_shufflevector(a, b,
                                   (lane % half / 4 * 8 + lane % 4 + lane / half * kLanes + 4)...);
  }
}

template <int level, int count>
FLASHATTN_INLINE void add_level(Vec* x) {
  FLASHATTN_UNROLL for (int i = 0; i < count; ++i) {
    x[i] = add_halves<level>(x[2 * i], x[2 * i + 1], AllLanes{});
  }
}

// Lane i of the result is the sum of the lanes of x[i], added in the same order for every i: a
// score does not depend on the tile it was computed in.
FLASHATTN_INLINE Vec sum_lanes(Vec (&x)[kLanes]) {
  add_level<0, kLanes / 2>(x);
  add_level<1, kLanes / 4>(x);
  if constexpr (kLanes >= 8) add_level<2, kLanes / 8>(x);
  if constexpr (kLanes >= 16) add_level<3, kLanes / 16>(x);
  return x[0];
}

// How a vector of key elements meets the query: widened to float32 and multiplied, or as bf16
// pairs, two elements a lane, where there is an instruction for their dot product. q holds what
// fits: float32, or pairs of bf16.
template <DType dtype>
struct WidenedDot {
  static constexpr std::int64_t kStep = kLanes;  // elements of a vector
  static constexpr std::int64_t kItem = dtype == DType::kFloat32 ? 4 : 2;
  static FLASHATTN_INLINE Vec key(const char* from) { return widen<dtype>(from); }
  static FLASHATTN_INLINE Vec key_rest(const char* row, const TailedDim& dim) {
    return load_rest<dtype>(row, dim);
  }
  static FLASHATTN_INLINE Vec add(Vec acc, Vec key, Vec q) { return acc + key * q; }
};

#if defined(FLASHATTN_HAS_BF16_DOT)
struct PairDot {
  static constexpr std::int64_t kStep = 2 * kLanes;
  static constexpr std::int64_t kItem = 2;
  static FLASHATTN_INLINE Vec key(const char* from) { return load(from); }
  static FLASHATTN_INLINE Vec key_rest(const char*, const TailedDim&) { return Vec{}; }
  static FLASHATTN_INLINE Vec add(Vec acc, Vec key, Vec q) { return dot_bf16_pairs(acc, key, q); }
};
#endif

// scores[r][k] = scale * (q[r] . key[k]) for `rows` rows of q, which are q_stride floats apart, and
// `count` keys. Entries from count to the next multiple of kLanes become -inf.
//
//   for each group of kKeys keys:
//     S[r][i] = sum over vectors d of q[r][d] * key[i][d]     (rows x kKeys vectors in registers)
//     scores = the lanes of each S added up
template <typename Dot, int rows>
FLASHATTN_INLINE void decode_scores(const float* q, std::int64_t q_stride, const TailedDim& dim,
                                    float scale, const TileRows& keys, std::int64_t count,
                                    float (&scores)[rows][kDecodeBlockKeys]) {
  constexpr int kKeys = kDecodeAccumulators / rows;
  alignas(64) float sums[kDecodeAccumulators];
  for (std::int64_t k = 0; k < count; k += kKeys) {
    const char* key[kKeys];
    // A short group repeats its last key, and its surplus scores are overwritten below.
    FLASHATTN_UNROLL for (int i = 0; i < kKeys; ++i) {
      key[i] = keys.base + (k + i < count ? k + i : count - 1) * keys.row_bytes;
    }
    Vec acc[kDecodeAccumulators] = {};
    const float* q_part = q;
    const auto add = [&](int i, Vec x) __attribute__((always_inline)) {
      FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
        Vec& sum = acc[r * kKeys + i];
        sum = Dot::add(sum, x, load(q_part + r * q_stride));
      }
    };
    for (std::int64_t d = 0; d < dim.full; d += Dot::kStep, q_part += kLanes) {
      const bool new_line = keys.ahead != 0 && d * Dot::kItem % 64 == 0;
      FLASHATTN_UNROLL for (int i = 0; i < kKeys; ++i) {
        if (new_line) __builtin_prefetch(key[i] + keys.ahead + d * Dot::kItem, 0, 2);
        add(i, Dot::key(key[i] + d * Dot::kItem));
      }
    }
    if (dim.rest() != 0) {
      FLASHATTN_UNROLL for (int i = 0; i < kKeys; ++i) add(i, Dot::key_rest(key[i], dim));
    }
    FLASHATTN_UNROLL for (int group = 0; group < kDecodeAccumulators / kLanes; ++group) {
      Vec part[kLanes];
      FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) part[i] = acc[group * kLanes + i];
      store(sums + group * kLanes, sum_lanes(part) * broadcast(scale));
    }
    FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
      __builtin_memcpy(&scores[r][k], sums + r * kKeys, kKeys * sizeof(float));
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (std::int64_t k = count; k % kLanes != 0; ++k) scores[r][k] = -kInfinity;
  }
}

// acc[r][d .. d + vectors * kLanes) += sum over keys of p[r][k] * value[k], in ascending key order.
template <DType dtype, int rows, int vectors, bool rest>
FLASHATTN_INLINE void decode_accumulate_columns(const float (&p)[rows][kDecodeBlockKeys],
                                                const TileRows& values, std::int64_t count,
                                                const TailedDim& dim, std::int64_t d, float* acc,
                                                std::int64_t acc_stride) {
  constexpr std::int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  // From zero and not from acc: sums of block sums lose less to rounding than one long chain.
  Vec sum[rows][vectors] = {};
  const char* value = values.base;
  for (std::int64_t k = 0; k < count; ++k, value += values.row_bytes) {
    Vec v[vectors];
    if constexpr (rest) {
      v[0] = load_rest<dtype>(value, dim);
    } else {
      if (values.ahead != 0) {
        FLASHATTN_UNROLL for (int byte = 0; byte < vectors * kLanes * item; byte += 64) {
          __builtin_prefetch(value + values.ahead + d * item + byte, 0, 2);
        }
      }
      FLASHATTN_UNROLL for (int j = 0; j < vectors; ++j) {
        v[j] = widen<dtype>(value + (d + j * kLanes) * item);
      }
    }
    FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
      const Vec weight = broadcast(p[r][k]);
      FLASHATTN_UNROLL for (int j = 0; j < vectors; ++j) sum[r][j] += weight * v[j];
    }
  }
  FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
    FLASHATTN_UNROLL for (int j = 0; j < vectors; ++j) {
      float* to = acc + r * acc_stride + d + j * kLanes;
      store(to, load(to) + sum[r][j]);
    }
  }
}

// acc[r] += p[r] . values for whole rows, in the tailed element order.
template <DType dtype, int rows>
FLASHATTN_INLINE void decode_accumulate(const float (&p)[rows][kDecodeBlockKeys],
                                        const TileRows& values, std::int64_t count,
                                        const TailedDim& dim, float* acc, std::int64_t acc_stride) {
  constexpr int kVectors = kDecodeAccumulators / rows < 4 ? kDecodeAccumulators / rows : 4;
  std::int64_t d = 0;
  for (; d + kVectors * kLanes <= dim.full; d += kVectors * kLanes) {
    decode_accumulate_columns<dtype, rows, kVectors, false>(p, values, count, dim, d, acc,
                                                            acc_stride);
  }
  for (; d < dim.full; d += kLanes) {
    decode_accumulate_columns<dtype, rows, 1, false>(p, values, count, dim, d, acc, acc_stride);
  }
  if (dim.rest() != 0) {
    decode_accumulate_columns<dtype, rows, 1, true>(p, values, count, dim, d, acc, acc_stride);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
