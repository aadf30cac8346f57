// Compiling libraries and pipelines; see pipeline_cache.h.
#include "metal/pipeline_cache.h"

#include "flashattn/error.h"
#include "metal/objects.h"
#include "metal/shader_source.h"

namespace flashattn::metal {

namespace {

constexpr NS::UInteger kSimdWidth = 32;  // what the kernels are written for

NS::SharedPtr<MTL::Function> specialise(MTL::Library* library, const KernelKey& key) {
  const auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  for (const FunctionConstantValue& constant : function_constants(key)) {
    constants->setConstantValue(&constant.value, MTL::DataTypeBool, NS::UInteger{constant.id});
  }
  NS::Error* error = nullptr;
  auto function =
      NS::TransferPtr(library->newFunction(to_ns(function_name(key)), constants.get(), &error));
  if (!function) {
    throw DeviceError("metal: kernel " + to_string(key) +
                      " cannot be specialised: " + describe(error));
  }
  return function;
}

}  // namespace

NS::SharedPtr<MTL::Library> compile_library(MTL::Device* device, const std::string& source,
                                            const std::string& what) {
  const auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  // Fast math would break the rules on NaN and infinity; setMathMode needs macOS 15.
  options->setFastMathEnabled(false);
  // docs/msl.md says why this one; newer systems keep compiling it.
  options->setLanguageVersion(MTL::LanguageVersion3_0);
  NS::Error* error = nullptr;
  auto library = NS::TransferPtr(device->newLibrary(to_ns(source), options.get(), &error));
  if (library) return library;
  const std::string log = describe(error);
  const std::string line = quoted_line(log);
  throw DeviceError("metal: kernel " + what + " does not compile: " + log +
                    (line.empty() ? "" : "\nsource line: " + line));
}

std::vector<PipelineFacts> PipelineCache::facts() const {
  const std::lock_guard lock(facts_mutex_);
  return facts_;
}

// A kernel that needs too many registers gets fewer threads than its geometry takes.
void PipelineCache::check_limits(MTL::ComputePipelineState* state, const KernelKey& key) {
  const int threads = threads_per_threadgroup(key);
  const auto most = static_cast<int>(state->maxTotalThreadsPerThreadgroup());
  {
    const std::lock_guard lock(facts_mutex_);
    facts_.push_back({.kernel = to_string(key), .threads = threads, .most_threads = most});
  }
  if (most >= threads && state->threadExecutionWidth() == kSimdWidth) return;
  throw DeviceError("metal: kernel " + to_string(key) + " needs " + std::to_string(threads) +
                    " threads in simdgroups of 32, the device gives it " + std::to_string(most) +
                    " in simdgroups of " + std::to_string(state->threadExecutionWidth()));
}

NS::SharedPtr<MTL::Library> PipelineCache::library(const KernelKey& key) {
  return libraries_.get(function_name(key), [&] {
    return compile_library(device_, shader_program(shader_file(key), instantiation(key)),
                           to_string(key));
  });
}

NS::SharedPtr<MTL::ComputePipelineState> PipelineCache::make(const KernelKey& key) {
  const NS::SharedPtr<MTL::Library> compiled = library(key);
  const NS::SharedPtr<MTL::Function> function = specialise(compiled.get(), key);
  const auto descriptor = NS::TransferPtr(MTL::ComputePipelineDescriptor::alloc()->init());
  descriptor->setLabel(to_ns("flashattn " + to_string(key)));
  descriptor->setComputeFunction(function.get());
  archive_.attach(descriptor.get());
  if (auto found = archive_.find(descriptor.get())) {
    ++from_archive_;
    check_limits(found.get(), key);
    return found;
  }
  NS::Error* error = nullptr;
  auto pipeline = NS::TransferPtr(
      device_->newComputePipelineState(descriptor.get(), MTL::PipelineOptionNone, nullptr, &error));
  if (!pipeline) {
    throw DeviceError("metal: kernel " + to_string(key) +
                      " cannot be made a pipeline: " + describe(error));
  }
  ++compiled_;
  check_limits(pipeline.get(), key);
  archive_.add(descriptor.get());
  return pipeline;
}

const CompiledKernel* PipelineCache::find(const KernelKey& key) {
  const std::lock_guard lock(kernels_mutex_);
  const auto found = kernels_.find(key);
  return found == kernels_.end() ? nullptr : found->second.get();
}

const CompiledKernel& PipelineCache::get(const KernelKey& key) {
  if (const CompiledKernel* ready = find(key)) return *ready;
  return *making_.get(key, [&]() -> const CompiledKernel* {
    const AutoreleaseScope scope;
    auto made = std::make_unique<CompiledKernel>();
    try {
      made->pipeline = make(key);
    } catch (const DeviceError& error) {
      if (!key.registers) throw;
      throw KernelRefused(error.what());
    }
    const std::lock_guard lock(kernels_mutex_);
    return kernels_.emplace(key, std::move(made)).first->second.get();
  });
}

void PipelineCache::get_all(const std::vector<Dispatch>& dispatches,
                            std::vector<const CompiledKernel*>* kernels) {
  kernels->assign(dispatches.size(), nullptr);
  {
    const std::lock_guard lock(kernels_mutex_);
    for (std::size_t i = 0; i < dispatches.size(); ++i) {
      const auto found = kernels_.find(dispatches[i].key);
      if (found != kernels_.end()) (*kernels)[i] = found->second.get();
    }
  }
  for (std::size_t i = 0; i < dispatches.size(); ++i) {
    if ((*kernels)[i] == nullptr) (*kernels)[i] = &get(dispatches[i].key);
  }
}

}  // namespace flashattn::metal
