// Life of a threadgroup: placing the threads, running them until all are done, and what to say when
// they are not.
#include "threadgroup.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "../checker/access.h"
#include "dispatch_state.h"

namespace metal_sim {
namespace {

thread_local Threadgroup* running = nullptr;

}  // namespace

bool WaitPoint::same_place(const WaitPoint& other) const {
  if (operation == other.operation && source.file == other.source.file)
    return source.line == other.source.line;
  if (source.line != other.source.line || std::strcmp(operation, other.operation) != 0)
    return false;
  return source.file == other.source.file || std::strcmp(source.file, other.source.file) == 0;
}

std::string WaitPoint::text() const {
  if (source.file == nullptr) return operation;
  return std::string(operation) + " at " + source.file + ":" + std::to_string(source.line);
}

Threadgroup::Threadgroup() : checker_(std::make_unique<AccessChecker>(*this)) {}
Threadgroup::~Threadgroup() = default;

Threadgroup* Threadgroup::current() { return running; }

void Threadgroup::report(const std::string& key, const std::string& text) {
  if (dispatch_->reports.wants(key)) dispatch_->reports.add(text);
}

void Threadgroup::place(Thread& thread, std::uint32_t index) {
  const auto& size = dispatch_->threads_per_threadgroup;
  abi::ThreadPosition& at = thread.position;
  const std::uint32_t group[3] = {
      index_ % dispatch_->threadgroups[0],
      index_ / dispatch_->threadgroups[0] % dispatch_->threadgroups[1],
      index_ / (dispatch_->threadgroups[0] * dispatch_->threadgroups[1])};
  const std::uint32_t local[3] = {index % size[0], index / size[0] % size[1],
                                  index / (size[0] * size[1])};
  thread.exists = true;
  for (std::size_t k = 0; k < 3; ++k) {
    at.threadgroup_position_in_grid[k] = group[k];
    at.threadgroups_per_grid[k] = dispatch_->threadgroups[k];
    at.thread_position_in_threadgroup[k] = local[k];
    at.threads_per_threadgroup[k] = size[k];
    at.thread_position_in_grid[k] = group[k] * size[k] + local[k];
    at.threads_per_grid[k] = dispatch_->threads_per_grid[k];
    if (at.thread_position_in_grid[k] >= at.threads_per_grid[k]) thread.exists = false;
  }
  at.thread_index_in_threadgroup = index;
  at.thread_index_in_simdgroup = index % kSimdWidth;
  at.simdgroup_index_in_threadgroup = index / kSimdWidth;
  at.simdgroups_per_threadgroup = (thread_count_ + kSimdWidth - 1) / kSimdWidth;
  at.threads_per_simdgroup = kSimdWidth;
}

void Threadgroup::prepare(std::uint32_t index) {
  index_ = index;
  const auto& size = dispatch_->threads_per_threadgroup;
  thread_count_ = measuring_ ? 1 : size[0] * size[1] * size[2];
  while (threads_.size() < thread_count_) {
    threads_.push_back(std::make_unique<Thread>());
    threads_.back()->index = static_cast<std::uint16_t>(threads_.size() - 1);
  }
  simdgroups_.resize(std::max<std::size_t>(simdgroups_.size(), (thread_count_ + 31) / 32));
  ready_.reset(dispatch_->settings.schedule, dispatch_->settings.seed * 0x1234567u + index,
               thread_count_);
  memory_.reset();
  checker_->begin_threadgroup();
  stopped_ = false;
  live_ = arrived_ = 0;
  epochs_ = Epochs{};
  threadgroup_arguments_.fill(nullptr);
  for (std::size_t i = 0; i < dispatch_->threadgroup_lengths.size(); ++i)
    if (dispatch_->threadgroup_lengths[i] > 0)
      threadgroup_arguments_[i] = memory_.argument(dispatch_->threadgroup_lengths[i]);
  for (Simdgroup& group : simdgroups_) {
    group.live = group.arrived = group.parity = 0;
    group.epochs = Epochs{};
  }
  for (std::uint32_t i = 0; i < thread_count_; ++i) {
    Thread& thread = *threads_[i];
    place(thread, i);
    thread.state = ThreadState::kDone;
    if (!thread.exists) continue;
    ++live_;
    ++simdgroups_[i / 32].live;
    thread.fiber.prepare(&Threadgroup::fiber_entry);
    thread.state = ThreadState::kReady;
    ready_.push(i);
  }
}

void Threadgroup::run(DispatchState& dispatch, std::uint32_t index) {
  dispatch_ = &dispatch;
  prepare(index);
  running = this;
  if (!ready_.empty()) {
    thread_ = threads_[ready_.pop()].get();
    thread_->fiber.continue_from(origin_, false);
  }
  running = nullptr;
  if (!stopped_ && live_ > 0) {
    report_deadlock();
    dispatch_->stop = true;
  }
}

std::size_t Threadgroup::measure(DispatchState& dispatch) {
  measuring_ = true;
  run(dispatch, 0);
  measuring_ = false;
  return memory_.declared_bytes();
}

void Threadgroup::fiber_entry() {
  Threadgroup& self = *running;
  Fiber::entered(self.thread_->fiber, self.origin_);
  const abi::Invocation invocation{self.dispatch_->buffers.data(),
                                   self.threadgroup_arguments_.data(), &self.thread_->position};
  self.dispatch_->kernel->invoke(invocation);
  self.finish_thread();
  std::abort();  // an ended fiber is never continued
}

void Threadgroup::finish_thread() {
  thread_->state = ThreadState::kDone;
  --live_;
  --simdgroup().live;
  if (arrived_ > 0)
    report("exit|" + first_arrival_.text(),
           "divergent barrier: a thread left the kernel while others wait in " +
               first_arrival_.text());
  switch_to_next(true);
}

void Threadgroup::stop() {
  stopped_ = true;
  dispatch_->stop = true;
  Thread& from = *thread_;
  origin_.continue_from(from.fiber, true);
  std::abort();
}

void Threadgroup::switch_to_next(bool ends) {
  ++dispatch_->counters.fiber_switches;
  Thread& from = *thread_;
  if (ready_.empty()) {
    origin_.continue_from(from.fiber, true);
    return;
  }
  Thread& next = *threads_[ready_.pop()];
  if (&next == &from) return;
  thread_ = &next;
  next.fiber.continue_from(from.fiber, ends);
}

void Threadgroup::report_deadlock() {
  std::map<std::string, std::uint32_t> waiting;
  for (std::uint32_t i = 0; i < thread_count_; ++i) {
    const Thread& thread = *threads_[i];
    if (thread.exists && thread.state != ThreadState::kDone) ++waiting[thread.waiting.text()];
  }
  std::string text;
  for (const auto& [where, count] : waiting)
    text += (text.empty() ? "" : "; ") + std::to_string(count) + " in " + where;
  report("deadlock|" + text,
         "divergent barrier or simdgroup operation: these threads wait forever: " + text);
}

void* Threadgroup::declared_array(std::uint32_t site, std::size_t bytes, std::size_t alignment,
                                  const char* name) {
  void* pointer = memory_.declared(site, bytes, alignment, name);
  if (pointer == nullptr) {
    report("arena", std::string("threadgroup array '") + name + "' of " + std::to_string(bytes) +
                        " bytes does not fit into the threadgroup memory");
    stop();
  }
  return pointer;
}

void Threadgroup::declarations_end() {
  if (measuring_) stop();
}

}  // namespace metal_sim
