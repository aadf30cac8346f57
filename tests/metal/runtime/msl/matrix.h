// simdgroup_matrix<T, 8, 8>: two elements per lane, whose place in the tile only the runtime's map
// knows. A multiply is a chain of fused float multiply-adds in ascending k, whatever the element
// types, rounded to the type of the destination once. Public measurements of Apple GPUs show matrix
// multiplies at the rate of fused multiply-adds; the order of the chain is a guess.
#pragma once

#include "simd.h"

namespace metal_sim {
METAL_SIM_RUNTIME const uint8_t* matrix_positions() { return runtime->matrix_positions(); }
METAL_SIM_RUNTIME void matrix_access_begin(const void* pointer, size_t bytes, bool store,
                                           abi::Source source) {
  runtime->matrix_access_begin(pointer, bytes, store, source);
}
METAL_SIM_RUNTIME void matrix_access_end() { runtime->matrix_access_end(); }
METAL_SIM_RUNTIME void multiply(float* d, const float* a, const float* b, const float* c,
                                abi::Source source) {
  runtime->multiply(d, a, b, c, source);
}
struct TilePosition {
  uint row[2];
  uint column[2];
};
METAL_SIM_RUNTIME TilePosition tile_position() {
  const uint8_t* p = runtime->matrix_positions();
  return TilePosition{{p[0] / 8u, p[1] / 8u}, {p[0] % 8u, p[1] % 8u}};
}
}  // namespace metal_sim

namespace metal {

template <class T, int rows, int columns>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "only 8x8 matrices exist");
  typedef vec<T, 2> storage_type;
  storage_type elements;

  // Undefined in Metal: NaN here, so that a use of it shows in the result.
  METAL_SIM_INLINE simdgroup_matrix() { elements[0] = elements[1] = T(__builtin_nanf("")); }
  // A diagonal matrix.
  METAL_SIM_INLINE explicit simdgroup_matrix(T diagonal) {
    const metal_sim::TilePosition at = metal_sim::tile_position();
    for (int i = 0; i < 2; ++i) elements[i] = at.row[i] == at.column[i] ? diagonal : T(0);
  }
  METAL_SIM_INLINE storage_type& thread_elements() { return elements; }
  METAL_SIM_INLINE const storage_type& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int rows, int columns>
METAL_SIM_INLINE simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> m;
  m.elements[0] = m.elements[1] = value;
  return m;
}

// Element (row, column) of the tile is source[(origin.y + row) * row_stride + origin.x + column];
// `transpose` swaps row and column.
template <class T>
METAL_SIM_COLLECTIVE void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* source,
                                         ulong row_stride = 8, ulong2 origin = ulong2(0),
                                         bool transpose = false, METAL_SIM_SOURCE) {
  const metal_sim::TilePosition at = metal_sim::tile_position();
  metal_sim::matrix_access_begin(source, 64 * sizeof(T), false, METAL_SIM_HERE);
  for (int i = 0; i < 2; ++i) {
    const ulong row = transpose ? at.column[i] : at.row[i];
    const ulong column = transpose ? at.row[i] : at.column[i];
    d.elements[i] = source[(origin.y + row) * row_stride + origin.x + column];
  }
  metal_sim::matrix_access_end();
}
template <class T>
METAL_SIM_COLLECTIVE void simdgroup_store(simdgroup_matrix<T, 8, 8> d, T* destination,
                                          ulong row_stride = 8, ulong2 origin = ulong2(0),
                                          bool transpose = false, METAL_SIM_SOURCE) {
  const metal_sim::TilePosition at = metal_sim::tile_position();
  metal_sim::matrix_access_begin(destination, 64 * sizeof(T), true, METAL_SIM_HERE);
  for (int i = 0; i < 2; ++i) {
    const ulong row = transpose ? at.column[i] : at.row[i];
    const ulong column = transpose ? at.row[i] : at.column[i];
    destination[(origin.y + row) * row_stride + origin.x + column] = d.elements[i];
  }
  metal_sim::matrix_access_end();
}

// d = a b + c. Only the combinations that ship in production kernels: all of one type, or
// half/bfloat factors with a float accumulator.
template <class D, class A, class B, class C>
METAL_SIM_COLLECTIVE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                        simdgroup_matrix<A, 8, 8> a,
                                                        simdgroup_matrix<B, 8, 8> b,
                                                        simdgroup_matrix<C, 8, 8> c,
                                                        METAL_SIM_SOURCE) {
  static_assert(__is_same(D, C), "accumulator and destination have one type");
  const float fa[2] = {float(a.elements[0]), float(a.elements[1])};
  const float fb[2] = {float(b.elements[0]), float(b.elements[1])};
  const float fc[2] = {float(c.elements[0]), float(c.elements[1])};
  float fd[2];
  metal_sim::multiply(fd, fa, fb, fc, METAL_SIM_HERE);
  d.elements[0] = D(fd[0]);
  d.elements[1] = D(fd[1]);
}
template <class D, class A, class B>
METAL_SIM_COLLECTIVE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d,
                                             simdgroup_matrix<A, 8, 8> a,
                                             simdgroup_matrix<B, 8, 8> b, METAL_SIM_SOURCE) {
  const float fa[2] = {float(a.elements[0]), float(a.elements[1])};
  const float fb[2] = {float(b.elements[0]), float(b.elements[1])};
  float fd[2];
  metal_sim::multiply(fd, fa, fb, nullptr, METAL_SIM_HERE);
  d.elements[0] = D(fd[0]);
  d.elements[1] = D(fd[1]);
}

}  // namespace metal
