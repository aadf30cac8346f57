// The element -> lane map of 8x8 matrices, which Metal leaves unspecified: a kernel must not depend
// on it, so the simulated device can be given any.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace metal_sim {

// [lane * 2 + element] -> row * 8 + column.
using MatrixMap = std::array<std::uint8_t, 64>;

// Names: see METAL_SIM_MAP in settings.h. Throws std::invalid_argument.
MatrixMap make_matrix_map(std::string_view name);

}  // namespace metal_sim
