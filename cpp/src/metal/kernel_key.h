// KernelKey: what changes a kernel's machine code, and nothing else. Two problems with equal keys
// share one compute pipeline. Plain C++20, tested on every machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashattn/tensor.h"

namespace flashattn::metal {

enum class KernelKind : std::uint8_t { kForward, kDelta, kBackwardDq, kBackwardDv, kBackwardDk };

struct KernelKey {
  KernelKind kind = KernelKind::kForward;
  DType dtype = DType::kFloat32;  // storage type of every tensor
  // head_dim and value_dim rounded up to a tile size; 0 where the kernel has no such tile (delta).
  int head_tile = 0;
  int value_tile = 0;
  int block_rows = 0;     // rows a threadgroup owns: queries, or keys for dv and dk
  int block_columns = 0;  // rows of the other side it takes per step; 0 for delta
  bool accumulate = false;
  bool has_dlse = false;

  bool operator==(const KernelKey&) const = default;
};

// One [[function_constant]] and its value.
struct FunctionConstantValue {
  std::uint32_t id = 0;
  bool value = false;
};

// The file in shaders/ that holds the kernel, without its ending: "backward_dq".
std::string shader_file(KernelKind kind);

// The kernel's host name, e.g. "forward_float32_d64_v64_r32_c16". Function constants are not part
// of it.
std::string function_name(const KernelKey& key);

// The line that instantiates function_name(key): appended to the shader's source.
std::string instantiation(const KernelKey& key);

// The constants the kernel declares, with this key's values.
std::vector<FunctionConstantValue> function_constants(const KernelKey& key);

// function_name and the constants that are on: unique per key, for caches and diagnostics.
std::string to_string(const KernelKey& key);

// Threads of one threadgroup.
int threads_per_threadgroup(const KernelKey& key);

// Bytes of the threadgroup arrays the kernel declares.
std::int64_t threadgroup_memory(const KernelKey& key);

}  // namespace flashattn::metal
