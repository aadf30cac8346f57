// The schedule as text: one line per dispatch, one per distinct row interval.
#include "metal/schedule.h"

namespace flashattn::metal {

namespace {

const char* slot_name(abi::BufferSlot slot) {
  switch (slot) {
    case abi::kBufferQuery:
      return "query";
    case abi::kBufferKey:
      return "key";
    case abi::kBufferValue:
      return "value";
    case abi::kBufferOut:
      return "out";
    case abi::kBufferLse:
      return "lse";
    case abi::kBufferDout:
      return "dout";
    case abi::kBufferDlse:
      return "dlse";
    case abi::kBufferDelta:
      return "delta";
    case abi::kBufferDq:
      return "dq";
    case abi::kBufferDk:
      return "dk";
    case abi::kBufferDv:
      return "dv";
    case abi::kBufferRowIntervals:
      return "row_intervals";
    case abi::kBufferParams:
      return "params";
  }
  return "?";
}

std::string bindings_text(const std::vector<Binding>& bindings) {
  std::string reads;
  std::string writes;
  for (const Binding& binding : bindings) {
    std::string& text = binding.written ? writes : reads;
    text += (text.empty() ? "" : ",") + std::string(slot_name(binding.slot));
  }
  return reads + " -> " + writes;
}

}  // namespace

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (const Dispatch& dispatch : schedule.dispatches) {
    text += "command_buffer " + std::to_string(dispatch.command_buffer) + ": " +
            to_string(dispatch.key) + " threadgroups " +
            std::to_string(dispatch.params.first_threadgroup) + "+" +
            std::to_string(dispatch.threadgroups) + " x " +
            std::to_string(dispatch.threads_per_threadgroup) + " threads, " +
            std::to_string(threadgroup_memory(dispatch.key)) +
            " B: " + bindings_text(dispatch.bindings) + "\n";
  }
  for (std::size_t b = 0; b < schedule.row_intervals.size(); ++b) {
    const abi::RowInterval& interval = schedule.row_intervals[b];
    text += "rows of " + std::to_string(b) + ": [i" + (interval.begin_offset < 0 ? "" : "+") +
            std::to_string(interval.begin_offset) + ", i" + (interval.end_offset < 0 ? "" : "+") +
            std::to_string(interval.end_offset) + ") below " + std::to_string(interval.key_limit) +
            "\n";
  }
  if (schedule.delta_bytes != 0) {
    text += "delta " + std::to_string(schedule.delta_bytes) + " B\n";
  }
  return text;
}

}  // namespace flashattn::metal
