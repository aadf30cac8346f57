// Writes where the lanes' elements of an 8x8 matrix of F stand, for the host to choose kernels by.
// One threadgroup of two simdgroups, a thread to each element.
#include "lane_map.h"
#include "tile.h"

// positions: 64 words; words 2 lane and 2 lane + 1 are 8 row + column of the lane's two elements.
template <typename F>
[[kernel]] void lane_map_probe(device uint* positions [[buffer(kBufferOut)]],
                               uint thread_index [[thread_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  threadgroup F numbers[kFragmentSize];
  numbers[thread_index] = F(float(thread_index));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const LaneMap map = read_lane_map<F>(numbers);
  if (thread_index >= kSimdWidth) return;
  positions[2 * lane] = map.row0 * kFragment + map.column0;
  positions[2 * lane + 1] = map.row1 * kFragment + map.column1;
}
