// The contract between the Metal host and the shaders: parameter structs, buffer slots,
// function-constant ids. One file for both languages, so nothing is spelled twice. It holds plain
// data only, laid out alike by C++20 and MSL: 8-byte members first, no implicit padding.
#pragma once

#if defined(__METAL_VERSION__)
#define FLASHATTN_INT64 long
#define FLASHATTN_UINT uint
#define FLASHATTN_INT int
#else
#include <cstdint>
#define FLASHATTN_INT64 std::int64_t
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

// Yes/no features: one pipeline per combination that is used.
enum FunctionConstantId {
  kConstantAccumulate = 0,  // add to dq, dk, dv instead of overwriting them
  kConstantHasDlse = 1,     // delta subtracts dlse
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
  float scale_log2e;  // scale * log2(e): scores are exponentiated in base 2
  FLASHATTN_UINT unused;
};

#if !defined(__METAL_VERSION__)
static_assert(sizeof(RowInterval) == 16);
static_assert(sizeof(AttentionParams) == 8 * 32 + 2 * 24 + 12 * 4);
}  // namespace flashattn::metal::abi
#endif
