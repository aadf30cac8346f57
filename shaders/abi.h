// The contract between the Metal host and the shaders: parameter structs, buffer slots,
// function-constant ids. One file for both languages, so nothing is spelled twice. It holds plain
// data only, laid out alike by C++20 and MSL: 8-byte members first, no implicit padding.
#pragma once

#if defined(__METAL_VERSION__)
#define FLASHATTN_INT64 long
#define FLASHATTN_UINT64 ulong
#define FLASHATTN_UINT uint
#define FLASHATTN_INT int
#else
#include <cstdint>
#define FLASHATTN_INT64 std::int64_t
#define FLASHATTN_UINT64 std::uint64_t
#define FLASHATTN_UINT std::uint32_t
#define FLASHATTN_INT std::int32_t
namespace flashattn::metal::abi {
#endif

// Where each argument of every kernel is bound. A kernel uses a subset; the slots never change
// their meaning.
enum BufferSlot {
  kBufferQuery = 0,
  kBufferKey = 1,
  kBufferValue = 2,
  kBufferOut = 3,
  kBufferLse = 4,
  kBufferDout = 5,
  kBufferDlse = 6,
  kBufferDelta = 7,
  kBufferDq = 8,
  kBufferDk = 9,
  kBufferDv = 10,
  kBufferRowIntervals = 11,
  kBufferParams = 12,
  // Of the options: bound only where the function constant that an option stands for is on.
  kBufferModifiers = 13,     // ModifierParams
  kBufferMask = 14,          // bool (one byte), float, half or bfloat16, by function constant
  kBufferMaskTiles = 15,     // MaskTileClass, one byte per tile of the mask
  kBufferAlibiSlopes = 16,   // float
  kBufferRowShifts = 17,     // 64-bit (batch): row i stands at key coordinate i + shift
  kBufferSinks = 18,         // float (query_heads)
  kBufferDmask = 19,         // float, the mask's own shape
  kBufferDalibiSlopes = 20,  // float
  kBufferDsinks = 21,        // float
  kBufferSlopeRows =
      22,               // float (batch, query_heads, table_rows), contiguous: dalibi_slopes by row
  kBufferStatus = 23,   // Status, one word: what register kernels found wrong
  kBufferEntries = 24,  // EntryRows (batch), of ragged calls
  kBufferBlockTable = 25,    // 32-bit (batch, max_pages), of paged ones
  kBufferPartialOut = 26,    // float (batch, query_heads, few_rows, chunks, value_dim), contiguous
  kBufferPartialState = 27,  // float (batch, query_heads, few_rows, chunks, 2): maximum, sum
  kBufferCount = 28,
};

// The geometry of a simdgroup and of the tiles, which the host needs to size threadgroups and
// memory. Enumerators rather than program-scope constants: in MSL the latter live in the constant
// address space, which keeps loops over them from unrolling and spills every fragment.
enum Geometry : FLASHATTN_UINT {
  kFragment = 8,     // rows and columns of one simdgroup matrix
  kSimdWidth = 32,   // lanes of a simdgroup
  kLanesPerRow = 4,  // lanes that share one row of a strip in elementwise work
  kPadding = 4,      // floats after each tile row, against bank conflicts
  kFragmentSize = kFragment * kFragment,
};

// How the lanes of a register kernel find the maximum and the sum of a row (exchange.h).
enum ExchangeKind : FLASHATTN_UINT {
  kExchangeAny = 0,
  kExchangeApple = 1,
};

// What a register kernel leaves in the status buffer.
enum Status : FLASHATTN_UINT {
  kStatusGood = 0,
  kStatusLaneMap = 1,  // the device's matrices are laid out otherwise than the kernel needs
  // A value that some row may not see is not finite: the results are void, and the kernels that
  // select have to run.
  kStatusNonFinite = 2,
};

// Yes/no features: one pipeline per combination that is used.
enum FunctionConstantId {
  kConstantAccumulate = 0,    // add to dq, dk, dv instead of overwriting them
  kConstantHasDlse = 1,       // delta subtracts dlse
  kConstantHasModifiers = 2,  // any of the options below
  kConstantHasSoftcap = 3,
  kConstantHasAlibi = 4,
  kConstantHasMask = 5,  // a dense mask; of float32 unless one of the next three is on
  kConstantMaskIsBool = 6,
  kConstantMaskIsHalf = 7,
  kConstantMaskIsBfloat = 8,
  kConstantHasSinks = 9,
  kConstantHasDropout = 10,
  kConstantSlopeGradient = 11,  // dq writes what each row adds to dalibi_slopes
  kConstantIsRagged = 12,       // entries lie where EntryRows says
  kConstantIsPaged = 13,        // keys lie in pages
  kConstantFullRows = 16,       // every row the dispatch owns exists
  kConstantVectorRows = 17,     // rows are contiguous, dimensions multiples of 4, strides short
  kConstantExactTiles = 18,     // head_dim and value_dim fill their tiles
  kConstantSelects = 19,  // values that are not finite are kept from rows that may not see them
  kConstantIsSplit = 20,  // keys in chunks, whose results merge_chunks puts together
};

// What a tile of a dense mask lets through; TileVisibility of core/visibility.h.
enum MaskTileClass {
  kMaskTileNone = 0,
  kMaskTileMixed = 1,
  kMaskTileAll = 2,
};

// Element strides of one (batch, row, head, dim) tensor; any sign, zero included.
struct TensorStrides {
  FLASHATTN_INT64 batch;
  FLASHATTN_INT64 row;
  FLASHATTN_INT64 head;
  FLASHATTN_INT64 dim;
};

// Element strides of one (batch, head, row) table: lse, dlse.
struct ScalarStrides {
  FLASHATTN_INT64 batch;
  FLASHATTN_INT64 head;
  FLASHATTN_INT64 row;
};

// Which keys the rows of one batch entry see: row i sees
// [max(0, i + begin_offset), min(key_limit, i + end_offset)). The host clamps the offsets to
// +-2^30, which changes nothing for lengths below 2^30 and keeps every sum in 32 bits.
struct RowInterval {
  FLASHATTN_INT begin_offset;
  FLASHATTN_INT end_offset;
  FLASHATTN_INT key_limit;
  FLASHATTN_INT unused;
};

// Where the rows of one batch entry lie, and how many there are: Entry of core/entry.h.
struct EntryRows {
  FLASHATTN_UINT query_batch;  // indices on the batch axis; of pages key_batch means nothing
  FLASHATTN_UINT query_row;
  FLASHATTN_UINT key_batch;
  FLASHATTN_UINT key_row;
  FLASHATTN_UINT seqlen_q;
  FLASHATTN_UINT seqlen_k;
  FLASHATTN_UINT first_page;  // of the block table: where the entry's row starts
  FLASHATTN_UINT page_rows;   // rows of a page
};

struct AttentionParams {
  struct TensorStrides query;
  struct TensorStrides key;
  struct TensorStrides value;
  struct TensorStrides out;
  struct TensorStrides dout;
  struct TensorStrides dq;
  struct TensorStrides dk;
  struct TensorStrides dv;
  struct ScalarStrides lse;
  struct ScalarStrides dlse;
  FLASHATTN_UINT query_heads;
  FLASHATTN_UINT kv_heads;
  FLASHATTN_UINT heads_per_kv;
  FLASHATTN_UINT batch;
  FLASHATTN_UINT seqlen_q;
  FLASHATTN_UINT seqlen_k;
  FLASHATTN_UINT head_dim;
  FLASHATTN_UINT value_dim;
  FLASHATTN_UINT first_threadgroup;  // of this dispatch in the whole pass, which may be split
  float scale;
  float scale_log2e;           // scale * log2(e): scores are exponentiated in base 2
  FLASHATTN_UINT first_block;  // of the blocks of rows that a register kernel's dispatch owns
  FLASHATTN_UINT blocks;       // and how many: the ragged last one has a dispatch of its own
  float max_slack;             // by how many powers of two a row's running maximum may lag behind
  FLASHATTN_UINT table_rows;   // of one (batch, head) in delta and slope_rows
  FLASHATTN_UINT few_rows;     // keys of entries of at most so many rows are split; 0: none
  FLASHATTN_UINT chunk_keys;   // of a split call: a multiple of every block of keys
  FLASHATTN_UINT chunks;
};

// Element strides of a (batch, head, row, key) table; 0 along an axis that it is broadcast over.
struct ScoreStrides {
  FLASHATTN_INT64 batch;
  FLASHATTN_INT64 head;
  FLASHATTN_INT64 row;
  FLASHATTN_INT64 key;
};

// The options of a call. Only members of options that are on mean anything.
struct ModifierParams {
  struct ScoreStrides mask;
  struct ScoreStrides mask_tiles;  // (batch, head, tile of rows, tile of keys)
  struct ScoreStrides dmask;
  FLASHATTN_INT64 slopes_batch;  // element strides
  FLASHATTN_INT64 slopes_head;
  FLASHATTN_INT64 dslopes_batch;
  FLASHATTN_INT64 dslopes_head;
  FLASHATTN_INT64 sinks_head;
  FLASHATTN_INT64 dsinks_head;
  // Dropout's numbering, see docs/math.md; arithmetic is modulo 2^64.
  FLASHATTN_UINT64 dropout_offset;
  FLASHATTN_UINT64 global_heads;
  FLASHATTN_UINT64 head_start;
  FLASHATTN_UINT64 global_queries;
  FLASHATTN_UINT64 query_start;
  FLASHATTN_UINT64 global_keys;
  FLASHATTN_UINT64 key_start;
  FLASHATTN_UINT seed_low;
  FLASHATTN_UINT seed_high;
  FLASHATTN_UINT dropout_threshold;  // kept iff (word >> 8) >= this: ceil(probability * 2^24)
  float dropout_scale;               // 1 / (1 - probability), 0 for probability 1
  float softcap;
  float inverse_softcap;
  FLASHATTN_UINT mask_tile_rows;  // scores of one tile of the class table
  FLASHATTN_UINT mask_tile_keys;
  FLASHATTN_UINT mask_batch;  // the mask's own shape: 1 where it is broadcast
  FLASHATTN_UINT mask_heads;
  FLASHATTN_UINT mask_rows;
  FLASHATTN_UINT mask_keys;
  FLASHATTN_UINT slopes_per_batch;  // 1: slopes are (batch, query_heads), 0: (query_heads)
  // dmask: how many of the score tiles that share one tile of the mask this dispatch adds up, from
  // number first_tile on.
  FLASHATTN_UINT tile_count;
  FLASHATTN_UINT64 first_tile;
};

#if !defined(__METAL_VERSION__)
static_assert(sizeof(RowInterval) == 16);
static_assert(sizeof(EntryRows) == 32);
static_assert(sizeof(AttentionParams) == 8 * 32 + 2 * 24 + 18 * 4);
static_assert(sizeof(ModifierParams) == 3 * 32 + 13 * 8 + 14 * 4 + 8);
}  // namespace flashattn::metal::abi
#endif
