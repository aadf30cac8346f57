// One pass over a mask; see mask_tiles.h. A tile's class is two facts gathered over its elements:
// whether one is open, and whether one changes a score.
#include "core/mask_tiles.h"

#include <algorithm>

namespace flashattn {
namespace {

// Non-zero members say yes. Gathered with OR alone, so that loops over contiguous elements become
// vector code.
template <class Bits>
struct Facts {
  Bits open = 0;
  Bits changes = 0;
};

// Elements of each dtype as unsigned bits. Floats: -inf is all that is closed, +0 and -0 all that
// changes nothing; `magnitude` is every bit but the sign.
template <class Bits, Bits minus_infinity, Bits magnitude>
struct FloatElements {
  using Item = Bits;
  static void add(Bits item, Facts<Bits>& facts) {
    facts.open = static_cast<Bits>(facts.open | (item ^ minus_infinity));
    facts.changes = static_cast<Bits>(facts.changes | (item & magnitude));
  }
};

struct BoolElements {
  using Item = std::uint8_t;
  static void add(std::uint8_t item, Facts<std::uint8_t>& facts) {
    facts.open = static_cast<std::uint8_t>(facts.open | item);
    facts.changes = static_cast<std::uint8_t>(facts.changes | (item == 0 ? 1 : 0));
  }
};

template <class Elements>
TileVisibility class_of_tile(const char* first, std::int64_t row_bytes, std::int64_t key_bytes,
                             std::int64_t rows, std::int64_t keys) {
  using Item = typename Elements::Item;
  Facts<Item> facts;
  for (std::int64_t i = 0; i < rows; ++i, first += row_bytes) {
    if (key_bytes == static_cast<std::int64_t>(sizeof(Item))) {
      const auto* const row = reinterpret_cast<const Item*>(first);
      for (std::int64_t k = 0; k < keys; ++k) Elements::add(row[k], facts);
    } else {
      for (std::int64_t k = 0; k < keys; ++k) {
        Elements::add(*reinterpret_cast<const Item*>(first + k * key_bytes), facts);
      }
    }
    if (facts.open != 0 && facts.changes != 0) return TileVisibility::kMixed;
  }
  if (facts.open == 0) return TileVisibility::kNone;
  return facts.changes == 0 ? TileVisibility::kAll : TileVisibility::kMixed;
}

template <class Elements>
void classify_strip(const ScoreMask& mask, const MaskTiles& tiles, std::int64_t strip,
                    Interval keys) {
  constexpr auto item = static_cast<std::int64_t>(sizeof(typename Elements::Item));
  const std::int64_t plane = strip / tiles.row_tiles();
  const std::int64_t row = strip % tiles.row_tiles() * tiles.tile_rows;
  // Planes are numbered with the head running fastest where both axes have their own.
  const std::int64_t heads = tiles.batch_step > 0 ? tiles.batch_step : tiles.planes;
  const char* const first = mask.row(plane / heads, plane % heads, row);
  const std::int64_t rows = std::min(tiles.tile_rows, tiles.seqlen_q - row);
  TileVisibility* const to = tiles.data + strip * tiles.key_tiles();
  for (std::int64_t t = 0; t < tiles.key_tiles(); ++t) {
    const std::int64_t key = t * tiles.tile_keys;
    if (key + tiles.tile_keys <= keys.begin || key >= keys.end) {
      to[t] = TileVisibility::kMixed;
      continue;
    }
    to[t] = class_of_tile<Elements>(first + key * mask.key_stride * item, mask.row_stride * item,
                                    mask.key_stride * item, rows,
                                    std::min(tiles.tile_keys, tiles.seqlen_k - key));
  }
}

}  // namespace

ScoreMask score_mask_of(const TensorView& view) {
  if (!view) return {};
  // Axis `from_last` of the scores, counted from the last one.
  const auto stride = [&](int from_last) -> std::int64_t {
    const int axis = view.rank - 1 - from_last;
    if (axis < 0 || view.shape[static_cast<std::size_t>(axis)] == 1) return 0;
    return view.stride[static_cast<std::size_t>(axis)];
  };
  return {.data = view.data,
          .dtype = view.dtype,
          .batch_stride = stride(3),
          .head_stride = stride(2),
          .row_stride = stride(1),
          .key_stride = stride(0)};
}

MaskTiles mask_tiles_of(const ScoreMask& mask, const MaskTileSizes& sizes) {
  const std::int64_t heads = mask.head_stride == 0 ? 1 : sizes.query_heads;
  const std::int64_t batches = mask.batch_stride == 0 ? 1 : sizes.batch;
  return {.data = nullptr,
          .seqlen_q = sizes.seqlen_q,
          .seqlen_k = sizes.seqlen_k,
          .tile_rows = sizes.tile_rows,
          .tile_keys = sizes.tile_keys,
          .planes = batches * heads,
          .batch_step = mask.batch_stride == 0 ? 0 : heads,
          .head_step = mask.head_stride == 0 ? 0 : 1};
}

void classify_mask_tiles(const ScoreMask& mask, const MaskTiles& tiles, std::int64_t strip,
                         Interval keys) {
  switch (mask.dtype) {
    case DType::kFloat16:
      return classify_strip<FloatElements<std::uint16_t, 0xfc00U, 0x7fffU>>(mask, tiles, strip,
                                                                            keys);
    case DType::kBFloat16:
      return classify_strip<FloatElements<std::uint16_t, 0xff80U, 0x7fffU>>(mask, tiles, strip,
                                                                            keys);
    case DType::kFloat64:
      return classify_strip<
          FloatElements<std::uint64_t, 0xfff0'0000'0000'0000U, 0x7fff'ffff'ffff'ffffU>>(
          mask, tiles, strip, keys);
    case DType::kFloat32:
      return classify_strip<FloatElements<std::uint32_t, 0xff80'0000U, 0x7fff'ffffU>>(mask, tiles,
                                                                                      strip, keys);
    default:
      return classify_strip<BoolElements>(mask, tiles, strip, keys);
  }
}

}  // namespace flashattn
