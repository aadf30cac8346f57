// The families of maps. Only `apple` was ever observed on hardware (published by the MLX and
// metal-flash-attention projects); the others are what a future device is allowed to do.
#include "matrix_map.h"

#include <charconv>
#include <stdexcept>
#include <string>
#include <utility>

#include "random.h"

namespace metal_sim {
namespace {

MatrixMap row_major() {
  MatrixMap map{};
  for (std::uint8_t i = 0; i < 64; ++i) map[i] = i;
  return map;
}

MatrixMap apple() {
  MatrixMap map{};
  for (int lane = 0; lane < 32; ++lane) {
    const int quad = lane / 4;
    const int row = (quad & 4) + (lane / 2) % 4;
    const int column = (quad & 2) * 2 + (lane % 2) * 2;
    map[static_cast<std::size_t>(lane * 2)] = static_cast<std::uint8_t>(row * 8 + column);
    map[static_cast<std::size_t>(lane * 2 + 1)] = static_cast<std::uint8_t>(row * 8 + column + 1);
  }
  return map;
}

MatrixMap transposed(const MatrixMap& map) {
  MatrixMap result{};
  for (std::size_t i = 0; i < 64; ++i)
    result[i] = static_cast<std::uint8_t>((map[i] % 8) * 8 + map[i] / 8);
  return result;
}

template <class Array>
void shuffle(Array& values, Random& random) {
  for (std::size_t i = values.size(); i-- > 1;)
    std::swap(values[i], values[random.below(static_cast<std::uint32_t>(i + 1))]);
}

MatrixMap random_map(Random random) {
  MatrixMap map = row_major();
  shuffle(map, random);
  return map;
}

// Both elements of a lane share a row; `adjacent`: in neighbouring columns, in either order.
MatrixMap pairs_in_rows(Random random, bool adjacent) {
  std::array<std::array<std::uint8_t, 2>, 32> pairs{};
  for (std::uint8_t row = 0; row < 8; ++row) {
    std::array<std::uint8_t, 8> columns{0, 1, 2, 3, 4, 5, 6, 7};
    if (!adjacent) shuffle(columns, random);
    for (std::uint8_t k = 0; k < 4; ++k) {
      std::uint8_t first = columns[k * 2u];
      std::uint8_t second = columns[k * 2u + 1u];
      if (adjacent && random.below(2) == 1) std::swap(first, second);
      pairs[row * 4u + k] = {static_cast<std::uint8_t>(row * 8 + first),
                             static_cast<std::uint8_t>(row * 8 + second)};
    }
  }
  shuffle(pairs, random);
  MatrixMap map{};
  for (std::size_t i = 0; i < 64; ++i) map[i] = pairs[i / 2][i % 2];
  return map;
}

std::uint64_t parse_seed(std::string_view text, std::string_view name) {
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size())
    throw std::invalid_argument("METAL_SIM_MAP=" + std::string(name) +
                                ": expected a number after ':'");
  return seed;
}

}  // namespace

MatrixMap make_matrix_map(std::string_view name) {
  if (name == "row") return row_major();
  if (name == "column") return transposed(row_major());
  if (name == "apple") return apple();
  if (name == "apple_transposed") return transposed(apple());
  const std::size_t colon = name.find(':');
  const std::string_view family = name.substr(0, colon);
  if (colon != std::string_view::npos) {
    const Random random(parse_seed(name.substr(colon + 1), name) * 7919u + 1u);
    if (family == "random") return random_map(random);
    if (family == "row_pair") return pairs_in_rows(random, false);
    if (family == "adjacent") return pairs_in_rows(random, true);
    if (family == "column_pair") return transposed(pairs_in_rows(random, false));
  }
  throw std::invalid_argument(
      "METAL_SIM_MAP=" + std::string(name) +
      ": expected row, column, apple, apple_transposed, random:N, row_pair:N, "
      "adjacent:N or column_pair:N");
}

}  // namespace metal_sim
