// delta = rowsum(dout * out) - dlse, one simdgroup per query row: what every score gradient of the
// row subtracts.
#include "tile.h"

constant bool has_dlse [[function_constant(kConstantHasDlse)]];

// out, dout: (batch, row, head, dim) by params' strides; dlse: (batch, head, row); delta:
// contiguous (batch, query_heads, seqlen_q).
template <typename T, uint rows>
[[kernel]] void delta_rows(device const T* out [[buffer(kBufferOut)]],
                           device const T* dout [[buffer(kBufferDout)]],
                           device const float* dlse
                           [[buffer(kBufferDlse), function_constant(has_dlse)]],
                           device float* delta [[buffer(kBufferDelta)]],
                           constant AttentionParams& params [[buffer(kBufferParams)]],
                           uint threadgroup_index [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint blocks = (params.seqlen_q + rows - 1) / rows;
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint b = task / blocks / params.query_heads;
  const uint h = task / blocks % params.query_heads;
  const uint i = task % blocks * rows + simdgroup;
  if (i >= params.seqlen_q) return;
  device const T* out_row = row_pointer(out, params.out, b, h, i);
  device const T* dout_row = row_pointer(dout, params.dout, b, h, i);
  float sum = 0.0f;
  for (uint d = lane; d < params.value_dim; d += kSimdWidth) {
    sum += to_float(out_row[FLASHATTN_INT64(d) * params.out.dim]) *
           to_float(dout_row[FLASHATTN_INT64(d) * params.dout.dim]);
  }
  sum = simdgroup_total(sum);
  if (has_dlse) sum -= dlse[scalar_index(params.dlse, b, h, i)];
  if (lane == 0) delta[(FLASHATTN_INT64(b) * params.query_heads + h) * params.seqlen_q + i] = sum;
}
