// See interruption.h.
#include "cpu/interruption.h"

#include "flashattn/error.h"

namespace flashattn::cpu {
namespace {

// Multiply-adds below which a call ends before anyone could want it to: some 50 ms of one core.
constexpr double kShortWork = 1e9;

constexpr std::chrono::milliseconds kInterval{50};

thread_local Interruption* current = nullptr;

// Multiply-adds of a call whose rows see every key.
double work_of(const AttentionProblem& problem) {
  const std::int64_t rows = problem.packed ? problem.total_q : problem.batch * problem.seqlen_q;
  const double products = problem.pass == Pass::kBackward ? 2.5 : 1.0;
  return products * static_cast<double>(rows) * static_cast<double>(problem.query_heads) *
         static_cast<double>(problem.seqlen_k) *
         static_cast<double>(problem.head_dim + problem.value_dim);
}

}  // namespace

Interruption::Interruption(const AttentionProblem& problem) : outer_(current) {
  if (work_of(problem) < kShortWork) return;
  check_ = interrupt_check();
  if (check_ == nullptr) return;
  caller_ = std::this_thread::get_id();
  next_ = std::chrono::steady_clock::now() + kInterval;
  current = this;
}

Interruption::~Interruption() { current = outer_; }

EndingCheck Interruption::ending() {
  if (check_ == nullptr) return {};
  return {.requested = [](void* call) { return static_cast<Interruption*>(call)->requested(); },
          .call = this};
}

bool Interruption::requested() {
  if (requested_.load(std::memory_order_relaxed)) return true;
  if (std::this_thread::get_id() != caller_) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return false;
  next_ = now + kInterval;
  if (!check_()) return false;
  requested_.store(true, std::memory_order_relaxed);
  return true;
}

void Interruption::rethrow() const {
  if (requested_.load(std::memory_order_relaxed)) {
    throw Interrupted("attention: interrupted");
  }
}

Interruption* Interruption::of_this_thread() { return current; }

}  // namespace flashattn::cpu
