// Dropout of check problems: the CPU backend's generator and numbering (core/philox.h), for code of
// the host and of the GPU alike.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/inline.h"
#include "problem.h"
#if defined(__CUDACC__)
#undef FLASHATTN_INLINE
#define FLASHATTN_INLINE __host__ __device__ inline
#endif
#include "core/philox.h"

// Words beyond 32 bits, so that every half of Philox's counter and key counts.
constexpr std::uint64_t kDropoutSeed = 0x0123456789abcdefULL;
constexpr std::uint64_t kDropoutOffset = (1ULL << 40) + 5;

inline std::uint32_t dropout_threshold(const Problem& p) {
  return static_cast<std::uint32_t>(std::ceil(p.dropout_p * 0x1p24));
}

// Whether the weight of score (b, h, i, j) stays.
FLASHATTN_INLINE bool keeps(const Problem& p, std::uint32_t threshold, int b, int h, int i, int j) {
  const std::uint64_t row =
      (static_cast<std::uint64_t>(b) * p.query_heads + h) * p.seqlen_q + static_cast<unsigned>(i);
  const std::uint64_t n = row * p.seqlen_k + static_cast<unsigned>(j);
  return (flashattn::dropout_block(kDropoutSeed, kDropoutOffset, n / 4).word[n % 4] >> 8) >=
         threshold;
}
