// Library: a loaded module and its tables. Kernel: one entry of them with its constants, able to
// dispatch. Modules stay loaded for the life of the process: kernels may outlive the library object
// they came from.
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "../checker/line_table.h"
#include "../checker/regions.h"
#include "device_api.h"
#include "dispatch_state.h"
#include "grid.h"
#include "module_cache.h"
#include "runtime_table.h"

namespace metal_sim {
namespace {

// A loaded module. `lines` is shared by concurrent dispatches, so describing a location takes the
// lock.
struct LoadedModule {
  const abi::Module* tables = nullptr;
  std::string path;
  bool checked = false;
};

std::shared_ptr<const LoadedModule> load_module(const std::string& path, bool checked) {
  static std::mutex mutex;
  static auto& loaded = *new std::map<std::string, std::shared_ptr<const LoadedModule>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& entry = loaded[path];
  if (entry != nullptr) return entry;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    throw CompileError(std::string("cannot load a kernel module: ") + dlerror());
  const auto start = reinterpret_cast<abi::ModuleEntry>(dlsym(handle, abi::kEntryName));
  auto module = std::make_shared<LoadedModule>();
  module->tables = start == nullptr ? nullptr : start(&runtime_table());
  if (module->tables == nullptr || module->tables->version != abi::kVersion)
    throw CompileError(path + " is not a kernel module of this runtime; remove it");
  module->path = path;
  module->checked = checked;
  entry = module;
  return entry;
}

class LoadedKernel final : public Kernel {
 public:
  LoadedKernel(std::shared_ptr<const LoadedModule> module, const abi::KernelSpec& spec,
               std::span<const ConstantValue> constants)
      : module_(std::move(module)),
        spec_(spec),
        name_(spec.name),
        constants_(constants.begin(), constants.end()) {
    for (std::uint32_t i = 0; i < spec.argument_count; ++i) {
      const abi::ArgumentSpec& a = spec.arguments[i];
      if (a.condition >= 0 && !is_on(static_cast<std::uint32_t>(a.condition))) continue;
      arguments_.push_back({.kind = static_cast<ArgumentKind>(a.kind),
                            .index = a.index,
                            .read_only = a.read_only,
                            .is_reference = a.is_reference,
                            .element_size = a.element_size,
                            .name = a.name});
    }
    static_bytes_ = measure_threadgroup_bytes(spec_, constants_);
  }

  const std::string& name() const override { return name_; }
  const std::vector<Argument>& arguments() const override { return arguments_; }
  std::uint32_t max_total_threads_per_threadgroup() const override {
    return spec_.max_threads == 0 ? kMaxThreadsPerThreadgroup
                                  : std::min(spec_.max_threads, kMaxThreadsPerThreadgroup);
  }
  std::size_t static_threadgroup_bytes() const override { return static_bytes_; }

  DispatchResult dispatch(const DispatchRequest& request) const override {
    check_request(*this, request);
    DispatchState state;
    fill_state(state, request);
    DeviceRegions regions;
    LineTable lines(module_->path);
    if (module_->checked) {
      add_regions(regions, request);
      state.regions = &regions;
      state.lines = &lines;
    }
    run_grid(state);
    return {state.reports.take(name_, state.settings.reports_file), state.counters};
  }

 private:
  // Whether the boolean function constant was given as true.
  bool is_on(std::uint32_t index) const {
    return std::any_of(constants_.begin(), constants_.end(), [index](const ConstantValue& value) {
      return value.index == index && value.bytes[0] != 0;
    });
  }

  void fill_state(DispatchState& state, const DispatchRequest& request) const {
    state.kernel = &spec_;
    state.constants = constants_;
    state.settings = settings();
    state.map = make_matrix_map(state.settings.map);
    state.threadgroups = request.threadgroups;
    state.threads_per_threadgroup = request.threads_per_threadgroup;
    state.threads_per_grid = request.threads_per_grid;
    if (request.threads_per_grid[0] == 0)
      for (std::size_t k = 0; k < 3; ++k)
        state.threads_per_grid[k] = request.threadgroups[k] * request.threads_per_threadgroup[k];
    // An argument that a function constant turned off has no buffer, whatever is bound there.
    for (const Argument& argument : arguments_)
      if (argument.kind != ArgumentKind::kThreadgroup)
        state.buffers[argument.index] = request.buffers[argument.index].pointer;
    state.threadgroup_lengths.assign(request.threadgroup_lengths.begin(),
                                     request.threadgroup_lengths.end());
  }

  void add_regions(DeviceRegions& regions, const DispatchRequest& request) const {
    for (const Argument& argument : arguments_) {
      if (argument.kind == ArgumentKind::kThreadgroup) continue;
      const BufferBinding& bound = request.buffers[argument.index];
      regions.add({.begin = static_cast<char*>(bound.pointer),
                   .bytes = bound.length,
                   .writable = !argument.read_only,
                   .constant = argument.kind == ArgumentKind::kConstant,
                   .name = argument.name});
    }
    regions.build_spans();
  }

  std::shared_ptr<const LoadedModule> module_;
  const abi::KernelSpec& spec_;
  std::string name_;
  std::vector<Argument> arguments_;
  std::vector<ConstantValue> constants_;
  std::size_t static_bytes_ = 0;
};

class LoadedLibrary final : public Library {
 public:
  explicit LoadedLibrary(std::shared_ptr<const LoadedModule> module) : module_(std::move(module)) {}

  std::vector<std::string> function_names() const override {
    std::vector<std::string> names;
    for (std::uint32_t i = 0; i < module_->tables->kernel_count; ++i)
      names.emplace_back(module_->tables->kernels[i].name);
    std::sort(names.begin(), names.end());
    return names;
  }

  std::vector<FunctionConstant> function_constants() const override {
    std::vector<FunctionConstant> constants;
    for (std::uint32_t i = 0; i < module_->tables->constant_count; ++i) {
      const abi::ConstantSpec& c = module_->tables->constants[i];
      constants.push_back({.index = c.index, .name = c.name, .size = c.size});
    }
    return constants;
  }

  std::shared_ptr<const Kernel> kernel(std::string_view host_name,
                                       std::span<const ConstantValue> constants) const override {
    for (std::uint32_t i = 0; i < module_->tables->kernel_count; ++i)
      if (module_->tables->kernels[i].name == host_name)
        return std::make_shared<LoadedKernel>(module_, module_->tables->kernels[i], constants);
    throw RequestError("the library has no function '" + std::string(host_name) + "'");
  }

 private:
  std::shared_ptr<const LoadedModule> module_;
};

}  // namespace

std::shared_ptr<const Library> Library::compile(std::string_view source,
                                                const CompileOptions& options) {
  const Settings current = settings();
  const std::string path = compiled_module(source, options, current);
  return std::make_shared<LoadedLibrary>(load_module(path, current.check));
}

std::shared_ptr<const Library> Library::load(const std::string& module_path) {
  return std::make_shared<LoadedLibrary>(load_module(module_path, false));
}

}  // namespace metal_sim
