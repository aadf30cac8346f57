// The classes of a mask's tiles: against a look at every element, for every dtype and for masks
// that are broadcast by shape or by stride.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/half.h"
#include "core/mask_tiles.h"

namespace {

using namespace flashattn;

struct Classified {
  MaskTiles tiles;
  std::vector<TileVisibility> memory;
};

Classified classify(const TensorView& view, const MaskTileSizes& sizes,
                    Interval keys = {0, kUnlimited}) {
  const ScoreMask mask = score_mask_of(view);
  Classified made{.tiles = mask_tiles_of(mask, sizes), .memory = {}};
  made.memory.resize(static_cast<std::size_t>(made.tiles.bytes()));
  made.tiles.data = made.memory.data();
  for (std::int64_t s = 0; s < made.tiles.strips(); ++s)
    classify_mask_tiles(mask, made.tiles, s, keys);
  return made;
}

// 10 rows x 13 keys in tiles of 4 x 5: the first row of tiles is closed, open, closed; the others
// mixed but for the last, which is open.
template <class Item>
void check_dtype(DType dtype, Item open, Item closed, Item other) {
  std::vector<Item> items(10 * 13, closed);
  const auto at = [&](int row, int key) -> Item& {
    return items[static_cast<std::size_t>(row * 13 + key)];
  };
  for (int row = 0; row < 4; ++row) {
    for (int key = 5; key < 10; ++key) at(row, key) = open;
  }
  for (int row = 8; row < 10; ++row) {
    for (int key = 10; key < 13; ++key) at(row, key) = open;
  }
  at(5, 0) = open;
  at(7, 9) = other;
  at(6, 12) = other;
  at(8, 0) = other;
  at(9, 7) = other;
  const MaskTileSizes sizes{
      .batch = 2, .query_heads = 3, .seqlen_q = 10, .seqlen_k = 13, .tile_rows = 4, .tile_keys = 5};
  const Classified made = classify(contiguous_view(items.data(), dtype, 10, 13), sizes);
  using enum TileVisibility;
  const std::vector<TileVisibility> expected = {kNone,  kAll,   kNone,  kMixed, kMixed,
                                                kMixed, kMixed, kMixed, kAll};
  BOOST_TEST((made.memory == expected));
  BOOST_TEST(made.tiles.planes == 1);
  // Wherever the plane is shared, every batch entry and head reads it.
  BOOST_TEST((made.tiles.of(1, 2, {8, 12}, {10, 15}) == kAll));
  BOOST_TEST((made.tiles.of(1, 2, {0, 4}, {5, 10}) == kAll));
  BOOST_TEST((made.tiles.of(0, 0, {0, 4}, {0, 5}) == kNone));
  BOOST_TEST((made.tiles.of(0, 0, {0, 4}, {4, 6}) == kMixed));
  BOOST_TEST((made.tiles.of(0, 0, {0, 5}, {0, 1}) == kMixed));
}

}  // namespace

BOOST_AUTO_TEST_SUITE(mask_tiles)

BOOST_AUTO_TEST_CASE(every_dtype) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr float kInfinity32 = std::numeric_limits<float>::infinity();
  check_dtype<std::uint8_t>(DType::kBool, 1, 0, 1);
  check_dtype<float>(DType::kFloat32, -0.0F, -kInfinity32, 1e-40F);
  check_dtype<double>(DType::kFloat64, 0.0, -kInfinity, -1e300);
  check_dtype<std::uint16_t>(DType::kFloat16, 0x8000U, float_to_float16(-kInfinity32), 1U);
  check_dtype<std::uint16_t>(DType::kBFloat16, 0U, float_to_bfloat16(-kInfinity32), 0x7fc0U);
}

BOOST_AUTO_TEST_CASE(nan_is_neither_open_nor_closed) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> items = {nan, nan, -nan, nan};
  const Classified made = classify(
      contiguous_view(items.data(), DType::kFloat32, 2, 2),
      {.batch = 1, .query_heads = 1, .seqlen_q = 2, .seqlen_k = 2, .tile_rows = 2, .tile_keys = 2});
  BOOST_TEST((made.memory[0] == TileVisibility::kMixed));
}

BOOST_AUTO_TEST_CASE(each_plane_of_its_own_and_none_twice) {
  // Batch entry b, head h: all open iff b + h is even.
  std::vector<std::uint8_t> items;
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 3; ++h) items.insert(items.end(), 4 * 4, (b + h) % 2 == 0 ? 1 : 0);
  }
  const MaskTileSizes sizes{
      .batch = 2, .query_heads = 3, .seqlen_q = 4, .seqlen_k = 4, .tile_rows = 3, .tile_keys = 4};
  TensorView view = contiguous_view(items.data(), DType::kBool, 2, 3, 4, 4);
  const auto expected = [](std::int64_t b, std::int64_t h) {
    return (b + h) % 2 == 0 ? TileVisibility::kAll : TileVisibility::kNone;
  };
  const auto check = [&](std::int64_t planes, bool by_batch, bool by_head) {
    const Classified made = classify(view, sizes);
    BOOST_TEST(made.tiles.planes == planes);
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t h = 0; h < 3; ++h) {
        const TileVisibility got = made.tiles.of(b, h, {0, 4}, {0, 4});
        BOOST_TEST((got == expected(by_batch ? b : 0, by_head ? h : 0)));
      }
    }
  };
  check(6, true, true);
  view.shape[0] = 1;
  check(3, false, true);
  view = contiguous_view(items.data(), DType::kBool, 2, 3, 4, 4);
  view.stride[1] = 0;
  check(2, true, false);
  view.stride[0] = 0;
  check(1, false, false);
}

BOOST_AUTO_TEST_CASE(backwards_and_scattered_elements) {
  std::vector<std::uint8_t> items(8 * 16, 0);
  for (std::size_t row = 0; row < 4; ++row) {
    for (std::size_t key = 0; key < 16; key += 2) items[row * 16 + key] = 1;
  }
  TensorView view = contiguous_view(items.data(), DType::kBool, 8, 8);
  view.data = items.data() + 7 * 16;
  view.stride = {-16, 2};
  const Classified made = classify(
      view,
      {.batch = 1, .query_heads = 1, .seqlen_q = 8, .seqlen_k = 8, .tile_rows = 4, .tile_keys = 8});
  BOOST_TEST((made.memory[0] == TileVisibility::kNone));
  BOOST_TEST((made.memory[1] == TileVisibility::kAll));
}

BOOST_AUTO_TEST_CASE(keys_that_nobody_sees_are_not_read) {
  std::vector<std::uint8_t> items(2 * 12, 1);
  const MaskTileSizes sizes{
      .batch = 1, .query_heads = 1, .seqlen_q = 2, .seqlen_k = 12, .tile_rows = 2, .tile_keys = 3};
  const Classified made =
      classify(contiguous_view(items.data(), DType::kBool, 2, 12), sizes, {5, 7});
  using enum TileVisibility;
  BOOST_TEST((made.memory == std::vector{kMixed, kAll, kAll, kMixed}));
}

BOOST_AUTO_TEST_CASE(only_masks_with_rows_and_keys_are_dense) {
  std::vector<float> items(6 * 6, 0.0F);
  const auto dense = [&](std::int64_t rows, std::int64_t keys) {
    return is_dense(score_mask_of(contiguous_view(items.data(), DType::kFloat32, rows, keys)));
  };
  BOOST_TEST(dense(6, 6));
  BOOST_TEST(!dense(1, 6));
  BOOST_TEST(!dense(6, 1));
  BOOST_TEST(!is_dense({}));
  TensorView expanded = contiguous_view(items.data(), DType::kFloat32, 6, 6);
  expanded.stride[0] = 0;
  BOOST_TEST(!is_dense(score_mask_of(expanded)));
}

BOOST_AUTO_TEST_SUITE_END()
