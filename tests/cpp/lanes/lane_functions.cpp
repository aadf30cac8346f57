// See lane_functions.h. Like cpu/kernels.cpp it may use no inline function of the standard library.
#include "lanes/lane_functions.h"

#include "cpu/modifiers.h"

#define FLASHATTN_TEXT_OF(name) #name
#define FLASHATTN_TEXT(name) FLASHATTN_TEXT_OF(name)

namespace flashattn::cpu::FLASHATTN_CPU_ISA {
namespace {

// More than one vector in every instruction set, and more than one transpose.
constexpr int kTestLanes = 32;

void tanh_of(const float* x, std::int64_t count, float* value, float* slope) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Tanh t = tanh(load(x + i));
    store(value + i, t.value);
    store(slope + i, t.slope);
  }
}

void set_rows(const AttentionJob& job, std::int64_t head, LaneModifiers<kTestLanes>& m) {
  set_lanes<kTestLanes>(job, 0, [&](int lane) { return LanePlace{.head = head, .row = lane}; }, m);
}

void keep_of(const AttentionJob& job, std::int64_t head, std::int64_t first_key, int tiles,
             std::uint8_t* keep) {
  LaneModifiers<kTestLanes> m;
  set_rows(job, head, m);
  for (int lane = 0; lane < kTestLanes; lane += kLanes) {
    DropoutRun<kTestLanes> run(m.dropout, lane, first_key);
    for (int tile = 0; tile < tiles; ++tile) {
      VecI stays[kTileRows];
      run.next(stays);
      for (int i = 0; i < kTileRows; ++i) {
        for (int l = 0; l < kLanes; ++l) {
          keep[(tile * kTileRows + i) * kTestLanes + lane + l] = stays[i][l] != 0;
        }
      }
    }
  }
}

TileVisibility bias_of(const AttentionJob& job, std::int64_t head, std::int64_t first_key,
                       float* to) {
  LaneModifiers<kTestLanes> m;
  set_rows(job, head, m);
  alignas(64) float scratch[kBiasKeys * kTestLanes];
  Bias bias;
  const TileVisibility visibility = fill_bias(m.mask, first_key, scratch, bias);
  for (int k = 0; k < kBiasKeys; ++k) {
    for (int lane = 0; lane < kTestLanes; ++lane) {
      const bool adds = bias.at != nullptr;
      to[k * kTestLanes + lane] = adds ? bias.at[k * bias.key_stride + lane] : 0.0F;
    }
  }
  return visibility;
}

void modify(const AttentionJob& job, std::int64_t head, std::int64_t first_key, int key,
            float* scores) {
  LaneModifiers<kTestLanes> m;
  set_rows(job, head, m);
  set_first_key(first_key, m);
  alignas(64) float scratch[kBiasKeys * kTestLanes];
  ModifiedTile tile{.key = key};
  if (m.masked) fill_bias(m.mask, first_key + key, scratch, tile.bias);
  for (int lane = 0; lane < kTestLanes; lane += 2 * kLanes) {
    tile.lane = lane;
    Vec s[kTileRows][2];
    load_tile(scores + lane, kTestLanes, s);
    modify_scores(m, tile, s);
    store_tile(scores + lane, kTestLanes, s);
  }
}

}  // namespace

extern const LaneFunctions kLaneFunctions;
const LaneFunctions kLaneFunctions = {.isa = FLASHATTN_TEXT(FLASHATTN_CPU_ISA_NAME),
                                      .lanes = kTestLanes,
                                      .tile_keys = kTileRows,
                                      .bias_keys = kBiasKeys,
                                      .tanh = tanh_of,
                                      .dropout = keep_of,
                                      .bias = bias_of,
                                      .modify = modify};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
