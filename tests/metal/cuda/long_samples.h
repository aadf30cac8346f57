// What the long runs leave for long_cpu.py: a line of JSON with the problem and the plain
// computation's distances, then of every tensor the rows 0, stride, 2 stride, ... as pairs of
// float64, the kernel's value and the exact one.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "dropout.h"
#include "long_rule.h"

constexpr int kSampleStride = 509;  // a prime: samples meet every place in a block

inline const char* storage_name(Storage storage) {
  switch (storage) {
    case Storage::kFloat16:
      return "float16";
    case Storage::kBFloat16:
      return "bfloat16";
    default:
      return "float32";
  }
}

// What a run leaves for long_cpu.py.
struct Samples {
  std::string folder;

  void write(const Problem& p, Storage storage, const Rule& rule,
             const std::map<std::string, std::vector<float>>& got) const {
    const std::string name = folder + "/" + storage_name(storage) + "_" +
                             std::to_string(p.head_dim) + "_" + std::to_string(p.query_heads) +
                             (p.dropout_p > 0 ? "_dropout" : "") + ".bin";
    std::FILE* file = std::fopen(name.c_str(), "wb");
    if (file == nullptr) std::exit(2);
    std::fprintf(
        file,
        "{\"storage\": \"%s\", \"seqlen_q\": %d, \"seqlen_k\": %d, \"query_heads\": %d, "
        "\"kv_heads\": %d, \"dim\": %d, \"causal\": %s, \"window\": %d, \"dropout_p\": %g, "
        "\"dropout_seed\": %llu, \"dropout_offset\": %llu, \"stride\": %d, \"naive\": {",
        storage_name(storage), p.seqlen_q, p.seqlen_k, p.query_heads, p.kv_heads, p.head_dim,
        p.causal ? "true" : "false", p.window, p.dropout_p,
        static_cast<unsigned long long>(kDropoutSeed),
        static_cast<unsigned long long>(kDropoutOffset), kSampleStride);
    for (const Bound& bound : rule.bounds()) {
      std::fprintf(file, "%s\"%s\": %.17g", &bound == &rule.bounds()[0] ? "" : ", ", bound.name,
                   bound.naive);
    }
    std::fprintf(file, "}}\n");
    for (const Bound& bound : rule.bounds()) {
      const std::vector<float>& values = got.at(bound.name);
      const bool table = std::string(bound.name) == "lse";  // (head, row)
      const int heads = bound.name[1] == 'k' || bound.name[1] == 'v' ? p.kv_heads : p.query_heads;
      const std::size_t row = table ? 1 : static_cast<std::size_t>(heads) * p.head_dim;
      const std::size_t rows = values.size() / row;
      for (std::size_t i = 0; i < rows; i += kSampleStride) {
        for (std::size_t e = i * row; e < (i + 1) * row; ++e) {
          const double pair[] = {values[e], (*bound.exact)[e]};
          std::fwrite(pair, sizeof(double), 2, file);
        }
      }
    }
    std::fclose(file);
  }
};

// One bit per element of out: whether its weight was kept, as numpy's packbits orders them.
inline void write_kept(const std::string& folder, const Problem& p,
                       const std::vector<std::uint8_t>& pattern) {
  const std::string name = folder + "/kept_" + std::to_string(p.head_dim) + ".bits";
  std::FILE* file = std::fopen(name.c_str(), "wb");
  if (file == nullptr) std::exit(2);
  for (std::size_t e = 0; e < pattern.size(); e += 8) {
    unsigned byte = 0;
    for (std::size_t bit = 0; bit < 8; ++bit) byte = byte << 1 | pattern[e + bit];
    std::fputc(static_cast<int>(byte), file);
  }
  std::fclose(file);
}
