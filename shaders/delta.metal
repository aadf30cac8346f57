// delta = rowsum(dout * out) - dlse, one simdgroup per query row: what every score gradient of the
// row subtracts.
#include "entries.h"
#include "tile.h"

constant bool has_dlse [[function_constant(kConstantHasDlse)]];

// out, dout: (batch, row, head, dim) by params' strides; dlse: (batch, head, row); delta:
// contiguous (batch, query_heads, table_rows).
template <typename T, uint rows>
[[kernel]] void delta_rows(device const T* out [[buffer(kBufferOut)]],
                           device const T* dout [[buffer(kBufferDout)]],
                           device const float* dlse
                           [[buffer(kBufferDlse), function_constant(has_dlse)]],
                           device float* delta [[buffer(kBufferDelta)]], FLASHATTN_ENTRY_ARGUMENT,
                           constant AttentionParams& params [[buffer(kBufferParams)]],
                           uint threadgroup_index [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint blocks = (params.seqlen_q + rows - 1) / rows;
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint b = task / blocks / params.query_heads;
  const uint h = task / blocks % params.query_heads;
  const uint i = task % blocks * rows + simdgroup;
  const EntryRows entry = entry_rows(params, entries, b);
  if (i >= entry.seqlen_q) return;
  device const T* out_row = query_pointer(out, params.out, entry, h, i);
  device const T* dout_row = query_pointer(dout, params.dout, entry, h, i);
  float sum = 0.0f;
  for (uint d = lane; d < params.value_dim; d += kSimdWidth) {
    sum += to_float(out_row[FLASHATTN_INT64(d) * params.out.dim]) *
           to_float(dout_row[FLASHATTN_INT64(d) * params.dout.dim]);
  }
  sum = simdgroup_total(sum);
  if (!is_finite_bits(sum)) {
    // A row that sees nothing has an out of 0 and no dout . out, whatever dout holds there.
    bool has_out = false;
    for (uint d = lane; d < params.value_dim; d += kSimdWidth) {
      has_out = has_out || to_float(out_row[FLASHATTN_INT64(d) * params.out.dim]) != 0.0f;
    }
    if (!simd_any(has_out)) sum = 0.0f;
  }
  if (has_dlse) sum -= dlse[query_index(params.dlse, entry, h, i)];
  if (lane == 0) delta[table_index(params, entry, h) + i] = sum;
}
