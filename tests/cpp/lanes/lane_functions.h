// Functions over vectors of one instruction set that no kernel table exports, made callable for
// tests: lane_functions.cpp is compiled once per instruction set like the kernels, and each copy
// exports one such table.
#pragma once

#include <cstdint>

#include "cpu/job.h"

namespace flashattn::cpu {

struct LaneFunctions {
  const char* isa;
  int lanes;  // of one query block below
  int tile_keys;
  int bias_keys;

  // value[i] = tanh(x[i]), slope[i] its derivative; count is a multiple of 16.
  void (*tanh)(const float* x, std::int64_t count, float* value, float* slope);
  // keep[key][lane] is 1 where the weight stays; `tiles` tiles of keys from first_key on. Lane l is
  // row l of the query head.
  void (*dropout)(const AttentionJob& job, std::int64_t head, std::int64_t first_key, int tiles,
                  std::uint8_t* keep);
  // bias[bias_keys][lanes] of keys from first_key on, for rows as above of batch entry 0; returns
  // its class.
  TileVisibility (*bias)(const AttentionJob& job, std::int64_t head, std::int64_t first_key,
                         float* bias);
  // scores[tile_keys][lanes]: products in, scores out; distances counted from first_key.
  void (*modify)(const AttentionJob& job, std::int64_t head, std::int64_t first_key, int key,
                 float* scores);
};

}  // namespace flashattn::cpu
