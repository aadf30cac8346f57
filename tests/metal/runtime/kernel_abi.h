// What a compiled kernel module and the runtime share: plain structs and one table of functions in
// each direction. Included by the freestanding kernel modules and by the hosted runtime, so it
// needs no library and no symbol lookup: a module exports metal_sim_module() alone and gets
// everything else through the table it is handed.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace metal_sim::abi {

constexpr uint32_t kVersion = 2;
constexpr size_t kExchangeStride = 64;  // bytes between the slots of two lanes
constexpr int kMaxBuffers = 31;
// A fiber's stack fills one block of this size and alignment, so that two addresses tell by their
// upper bits whether they are on one stack.
constexpr size_t kStackBlock = 256 * 1024;

// The .metal file and line of a statement.
struct Source {
  const char* file;
  int line;
};

// Every [[...]] position attribute of one thread.
struct ThreadPosition {
  uint32_t threadgroup_position_in_grid[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t thread_position_in_threadgroup[3];
  uint32_t threads_per_threadgroup[3];
  uint32_t thread_position_in_grid[3];
  uint32_t threads_per_grid[3];
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
  uint32_t threads_per_simdgroup;
};

// What the thunk of a kernel unpacks into arguments.
struct Invocation {
  void* const* buffers;             // by buffer index
  void* const* threadgroup_memory;  // by threadgroup index
  const ThreadPosition* position;
};

enum class BarrierScope : int32_t { kThreadgroup, kSimdgroup };
enum class ExchangeKind : int32_t { kShuffle, kVote, kReduction };
enum class UnaryMath : int32_t { kExp, kExp2, kLog, kLog2, kTanh, kSin, kCos, kErf };

// Functions of the runtime that kernels call from inside a fiber.
struct Runtime {
  // Threadgroup array number `site` of the running kernel; the same address for all threads of the
  // threadgroup.
  void* (*threadgroup_array)(uint32_t site, size_t bytes, size_t alignment, const char* name);
  void (*declarations_end)();  // after the last threadgroup array: a sizing run stops here
  void (*barrier)(BarrierScope scope, int32_t flags, Source source);
  // Deposits `bytes` (<= kExchangeStride) and waits for the simdgroup; returns the 32 slots.
  const void* (*exchange)(const void* value, size_t bytes, ExchangeKind kind, const char* name,
                          Source source);
  // d = a b + c over two elements per lane; c may be null.
  void (*multiply)(float* d, const float* a, const float* b, const float* c, Source source);
  int (*lane)();
  // Positions of this lane's two elements in an 8x8 tile, row * 8 + column.
  const uint8_t* (*matrix_positions)();
  // Around the element accesses of simdgroup_load / simdgroup_store: counts, and names the caller's
  // line in reports.
  void (*matrix_access_begin)(const void* pointer, size_t bytes, bool store, Source source);
  void (*matrix_access_end)();
  uint64_t (*constant)(
      uint32_t index);  // bits of a function constant; reports one that was not set
  bool (*constant_defined)(uint32_t index);
  float (*unary_math)(UnaryMath function, float x);
  float (*pow)(float x, float y);
  // One memory access, as the sanitizer hooks see it. `atomic` accesses never race with each other.
  void (*access)(const void* pointer, size_t bytes, bool write, bool atomic,
                 const void* program_counter);
};

struct ArgumentSpec {
  int32_t kind;  // metal_sim::ArgumentKind
  uint32_t index;
  bool read_only;
  bool is_reference;
  size_t element_size;
  const char* name;
  int32_t condition;  // index of the function constant without which it is absent; -1: none
};

struct KernelSpec {
  const char* name;
  void (*invoke)(const Invocation&);
  const ArgumentSpec* arguments;
  uint32_t argument_count;
  uint32_t max_threads;  // 0: no attribute
};

struct ConstantSpec {
  uint32_t index;
  const char* name;
  size_t size;
};

struct Module {
  uint32_t version;
  const KernelSpec* kernels;
  uint32_t kernel_count;
  const ConstantSpec* constants;
  uint32_t constant_count;
};

using ModuleEntry = const Module* (*)(const Runtime*);
constexpr const char* kEntryName = "metal_sim_module";

}  // namespace metal_sim::abi
