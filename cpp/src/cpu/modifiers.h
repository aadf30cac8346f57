// What is done to a score between the product and the softmax, for scores whose queries stand in
// the lanes: s = scale * (q . k), softcap, ALiBi, mask, in this order and in natural units; and the
// dropout of the weights. Written for any number of lanes, so that forward and backward compute the
// same bits. Which modifiers a call has is a run-time question asked once per tile. Sinks touch no
// score: they are where the softmax starts.
//
//   set_lanes          once per query block: what belongs to the lanes' rows
//   set_first_key      once per key block
//   fill_bias          once per kBiasKeys keys (mask_lanes.h)
//   modify_scores      per register tile
//   DropoutRun::next   per register tile of one vector (philox_lanes.h)
#pragma once

#include "cpu/mask_lanes.h"
#include "cpu/philox_lanes.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Row `row` of query head `head`. Lanes of one block may belong to several heads.
struct LanePlace {
  std::int64_t head;
  std::int64_t row;
};

template <int lanes>
struct LaneModifiers {
  float scale = 1.0F;
  float cap = 0.0F;  // 0: no softcap
  float scale_over_cap = 0.0F;
  bool alibi = false;
  bool masked = false;
  bool drops = false;
  float keep_scale = 1.0F;
  alignas(64) float slope[lanes];
  // Key coordinate at which a lane's row stands, and its distance from the key block's first key:
  // exact below 2^24, and rounded only once beyond, however far from 0 both stand.
  std::int64_t position[lanes];
  alignas(64) float distance[lanes];
  MaskLanes<lanes> mask;
  DropoutLanes<lanes> dropout;
};

// What a product is multiplied by to be tanh's argument. Finite, so that a score of 0 stays 0 under
// the smallest caps.
FLASHATTN_INLINE float scale_over_cap(const AttentionJob& job) {
  constexpr double kMost = 3.4028234663852886e38;
  const double factor = static_cast<double>(job.scale) / static_cast<double>(job.softcap);
  return static_cast<float>(factor > kMost ? kMost : factor < -kMost ? -kMost : factor);
}

// place_of(lane) gives the row of every lane; lanes without one repeat another's.
template <int lanes, class PlaceOf>
FLASHATTN_INLINE void set_lanes(const AttentionJob& job, std::int64_t batch,
                                const PlaceOf& place_of, LaneModifiers<lanes>& m) {
  m.scale = job.scale;
  m.cap = job.softcap;
  if (m.cap != 0.0F) m.scale_over_cap = scale_over_cap(job);
  m.alibi = job.slopes.data != nullptr;
  m.masked = job.mask.data != nullptr;
  m.drops = job.dropout.threshold != 0;
  m.keep_scale = job.dropout.keep_scale;
  if (m.drops) m.dropout.philox = philox_lanes(job.dropout);
  for (int lane = 0; lane < lanes; ++lane) {
    const LanePlace at = place_of(lane);
    if (m.alibi) {
      m.slope[lane] = job.slopes.at(batch, at.head);
      m.position[lane] = at.row + job.visibility[batch].shift;
    }
    if (m.masked) m.mask.row[lane] = mask_row(job, batch, at.head, at.row);
    if (m.drops) {
      m.dropout.set(lane, job.dropout.numbering.index(static_cast<std::uint64_t>(batch),
                                                      static_cast<std::uint64_t>(at.head),
                                                      static_cast<std::uint64_t>(at.row), 0));
    }
  }
  if (m.masked) finish_mask_lanes(job.mask, job.seqlen_k, m.mask);
}

template <int lanes>
FLASHATTN_INLINE void set_first_key(std::int64_t first_key, LaneModifiers<lanes>& m) {
  if (!m.alibi) return;
  for (int lane = 0; lane < lanes; ++lane) {
    m.distance[lane] = static_cast<float>(m.position[lane] - first_key);
  }
}

// A register tile: kTileRows keys from `key` on, counted from the key block's first, and the lanes
// from `lane` on.
struct ModifiedTile {
  int lane = 0;
  int key = 0;
  Bias bias{};  // of the tile's first key, lane 0; null where there is none to add
};

// s: q . k in, scores out. slopes, which may be null: [kTileRows][vecs], d softcap(s) / ds.
template <int lanes, int vecs>
FLASHATTN_INLINE void cap_scores(const LaneModifiers<lanes>& m, Vec (&s)[kTileRows][vecs],
                                 Vec (*slopes)[vecs]) {
  FLASHATTN_UNROLL for (int i = 0; i < kTileRows; ++i) {
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
      const Tanh t = tanh(s[i][n] * broadcast(m.scale_over_cap));
      s[i][n] = t.value * broadcast(m.cap);
      if (slopes != nullptr) slopes[i][n] = t.slope;
    }
  }
}

// How far key i of the tile stands from the rows of its vector n of lanes.
template <int lanes>
FLASHATTN_INLINE Vec distance(const LaneModifiers<lanes>& m, const ModifiedTile& tile, int i,
                              int n) {
  const Vec apart =
      load(m.distance + tile.lane + n * kLanes) - broadcast(static_cast<float>(tile.key + i));
  return magnitude(apart);
}

template <int lanes, int vecs>
FLASHATTN_INLINE void subtract_distances(const LaneModifiers<lanes>& m, const ModifiedTile& tile,
                                         Vec (&s)[kTileRows][vecs]) {
  FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
    const Vec slope = load(m.slope + tile.lane + n * kLanes);
    FLASHATTN_UNROLL for (int i = 0; i < kTileRows; ++i) s[i][n] -= slope * distance(m, tile, i, n);
  }
}

// Selects, so that an excluded score is -inf even when it was NaN.
template <int vecs>
FLASHATTN_INLINE void add_bias(const ModifiedTile& tile, Vec (&s)[kTileRows][vecs]) {
  FLASHATTN_UNROLL for (int i = 0; i < kTileRows; ++i) {
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
      const Vec bias = load(tile.bias.at + i * tile.bias.key_stride + tile.lane + n * kLanes);
      s[i][n] = select(bias == broadcast(-kInfinity), bias, s[i][n] + bias);
    }
  }
}

template <int lanes, int vecs>
FLASHATTN_INLINE void modify_scores(const LaneModifiers<lanes>& m, const ModifiedTile& tile,
                                    Vec (&s)[kTileRows][vecs], Vec (*slopes)[vecs] = nullptr) {
  if (m.cap != 0.0F) {
    cap_scores(m, s, slopes);
  } else {
    FLASHATTN_UNROLL for (int i = 0; i < kTileRows; ++i) {
      FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) s[i][n] *= broadcast(m.scale);
    }
  }
  if (m.alibi) subtract_distances(m, tile, s);
  if (tile.bias.at != nullptr) add_bias(tile, s);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
