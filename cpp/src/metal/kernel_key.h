// KernelKey: what changes a kernel's machine code, and nothing else. Two problems with equal keys
// share one compute pipeline. Plain C++20, tested on every machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashattn/tensor.h"
#include "metal/fixed_vector.h"
#include "shaders/abi.h"

namespace flashattn::metal {

enum class KernelKind : std::uint8_t {
  kForward,
  kMergeChunks,  // of register kernels that split the keys of few rows
  kDelta,
  kBackwardDq,
  kBackwardDv,
  kBackwardDk,
  kBackwardDkv,  // both at once: register kernels only
  kMaskGradient,
  kSlopeGradient,
  kSinkGradient,
  kLaneMapProbe,  // of a device, not of a call: lane_maps.h
};

// Options that a kernel is specialised for; all off is the plain kernel.
struct KernelOptions {
  bool softcap = false;
  bool alibi = false;
  std::optional<DType>
      mask{};  // of the mask that the kernel reads: bool, float32, half or bfloat16
  bool sinks = false;
  bool dropout = false;
  bool slope_gradient = false;  // dq: writes what each row adds to dalibi_slopes

  bool operator==(const KernelOptions&) const = default;
  bool any() const { return *this != KernelOptions{}; }
};

// How a register kernel works: scores in registers, shaders/register_*.metal. Without row_fragments
// it is a staged one, which passes them through threadgroup memory.
struct RegisterVariant {
  int row_fragments = 0;  // strips of 8 rows that each simdgroup owns
  int simdgroups = 0;
  bool held = false;         // Q, or K, stays in registers instead of being read for every block
  bool value_held = false;   // and so does dO, or V, which forward has not
  bool apple_map = false;    // for Apple's lane map alone
  bool full_rows = false;    // every row that it owns exists
  bool vector_rows = false;  // rows are read four elements at a time
  bool exact_tiles = false;  // head_dim and value_dim fill their tiles
  bool split = false;        // forward: a chunk of the keys, for kMergeChunks
  bool selects = false;      // keeps values that are not finite from rows that may not see them

  bool operator==(const RegisterVariant&) const = default;
  explicit operator bool() const { return row_fragments != 0; }
};

struct KernelKey {
  KernelKind kind = KernelKind::kForward;
  DType dtype = DType::kFloat32;  // storage type of every tensor
  // head_dim and value_dim rounded up to a tile size; 0 where the kernel has no such tile.
  int head_tile = 0;
  int value_tile = 0;
  int block_rows = 0;  // rows a threadgroup owns: queries, keys for dv and dk, heads for the sums
  int block_columns = 0;  // rows of the other side it takes per step; 0 for delta and the sums
  bool accumulate = false;
  bool has_dlse = false;
  bool ragged = false;  // rows lie where EntryRows says
  bool paged = false;   // forward: keys lie in pages
  KernelOptions options{};
  RegisterVariant registers{};

  bool operator==(const KernelKey&) const = default;
};

// One [[function_constant]] and its value.
struct FunctionConstantValue {
  std::uint32_t id = 0;
  bool value = false;
};

// A buffer that a kernel uses. Each slot stands for one tensor of the call, a table or scratch of
// the schedule; parameters travel with the dispatch and are not among them.
struct Binding {
  abi::BufferSlot slot = abi::kBufferQuery;
  bool written = false;

  bool operator==(const Binding&) const = default;
};

// The file in shaders/ that holds the kernel, without its ending: "backward_dq".
std::string shader_file(const KernelKey& key);

// The kernel's host name, e.g. "forward_float32_d64_v64_r32_c16". Function constants are not part
// of it.
std::string function_name(const KernelKey& key);

// The line that instantiates function_name(key): appended to the shader's source.
std::string instantiation(const KernelKey& key);

// The constants the kernel declares, with this key's values.
std::vector<FunctionConstantValue> function_constants(const KernelKey& key);

// The buffers the kernel uses with this key's constants.
using Bindings = FixedVector<Binding, abi::kBufferCount>;
Bindings bindings(const KernelKey& key);

// Whether the kernel reads ModifierParams.
bool takes_modifiers(const KernelKey& key);

// function_name and the constants that are on: unique per key, for caches and diagnostics.
std::string to_string(const KernelKey& key);

// What a register kernel adds to its name, template arguments and constants: see
// kernel_key_register.cpp.
std::string register_suffix(const KernelKey& key);
std::string register_arguments(const KernelKey& key);
std::string register_constants_text(const KernelKey& key);
std::vector<FunctionConstantValue> register_constants(const KernelKey& key);
std::int64_t register_memory(const KernelKey& key);
// The file of the register kernels of a kind, "" where there is none.
std::string register_file(KernelKind kind);

// For tables by key.
struct KernelKeyHash {
  std::size_t operator()(const KernelKey& key) const;
};

// Threads of one threadgroup.
int threads_per_threadgroup(const KernelKey& key);

// Bytes of the threadgroup arrays the kernel declares.
std::int64_t threadgroup_memory(const KernelKey& key);

}  // namespace flashattn::metal
