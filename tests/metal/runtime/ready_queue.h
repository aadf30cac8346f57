// The order in which the runnable threads of a threadgroup continue.
#pragma once

#include <cstdint>
#include <vector>

#include "random.h"
#include "settings.h"

namespace metal_sim {

class ReadyQueue {
 public:
  // Empties the queue for a threadgroup of `threads` threads.
  void reset(Schedule schedule, std::uint64_t seed, std::uint32_t threads);
  void push(std::uint32_t thread) { waiting_.push_back(static_cast<std::uint16_t>(thread)); }
  bool empty() const { return head_ == waiting_.size(); }
  std::uint32_t pop();

 private:
  std::uint32_t take(std::size_t position);  // removes any element, not keeping the order
  std::size_t highest_priority();

  Schedule schedule_ = Schedule::kFifo;
  Random random_;
  std::vector<std::uint16_t> waiting_;
  std::size_t head_ = 0;                 // first waiting element
  std::vector<std::uint32_t> priority_;  // per simdgroup
};

}  // namespace metal_sim
