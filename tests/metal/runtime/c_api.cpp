// Thin: converts arguments, keeps results per thread, turns exceptions into texts.
#include "c_api.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "device_api.h"
#include "settings.h"

namespace {

using namespace metal_sim;

thread_local std::string last_error;
thread_local std::string text_result;
thread_local DispatchResult last_result;

template <class Result, class Body>
Result guarded(Result failure, Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return failure;
  }
}

using LibraryHandle = std::shared_ptr<const Library>;
using KernelHandle = std::shared_ptr<const Kernel>;

const LibraryHandle& library_of(void* handle) { return *static_cast<LibraryHandle*>(handle); }
const KernelHandle& kernel_of(void* handle) { return *static_cast<KernelHandle*>(handle); }

std::array<std::uint32_t, 3> triple(const std::uint32_t* v) {
  return v == nullptr ? std::array<std::uint32_t, 3>{0, 0, 0}
                      : std::array<std::uint32_t, 3>{v[0], v[1], v[2]};
}

CompileOptions compile_options(const char* file_name, const char* const* includes,
                               const char* const* macros) {
  CompileOptions options;
  options.file_name = file_name;
  for (; includes != nullptr && *includes != nullptr; ++includes)
    options.include_directories.emplace_back(*includes);
  for (; macros != nullptr && *macros != nullptr; ++macros) {
    const std::string macro = *macros;
    const std::size_t equals = macro.find('=');
    const bool has_value = equals != std::string::npos;
    options.macros.emplace_back(macro.substr(0, equals), has_value ? macro.substr(equals + 1) : "");
  }
  return options;
}

}  // namespace

const char* metal_sim_error() { return last_error.c_str(); }

int metal_sim_set(const char* name, const char* value) {
  return guarded(-1, [&] {
    set_setting(name, value);
    return 0;
  });
}

void* metal_sim_compile(const char* source, const char* file_name, const char* const* includes,
                        const char* const* macros) {
  return guarded<void*>(nullptr, [&]() -> void* {
    return new LibraryHandle(
        Library::compile(source, compile_options(file_name, includes, macros)));
  });
}

void* metal_sim_load(const char* module_path) {
  return guarded<void*>(nullptr,
                        [&]() -> void* { return new LibraryHandle(Library::load(module_path)); });
}

const char* metal_sim_function_names(void* library) {
  text_result.clear();
  for (const std::string& name : library_of(library)->function_names()) text_result += name + "\n";
  return text_result.c_str();
}

void* metal_sim_kernel(void* library, const char* name, int count, const uint32_t* indices,
                       const uint64_t* values) {
  return guarded<void*>(nullptr, [&]() -> void* {
    std::vector<ConstantValue> constants(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < constants.size(); ++i) {
      constants[i].index = indices[i];
      std::memcpy(constants[i].bytes.data(), &values[i], sizeof values[i]);
    }
    return new KernelHandle(library_of(library)->kernel(name, constants));
  });
}

size_t metal_sim_static_threadgroup_bytes(void* kernel) {
  return kernel_of(kernel)->static_threadgroup_bytes();
}

uint32_t metal_sim_max_threads(void* kernel) {
  return kernel_of(kernel)->max_total_threads_per_threadgroup();
}

int metal_sim_dispatch(void* kernel, const uint32_t* threadgroups,
                       const uint32_t* threads_per_threadgroup, const uint32_t* threads_per_grid,
                       int buffer_count, void* const* pointers, const size_t* lengths,
                       int threadgroup_count, const size_t* threadgroup_lengths) {
  return guarded(-1, [&] {
    std::vector<BufferBinding> buffers(static_cast<std::size_t>(buffer_count));
    for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i] = {pointers[i], lengths[i]};
    const DispatchRequest request{
        .threadgroups = triple(threadgroups),
        .threads_per_threadgroup = triple(threads_per_threadgroup),
        .threads_per_grid = triple(threads_per_grid),
        .buffers = buffers,
        .threadgroup_lengths = {threadgroup_lengths, static_cast<std::size_t>(threadgroup_count)}};
    last_result = kernel_of(kernel)->dispatch(request);
    return static_cast<int>(last_result.reports.size());
  });
}

const char* metal_sim_report(int index) {
  return last_result.reports[static_cast<std::size_t>(index)].c_str();
}

const char* metal_sim_counters() {
  const Counters& c = last_result.counters;
  const std::pair<const char*, std::uint64_t> fields[] = {
      {"matrix_multiplies", c.matrix_multiplies},
      {"matrix_loads_threadgroup", c.matrix_loads_threadgroup},
      {"matrix_loads_device", c.matrix_loads_device},
      {"matrix_stores_threadgroup", c.matrix_stores_threadgroup},
      {"matrix_stores_device", c.matrix_stores_device},
      {"matrix_bytes_threadgroup", c.matrix_bytes_threadgroup},
      {"matrix_bytes_device", c.matrix_bytes_device},
      {"threadgroup_barriers", c.threadgroup_barriers},
      {"simdgroup_barriers", c.simdgroup_barriers},
      {"shuffles", c.shuffles},
      {"votes", c.votes},
      {"reductions", c.reductions},
      {"exponentials", c.exponentials},
      {"logarithms", c.logarithms},
      {"fiber_switches", c.fiber_switches},
      {"scalar_loads_threadgroup", c.scalar_loads_threadgroup},
      {"scalar_stores_threadgroup", c.scalar_stores_threadgroup},
      {"scalar_loads_device", c.scalar_loads_device},
      {"scalar_stores_device", c.scalar_stores_device},
      {"scalar_bytes_threadgroup", c.scalar_bytes_threadgroup},
      {"scalar_bytes_device", c.scalar_bytes_device}};
  text_result.clear();
  for (const auto& [name, value] : fields)
    text_result += std::string(name) + "=" + std::to_string(value) + "\n";
  return text_result.c_str();
}
