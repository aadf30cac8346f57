// Decode on a block of keys that all rows see, in the order in which keys and values lie in memory:
// a processor reads one run of addresses up to twice as fast as the rows of one head, which are
// pieces of it. Gives the bits of decode_tile.h, whose sums it adds up in the same order. Relies on
// contiguous rows and on decode_head.h.
#pragma once

#include "cpu/decode_head.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Keys whose values are added up in registers before the next head's turn.
constexpr std::int64_t kDecodeValueKeys = 8;
// Keys past a block that LineWalk may come to: a group of values, and one at its end.
constexpr std::int64_t kDecodeKeysAhead = kDecodeValueKeys + 1;

// Rows of `heads` kv heads. A unit is the row of one key in one head; units are numbered with the
// head running fastest.
struct HeadRows {
  const char* base = nullptr;  // key 0 of head 0, where keys lie row_bytes apart
  std::ptrdiff_t row_bytes = 0;
  std::ptrdiff_t head_bytes = 0;
  std::int64_t heads = 0;
  // Of pages: head 0 of each key, and of kDecodeKeysAhead more for the fetching. Every
  // kDecodeValueKeys keys lie row_bytes apart.
  const char* const* table = nullptr;

  FLASHATTN_INLINE const char* key_row(std::int64_t key) const {
    return table == nullptr ? base + key * row_bytes : table[key];
  }
  FLASHATTN_INLINE const char* row(std::int64_t key, std::int64_t head) const {
    return key_row(key) + head * head_bytes;
  }
};

// Float32 rows of scratch or of a partial result: query row r of head h starts at
// base + h * head_stride + r * row_stride.
struct HeadFloats {
  float* base = nullptr;
  std::int64_t head_stride = 0;  // floats
  std::int64_t row_stride = 0;

  FLASHATTN_INLINE float* row(std::int64_t head, std::int64_t r) const {
    return base + head * head_stride + r * row_stride;
  }
};

// scores(head, r)[k] = scale * (q(head, r) . key k of head) for query rows [row, row + rows) of
// every head. Entries from count to the next multiple of kLanes become -inf.
template <typename Dot, int rows>
FLASHATTN_NOINLINE void decode_linear_scores(const HeadFloats& q, std::int64_t row,
                                             const TailedDim& dim, float scale,
                                             const HeadRows& keys, std::int64_t count,
                                             const HeadFloats& scores) {
  constexpr int kUnits = kDecodeAccumulators / rows;
  alignas(64) float sums[kDecodeAccumulators];
  const std::int64_t units = count * keys.heads;
  // Stepped and not computed from (key, head): products of strides would outweigh a short row.
  std::int64_t head = 0;
  const char* key = keys.row(0, 0);
  std::int64_t at = 0;  // the key's number, which only a table needs
  const float* q_head = q.row(0, row);
  float* score = scores.row(0, row);
  const std::ptrdiff_t next_key = keys.row_bytes - keys.heads * keys.head_bytes;
  const std::int64_t first_q = keys.heads * q.head_stride;
  const std::int64_t next_score = 1 - keys.heads * scores.head_stride;
  for (std::int64_t unit = 0; unit < units; unit += kUnits) {
    Vec acc[kDecodeAccumulators] = {};
    float* to[kUnits];
    FLASHATTN_UNROLL for (int u = 0; u < kUnits; ++u) {
      const float* q_part = q_head;
      to[u] = score;
      const auto add = [&](Vec x) __attribute__((always_inline)) {
        FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
          Vec& sum = acc[r * kUnits + u];
          sum = Dot::add(sum, x, load(q_part + r * q.row_stride));
        }
      };
      for (std::int64_t d = 0; d < dim.full; d += Dot::kStep, q_part += kLanes) {
        add(Dot::key(key + d * Dot::kItem));
      }
      if (dim.rest() != 0) add(Dot::key_rest(key, dim));
      // A short group repeats its last unit, which gives the same scores again.
      if (unit + u + 1 >= units) continue;
      key += keys.head_bytes;
      q_head += q.head_stride;
      score += scores.head_stride;
      if (++head < keys.heads) continue;
      head = 0;
      key = keys.table == nullptr ? key + next_key : keys.table[++at];
      q_head -= first_q;
      score += next_score;
    }
    FLASHATTN_UNROLL for (int group = 0; group < kDecodeAccumulators / kLanes; ++group) {
      Vec part[kLanes];
      FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) part[i] = acc[group * kLanes + i];
      store(sums + group * kLanes, sum_lanes(part) * broadcast(scale));
    }
    FLASHATTN_UNROLL for (int u = 0; u < kUnits; ++u) {
      FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
        to[u][r * scores.row_stride] = sums[r * kUnits + u];
      }
    }
  }
  for (head = 0; head < keys.heads; ++head) {
    for (int r = 0; r < rows; ++r) {
      float* s = scores.row(head, row + r);
      for (std::int64_t k = count; k % kLanes != 0; ++k) s[k] = -kInfinity;
    }
  }
}

// Walks over the cache lines of the rows from a key on, and fetches one at a time: a burst of
// prefetches stalls. Past the last row it fetches what nobody reads, which is harmless.
class LineWalk {
 public:
  FLASHATTN_INLINE LineWalk(const HeadRows& rows, std::int64_t key, std::int64_t row_bytes)
      : rows_(rows),
        key_(key),
        line_(rows.row(key, 0)),
        end_(line_ + row_bytes),
        row_bytes_(row_bytes) {}

  FLASHATTN_INLINE void fetch() {
    __builtin_prefetch(line_, 0, 2);
    line_ += 64;
    if (line_ < end_) return;
    if (++head_ == rows_.heads) {
      head_ = 0;
      ++key_;
    }
    line_ = rows_.row(key_, head_);
    end_ = line_ + row_bytes_;
  }

 private:
  const HeadRows& rows_;
  std::int64_t key_;
  std::int64_t head_ = 0;
  const char* line_;
  const char* end_;
  std::int64_t row_bytes_;
};

// sum[r][d .. d + vectors * kLanes) += sum over `keys` keys of p[r][k] * value[k].
template <DType dtype, int rows, int vectors, bool rest>
FLASHATTN_INLINE void decode_linear_columns(const float* p, const char* value,
                                            std::ptrdiff_t value_bytes, std::int64_t keys,
                                            const TailedDim& dim, std::int64_t d, float* sums,
                                            std::int64_t sum_stride, LineWalk* ahead) {
  constexpr std::int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  constexpr std::int64_t kBytes = vectors * kLanes * item;
  Vec sum[rows][vectors];
  FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
    FLASHATTN_UNROLL for (int j = 0; j < vectors; ++j) {
      sum[r][j] = load(sums + r * sum_stride + d + j * kLanes);
    }
  }
  for (std::int64_t k = 0; k < keys; ++k, value += value_bytes) {
    Vec v[vectors];
    if constexpr (rest) {
      v[0] = load_rest<dtype>(value, dim);
    } else {
      if (kBytes >= 64 || d * item % 64 == 0) {
        FLASHATTN_UNROLL for (int byte = 0; byte < kBytes; byte += 64) ahead->fetch();
      }
      FLASHATTN_UNROLL for (int j = 0; j < vectors; ++j) {
        v[j] = widen<dtype>(value + (d + j * kLanes) * item);
      }
    }
    FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
      const Vec weight = broadcast(p[r * kDecodeScoreStride + k]);
      FLASHATTN_UNROLL for (int j = 0; j < vectors; ++j) sum[r][j] += weight * v[j];
    }
  }
  FLASHATTN_UNROLL for (int r = 0; r < rows; ++r) {
    FLASHATTN_UNROLL for (int j = 0; j < vectors; ++j) {
      store(sums + r * sum_stride + d + j * kLanes, sum[r][j]);
    }
  }
}

// acc(head, r) += p(head, r) . values of the head, for query rows [row, row + rows) of every head.
// `sums` is scratch of the shape of acc; p's rows are kDecodeScoreStride floats apart.
//
//   for each group of kDecodeValueKeys keys:
//     for each head:  sums += p . values, while the next group is fetched in memory order
template <DType dtype, int rows>
FLASHATTN_NOINLINE void decode_linear_values(const HeadFloats& p, std::int64_t row,
                                             const HeadRows& values, std::int64_t count,
                                             const TailedDim& dim, const HeadFloats& sums,
                                             const HeadFloats& acc) {
  constexpr std::int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  // A cache line of each row where its vectors are used often, several where they are used once.
  constexpr int kLine = 64 / (kLanes * item);
  constexpr int kMost = kDecodeAccumulators / rows < 8 ? kDecodeAccumulators / rows : 8;
  constexpr int kVectors = rows >= 4 && kLine < kMost ? kLine : kMost;
  for (std::int64_t head = 0; head < values.heads; ++head) {
    for (int r = 0; r < rows; ++r) {
      float* sum = sums.row(head, row + r);
      for (std::int64_t d = 0; d < acc.row_stride; d += kLanes) store(sum + d, Vec{});
    }
  }
  for (std::int64_t k = 0; k < count; k += kDecodeValueKeys) {
    const std::int64_t keys = count - k < kDecodeValueKeys ? count - k : kDecodeValueKeys;
    LineWalk ahead(values, k + keys, dim.full * item);
    for (std::int64_t head = 0; head < values.heads; ++head) {
      const float* weights = p.row(head, row) + k;
      const char* value = values.row(k, head);
      float* sum = sums.row(head, row);
      std::int64_t d = 0;
      for (; d + kVectors * kLanes <= dim.full; d += kVectors * kLanes) {
        decode_linear_columns<dtype, rows, kVectors, false>(weights, value, values.row_bytes, keys,
                                                            dim, d, sum, sums.row_stride, &ahead);
      }
      for (; d < dim.full; d += kLanes) {
        decode_linear_columns<dtype, rows, 1, false>(weights, value, values.row_bytes, keys, dim, d,
                                                     sum, sums.row_stride, &ahead);
      }
      if (dim.rest() != 0) {
        decode_linear_columns<dtype, rows, 1, true>(weights, value, values.row_bytes, keys, dim, d,
                                                    sum, sums.row_stride, &ahead);
      }
    }
  }
  for (std::int64_t head = 0; head < values.heads; ++head) {
    for (int r = 0; r < rows; ++r) {
      float* to = acc.row(head, row + r);
      const float* sum = sums.row(head, row + r);
      for (std::int64_t d = 0; d < acc.row_stride; d += kLanes) {
        store(to + d, load(to + d) + load(sum + d));
      }
    }
  }
}

// Query rows [row, row + rows) of each of some kv heads, the first of which is `first`, against a
// block of keys that all of them see, mask included.
template <DType dtype, bool modified, int rows>
FLASHATTN_INLINE void decode_linear_rows(const DecodeHead& first, std::int64_t head_rows,
                                         std::int64_t row, const HeadRows& keys,
                                         const HeadRows& values, Interval block,
                                         const DecodeScratch& scratch) {
  const std::int64_t count = block.end - block.begin;
  // HeadFloats holds writable memory; nothing is written through q.
  const HeadFloats q{const_cast<float*>(first.q), head_rows * first.q_stride, first.q_stride};
  const HeadFloats s{scratch.scores, head_rows * kDecodeScoreStride, kDecodeScoreStride};
  const HeadFloats acc{first.partial.acc, head_rows * first.acc_stride, first.acc_stride};
#if defined(FLASHATTN_HAS_BF16_DOT)
  if (dtype == DType::kBFloat16 && first.q_in_pairs) {
    decode_linear_scores<PairDot, rows>(q, row, first.head_dim, first.score_scale, keys, count, s);
  } else
#endif
  {
    decode_linear_scores<WidenedDot<dtype>, rows>(q, row, first.head_dim, first.score_scale, keys,
                                                  count, s);
  }
  for (std::int64_t head = 0; head < keys.heads; ++head) {
    for (std::int64_t r = row; r < row + rows; ++r) {
      const std::int64_t at = head * head_rows + r;
      float* const p = s.row(head, r);
      const auto softmax = [&] {
        decode_softmax<modified>(p, count, first.partial.max + at, first.partial.sum + at,
                                 acc.row(head, r), first.acc_stride);
      };
      if constexpr (modified) {
        const DecodeModifiers& m = *first.modifiers;
        const DecodeRowKeys keys_of_row{.row = decode_place(*m.job, first.kv_head + head, r),
                                        .key = block.begin,
                                        .count = count};
        decode_modify(m, keys_of_row, nullptr, p);
        softmax();
        if (m.job->dropout.threshold != 0) decode_drop(m, keys_of_row, p);
      } else {
        softmax();
      }
    }
  }
  decode_linear_values<dtype, rows>(s, row, values, count, first.value_dim,
                                    {scratch.sums, acc.head_stride, acc.row_stride}, acc);
}

template <DType dtype, bool modified>
FLASHATTN_INLINE void decode_linear_block(const DecodeHead& first, std::int64_t head_rows,
                                          const HeadRows& keys, const HeadRows& values,
                                          Interval block, const DecodeScratch& scratch) {
  for (std::int64_t row = 0; row < head_rows;) {
    const std::int64_t left = head_rows - row;
    const std::int64_t tile = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const auto run = [&](auto linear_rows) {
      linear_rows(first, head_rows, row, keys, values, block, scratch);
    };
    if (tile == 4) run(decode_linear_rows<dtype, modified, 4>);
    if (tile == 2) run(decode_linear_rows<dtype, modified, 2>);
    if (tile == 1) run(decode_linear_rows<dtype, modified, 1>);
    row += tile;
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
