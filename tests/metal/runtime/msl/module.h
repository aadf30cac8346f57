// Glue for the code the translator appends to a program: argument adaptors, kernel tables, the
// module's entry point.
#pragma once

#include "atomic.h"

namespace metal_sim {

// Convert to whatever the kernel's parameter wants.
struct PointerArgument {
  void* pointer;
  template <class T>
  METAL_SIM_INLINE operator T*() const {
    return static_cast<T*>(pointer);
  }
};
struct ReferenceArgument {
  void* pointer;
  template <class T>
  METAL_SIM_INLINE operator T&() const {
    return *static_cast<T*>(pointer);
  }
};
struct PositionArgument {
  const uint32_t* xyz;
  METAL_SIM_INLINE operator uint() const { return xyz[0]; }
  METAL_SIM_INLINE operator ushort() const { return ushort(xyz[0]); }
  METAL_SIM_INLINE operator uint2() const { return uint2{xyz[0], xyz[1]}; }
  METAL_SIM_INLINE operator ushort2() const { return ushort2{ushort(xyz[0]), ushort(xyz[1])}; }
  METAL_SIM_INLINE operator uint3() const { return uint3{xyz[0], xyz[1], xyz[2]}; }
  METAL_SIM_INLINE operator ushort3() const {
    return ushort3{ushort(xyz[0]), ushort(xyz[1]), ushort(xyz[2])};
  }
};
struct IndexArgument {
  uint32_t value;
  METAL_SIM_INLINE operator uint() const { return value; }
  METAL_SIM_INLINE operator ushort() const { return ushort(value); }
};

// What the type of a parameter says about its argument.
template <class A>
struct ParameterTraits {
  static constexpr size_t element_size = 0;
  static constexpr bool read_only = true;
};
template <class A>
struct ParameterTraits<A*> {
  static constexpr size_t element_size = sizeof(A);
  static constexpr bool read_only = is_const<A>::value;
};
template <class A>
struct ParameterTraits<A&> {
  static constexpr size_t element_size = sizeof(A);
  static constexpr bool read_only = is_const<A>::value;
};

template <uint32_t count>
struct ArgumentList {
  abi::ArgumentSpec spec[count == 0 ? 1 : count];
  uint32_t size;
};

// Drops the position parameters (kind < 0) and fills in what the parameter types know.
template <uint32_t count, class... Parameters>
constexpr ArgumentList<count> argument_list(void (*)(Parameters...),
                                            const abi::ArgumentSpec (&specs)[count]) {
  const size_t sizes[] = {ParameterTraits<Parameters>::element_size...};
  const bool read_only[] = {ParameterTraits<Parameters>::read_only...};
  ArgumentList<count> list{};
  for (uint32_t i = 0; i < count; ++i) {
    if (specs[i].kind < 0) continue;
    abi::ArgumentSpec spec = specs[i];
    spec.element_size = sizes[i];
    spec.read_only = read_only[i];
    list.spec[list.size++] = spec;
  }
  return list;
}

const abi::Runtime* runtime = nullptr;

}  // namespace metal_sim
