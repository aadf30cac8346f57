// The order of the threadgroups, and a pool of threadgroup executors: their stacks are worth
// keeping.
#include "grid.h"

#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>

#include "../checker/access.h"
#include "random.h"
#include "threadgroup.h"

namespace metal_sim {
namespace {

// Executors not in use. One is taken per running dispatch, so concurrent dispatches never share
// any.
class ExecutorPool {
 public:
  std::unique_ptr<Threadgroup> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<Threadgroup>();
    std::unique_ptr<Threadgroup> executor = std::move(free_.back());
    free_.pop_back();
    return executor;
  }
  void give_back(std::unique_ptr<Threadgroup> executor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(executor));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Threadgroup>> free_;
};

ExecutorPool& pool() {
  static auto& instance =
      *new ExecutorPool;  // threads may still dispatch while statics are destroyed
  return instance;
}

std::string place(const Kernel& kernel, const Argument& argument) {
  return kernel.name() + ": argument '" + argument.name + "' at index " +
         std::to_string(argument.index);
}

void check_buffer(const Kernel& kernel, const Argument& argument, const DispatchRequest& request) {
  if (argument.index >= request.buffers.size() || argument.index >= abi::kMaxBuffers ||
      request.buffers[argument.index].pointer == nullptr)
    throw RequestError(place(kernel, argument) + " has no buffer");
  const std::size_t length = request.buffers[argument.index].length;
  if ((argument.is_reference || argument.kind == ArgumentKind::kConstant) &&
      length < argument.element_size)
    throw RequestError(place(kernel, argument) + " needs " + std::to_string(argument.element_size) +
                       " bytes, " + std::to_string(length) + " are bound");
}

}  // namespace

void check_request(const Kernel& kernel, const DispatchRequest& request) {
  std::uint64_t threads = 1;
  std::uint64_t groups = 1;
  for (std::size_t k = 0; k < 3; ++k) {
    threads *= request.threads_per_threadgroup[k];
    groups *= request.threadgroups[k];
  }
  if (threads == 0 || threads > kernel.max_total_threads_per_threadgroup())
    throw RequestError(kernel.name() + ": " + std::to_string(threads) +
                       " threads per threadgroup, the pipeline allows " +
                       std::to_string(kernel.max_total_threads_per_threadgroup()));
  if (groups == 0 || groups > 0xffffffffu)
    throw RequestError(kernel.name() + ": a grid of " + std::to_string(groups) + " threadgroups");
  std::size_t bytes = kernel.static_threadgroup_bytes();
  for (const std::size_t length : request.threadgroup_lengths) bytes += (length + 15) / 16 * 16;
  if (bytes > kMaxThreadgroupBytes)
    throw RequestError(kernel.name() + ": " + std::to_string(bytes) +
                       " bytes of threadgroup memory, the device has " +
                       std::to_string(kMaxThreadgroupBytes));
  for (const Argument& argument : kernel.arguments()) {
    if (argument.kind != ArgumentKind::kThreadgroup) {
      check_buffer(kernel, argument, request);
    } else if (argument.index >= request.threadgroup_lengths.size() ||
               request.threadgroup_lengths[argument.index] == 0) {
      throw RequestError(place(kernel, argument) + " has no threadgroup memory length");
    }
  }
}

void run_grid(DispatchState& state) {
  const std::uint32_t count = state.threadgroups[0] * state.threadgroups[1] * state.threadgroups[2];
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (state.settings.shuffle_threadgroups) {
    Random random(state.settings.seed);
    for (std::uint32_t i = count; i-- > 1;) std::swap(order[i], order[random.below(i + 1)]);
  }
  std::unique_ptr<Threadgroup> executor = pool().take();
  executor->checker().begin_dispatch();
  for (const std::uint32_t index : order) {
    if (state.stop) break;
    executor->run(state, index);
  }
  pool().give_back(std::move(executor));
}

std::size_t measure_threadgroup_bytes(const abi::KernelSpec& spec,
                                      const std::vector<ConstantValue>& constants) {
  // Ones and not zeros: a kernel may divide by a size before its last declaration.
  alignas(64) static std::array<unsigned char, 65536> dummy = [] {
    std::array<unsigned char, 65536> bytes{};
    bytes.fill(1);
    return bytes;
  }();
  DispatchState state;
  state.kernel = &spec;
  state.constants = constants;
  state.map = make_matrix_map("row");
  state.buffers.fill(dummy.data());
  std::unique_ptr<Threadgroup> executor = pool().take();
  const std::size_t bytes = executor->measure(state);
  pool().give_back(std::move(executor));
  return bytes;
}

}  // namespace metal_sim
