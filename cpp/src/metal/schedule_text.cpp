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
    case abi::kBufferModifiers:
      return "modifiers";
    case abi::kBufferMask:
      return "mask";
    case abi::kBufferMaskTiles:
      return "mask_tiles";
    case abi::kBufferAlibiSlopes:
      return "alibi_slopes";
    case abi::kBufferRowShifts:
      return "row_shifts";
    case abi::kBufferSinks:
      return "sinks";
    case abi::kBufferDmask:
      return "dmask";
    case abi::kBufferDalibiSlopes:
      return "dalibi_slopes";
    case abi::kBufferDsinks:
      return "dsinks";
    case abi::kBufferEntries:
      return "entries";
    case abi::kBufferBlockTable:
      return "block_table";
    case abi::kBufferSlopeRows:
      return "slope_rows";
    case abi::kBufferStatus:
      return "status";
    case abi::kBufferPartialOut:
      return "partial_out";
    case abi::kBufferPartialState:
      return "partial_state";
    case abi::kBufferCount:
      break;
  }
  return "?";
}

std::string bindings_text(const KernelKey& key) {
  std::string reads;
  std::string writes;
  for (const Binding& binding : bindings(key)) {
    std::string& text = binding.written ? writes : reads;
    text += (text.empty() ? "" : ",") + std::string(slot_name(binding.slot));
  }
  return reads + " -> " + writes;
}

// Which tiles of scores dmask adds up, or how keys are split.
std::string parts_text(const Dispatch& dispatch) {
  if (dispatch.key.registers.split) {
    return ", " + std::to_string(dispatch.params.chunks) + " chunks of " +
           std::to_string(dispatch.params.chunk_keys) + " keys";
  }
  if (dispatch.key.kind != KernelKind::kMaskGradient) return {};
  return ", tiles " + std::to_string(dispatch.modifiers.first_tile) + "+" +
         std::to_string(dispatch.modifiers.tile_count);
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
            " B: " + bindings_text(dispatch.key) + parts_text(dispatch) + "\n";
  }
  for (std::size_t b = 0; b < schedule.row_intervals.size(); ++b) {
    const abi::RowInterval& interval = schedule.row_intervals[b];
    text += "rows of " + std::to_string(b) + ": [i" + (interval.begin_offset < 0 ? "" : "+") +
            std::to_string(interval.begin_offset) + ", i" + (interval.end_offset < 0 ? "" : "+") +
            std::to_string(interval.end_offset) + ") below " + std::to_string(interval.key_limit) +
            "\n";
    if (b < schedule.row_shifts.size()) {
      text += "row 0 of " + std::to_string(b) + " at key " +
              std::to_string(schedule.row_shifts[b]) + "\n";
    }
  }
  for (const Scratch& scratch : schedule.scratch) {
    text += std::string(slot_name(scratch.slot)) + " " + std::to_string(scratch.bytes) + " B\n";
  }
  return text;
}

}  // namespace flashattn::metal
