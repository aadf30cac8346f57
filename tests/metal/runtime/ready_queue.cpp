// fifo and lifo are the two extremes of a fair order; random draws every step; priority follows
// Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs" (ASPLOS
// 2010): the simdgroup of highest priority runs until it blocks, and now and then one simdgroup
// gets a new priority.
#include "ready_queue.h"

#include <utility>

namespace metal_sim {
namespace {
constexpr std::uint32_t kStepsPerPriorityChange = 200;
}  // namespace

void ReadyQueue::reset(Schedule schedule, std::uint64_t seed, std::uint32_t threads) {
  schedule_ = schedule;
  random_ = Random(seed);
  waiting_.clear();
  head_ = 0;
  priority_.resize((threads + 31) / 32);
  for (std::uint32_t& priority : priority_)
    priority = static_cast<std::uint32_t>(random_.next() >> 33);
}

std::uint32_t ReadyQueue::pop() {
  switch (schedule_) {
    case Schedule::kFifo: {
      const std::uint32_t thread = waiting_[head_++];
      if (head_ == waiting_.size()) {
        waiting_.clear();
        head_ = 0;
      }
      return thread;
    }
    case Schedule::kLifo:
      return take(waiting_.size() - 1);
    case Schedule::kRandom:
      return take(random_.below(static_cast<std::uint32_t>(waiting_.size())));
    case Schedule::kPriority:
      return take(highest_priority());
  }
  return take(0);
}

std::uint32_t ReadyQueue::take(std::size_t position) {
  const std::uint32_t thread = waiting_[position];
  waiting_[position] = waiting_.back();
  waiting_.pop_back();
  return thread;
}

std::size_t ReadyQueue::highest_priority() {
  if (random_.below(kStepsPerPriorityChange) == 0) {
    const std::uint32_t simdgroup = random_.below(static_cast<std::uint32_t>(priority_.size()));
    priority_[simdgroup] = static_cast<std::uint32_t>(random_.next() >> 33);
  }
  std::size_t best = 0;
  std::uint64_t best_rank = 0;
  for (std::size_t i = 0; i < waiting_.size(); ++i) {
    // Within a simdgroup the lanes follow a fixed scrambled order.
    const std::uint64_t lane_rank = (waiting_[i] * 37u + priority_[0]) & 31u;
    const std::uint64_t rank = (std::uint64_t{priority_[waiting_[i] / 32u]} << 8) | lane_rank;
    if (i == 0 || rank > best_rank) {
      best = i;
      best_rank = rank;
    }
  }
  return best;
}

}  // namespace metal_sim
