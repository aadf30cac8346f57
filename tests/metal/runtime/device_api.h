// The seam of the simulated Metal device: compile MSL source, look functions up, specialise them by
// function constants, run dispatches. The fake Metal classes, the C API and the tests all stand on
// this file. Relies on the translator (tests/metal/translate) and a clang, both run as child
// processes on a cache miss. Does not know Objective-C, command buffers or memory management:
// buffers are plain pointers and lengths.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace metal_sim {

// Translation or compilation failed; what() holds the log with .metal file names and lines.
class CompileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The name is unknown, or a function constant, binding or size makes the request impossible.
class RequestError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct CompileOptions {
  std::string file_name =
      "program.metal";  // name in logs and reports until the first #line of the source
  std::vector<std::string>
      include_directories;  // for #include "..."; <metal_...> headers are built in
  std::vector<std::pair<std::string, std::string>> macros;  // preprocessorMacros
};

enum class ArgumentKind : std::int32_t { kDevice = 0, kConstant = 1, kThreadgroup = 2 };

// One [[buffer(n)]] or [[threadgroup(n)]] parameter of a kernel.
struct Argument {
  ArgumentKind kind = ArgumentKind::kDevice;
  std::uint32_t index = 0;
  bool read_only = false;        // pointer or reference to const, or the constant address space
  bool is_reference = false;     // exactly one element is accessed
  std::size_t element_size = 0;  // bytes
  std::string name;
};

struct FunctionConstant {
  std::uint32_t index = 0;
  std::string name;
  std::size_t size = 0;  // bytes, at most 8
};

// The value of one function constant: the first `size` bytes of its object representation.
struct ConstantValue {
  std::uint32_t index = 0;
  std::array<std::uint8_t, 8> bytes{};
};

// One bound buffer, or the bytes of setBytes. pointer == nullptr means: nothing is bound at this
// index.
struct BufferBinding {
  void* pointer = nullptr;
  std::size_t length = 0;  // bytes from pointer to the end of the buffer
};

struct DispatchRequest {
  std::array<std::uint32_t, 3> threadgroups{1, 1, 1};
  std::array<std::uint32_t, 3> threads_per_threadgroup{1, 1, 1};
  // dispatchThreads: the exact grid in threads (its last threadgroups may be partial). All zero:
  // whole threadgroups.
  std::array<std::uint32_t, 3> threads_per_grid{0, 0, 0};
  std::span<const BufferBinding> buffers;            // by buffer index
  std::span<const std::size_t> threadgroup_lengths;  // bytes, by threadgroup index
};

// What one dispatch did. Counts are per simdgroup for collective operations and per lane for scalar
// ones.
struct Counters {
  std::uint64_t matrix_multiplies = 0;         // 8x8x8 multiply(-accumulate)s
  std::uint64_t matrix_loads_threadgroup = 0;  // simdgroup_load
  std::uint64_t matrix_loads_device = 0;
  std::uint64_t matrix_stores_threadgroup = 0;
  std::uint64_t matrix_stores_device = 0;
  std::uint64_t matrix_bytes_threadgroup = 0;
  std::uint64_t matrix_bytes_device = 0;
  std::uint64_t threadgroup_barriers = 0;  // per threadgroup
  std::uint64_t simdgroup_barriers = 0;
  std::uint64_t shuffles = 0;
  std::uint64_t votes = 0;         // simd_any, simd_all, simd_ballot
  std::uint64_t reductions = 0;    // simd_sum, simd_max, ...
  std::uint64_t exponentials = 0;  // exp, exp2, per lane
  std::uint64_t logarithms = 0;
  std::uint64_t fiber_switches = 0;  // cost of the simulation itself
  // Scalar loads and stores; counted only while the checker is on.
  std::uint64_t scalar_loads_threadgroup = 0;
  std::uint64_t scalar_stores_threadgroup = 0;
  std::uint64_t scalar_loads_device = 0;
  std::uint64_t scalar_stores_device = 0;
  std::uint64_t scalar_bytes_threadgroup = 0;
  std::uint64_t scalar_bytes_device = 0;
};

struct DispatchResult {
  // One text per distinct defect, each naming the .metal file and line. Empty means a clean run.
  // After an out-of-bounds device access or a deadlock the rest of the grid is not run.
  std::vector<std::string> reports;
  Counters counters;
};

// One function with its constants bound: what a compute pipeline state holds. Immutable; dispatch
// may be called from several threads at once.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual const std::string& name() const = 0;
  virtual const std::vector<Argument>& arguments() const = 0;
  // From [[max_total_threads_per_threadgroup(n)]], else 1024.
  virtual std::uint32_t max_total_threads_per_threadgroup() const = 0;
  // Sum of the threadgroup arrays the kernel declares, bytes.
  virtual std::size_t static_threadgroup_bytes() const = 0;
  // Runs the whole grid on the calling thread. Throws RequestError for missing bindings, short
  // constant arguments or too large threadgroups, before anything runs.
  virtual DispatchResult dispatch(const DispatchRequest& request) const = 0;
};

class Library : public std::enable_shared_from_this<Library> {
 public:
  virtual ~Library() = default;
  // Translates and compiles, or takes the result from the cache on disk. Safe from many threads and
  // processes.
  static std::shared_ptr<const Library> compile(std::string_view source,
                                                const CompileOptions& options);
  // A module that was built elsewhere (cost_model/); it has no hooks of the checker.
  static std::shared_ptr<const Library> load(const std::string& module_path);

  virtual std::vector<std::string> function_names() const = 0;  // host names, sorted
  virtual std::vector<FunctionConstant> function_constants() const = 0;
  // Throws RequestError when the name is unknown.
  virtual std::shared_ptr<const Kernel> kernel(std::string_view host_name,
                                               std::span<const ConstantValue> constants) const = 0;
};

constexpr std::uint32_t kSimdWidth = 32;
constexpr std::size_t kMaxThreadgroupBytes = 32768;
constexpr std::uint32_t kMaxThreadsPerThreadgroup = 1024;

}  // namespace metal_sim
