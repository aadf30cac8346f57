// Candidates, shipped choices and the text form; see tuning_table.h.
#include "metal/tuning_table.h"

#include <algorithm>
#include <array>
#include <sstream>

namespace flashattn::metal {

namespace {

constexpr std::string_view kFirstLine = "flashattn tuning 1";
constexpr int kNarrowTile = 64;
constexpr int kWideTile = 128;
constexpr std::int64_t kThreadgroupMemory = 32768;  // bytes, of every supported GPU

constexpr std::array<KernelKind, 5> kKinds = {KernelKind::kForward, KernelKind::kBackwardDq,
                                              KernelKind::kBackwardDkv, KernelKind::kBackwardDv,
                                              KernelKind::kBackwardDk};
constexpr std::array<DType, 3> kTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

const char* name_of(KernelKind kind) {
  switch (kind) {
    case KernelKind::kForward:
      return "forward";
    case KernelKind::kBackwardDq:
      return "dq";
    case KernelKind::kBackwardDv:
      return "dv";
    case KernelKind::kBackwardDk:
      return "dk";
    default:
      return "dkv";
  }
}

int largest_tile(const TuningSlot& slot) { return slot.wide ? kWideTile : kNarrowTile; }

bool fits(const TuningSlot& slot, const RegisterShape& shape) {
  const int tile = largest_tile(slot);
  const KernelKey key{.kind = slot.kind,
                      .dtype = slot.dtype,
                      .head_tile = tile,
                      .value_tile = tile,
                      .block_columns = shape.columns,
                      .registers = {.row_fragments = shape.row_fragments,
                                    .simdgroups = shape.simdgroups,
                                    .held = shape.held,
                                    .value_held = shape.value_held,
                                    .apple_map = slot.apple}};
  return register_memory(key) <= kThreadgroupMemory;
}

// Slots that exist: the fused kernel is for narrow tiles and learns its map, because with Apple's
// written out it needs more registers.
bool exists(const TuningSlot& slot) {
  return slot.kind != KernelKind::kBackwardDkv || (!slot.wide && !slot.apple);
}

RegisterShape shipped_shape(const TuningSlot& slot) {
  const bool half = slot.dtype == DType::kFloat16;
  switch (slot.kind) {
    case KernelKind::kForward:
      if (!slot.wide)
        return slot.apple ? RegisterShape{32, 2, 4, true, true}
                          : RegisterShape{32, 1, 8, true, true};
      if (half) return {32, 1, 8, true, true};
      return slot.apple ? RegisterShape{16, 2, 8, false, true}
                        : RegisterShape{16, 1, 8, true, true};
    case KernelKind::kBackwardDq:
      if (!slot.wide || half) return {32, 1, 8, true, true};
      return {16, 1, 8, true, false};
    case KernelKind::kBackwardDk:
      return {16, 1, 8, true, half};
    case KernelKind::kBackwardDv:
      return {half ? 32 : 16, 1, 8, true, false};
    default:
      return {16, 1, 4, true, true};
  }
}

std::optional<TuningSlot> slot_named(std::string_view name) {
  for (const KernelKind kind : kKinds) {
    for (const DType dtype : kTypes) {
      for (const bool wide : {false, true}) {
        for (const bool apple : {false, true}) {
          const TuningSlot slot{.kind = kind, .dtype = dtype, .wide = wide, .apple = apple};
          if (exists(slot) && to_string(slot) == name) return slot;
        }
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::string to_string(const TuningSlot& slot) {
  return std::string(name_of(slot.kind)) + " " + std::string(dtype_name(slot.dtype)) + " " +
         std::to_string(largest_tile(slot)) + (slot.apple ? " apple" : " any");
}

std::string to_string(const TuningSlot& slot, const TuningChoice& choice) {
  if (!choice) return slot.kind == KernelKind::kBackwardDkv ? "split" : "staged";
  std::string text = "c" + std::to_string(choice->columns) + "f" +
                     std::to_string(choice->row_fragments) + "s" +
                     std::to_string(choice->simdgroups);
  if (choice->held) text += "h";
  if (choice->value_held) text += "v";
  return text;
}

std::vector<TuningSlot> tuning_slots(const DeviceFacts& facts) {
  std::vector<TuningSlot> slots;
  for (const DType dtype : kTypes) {
    const LaneMap map = facts.map_of(dtype);
    if (map == LaneMap::kUnknown) continue;
    for (const bool wide : {false, true}) {
      for (const KernelKind kind : kKinds) {
        const bool apple = map == LaneMap::kApple && kind != KernelKind::kBackwardDkv;
        const TuningSlot slot{.kind = kind, .dtype = dtype, .wide = wide, .apple = apple};
        if (exists(slot)) slots.push_back(slot);
      }
    }
  }
  return slots;
}

TuningChoice shipped_choice(const TuningSlot& slot) { return shipped_shape(slot); }

// One size at a time away from the shipped choice: the sizes matter nearly independently.
std::vector<TuningChoice> candidates(const TuningSlot& slot) {
  const RegisterShape shipped = shipped_shape(slot);
  std::vector<TuningChoice> found = {shipped};
  const auto add = [&](RegisterShape shape) {
    const bool known = std::find(found.begin(), found.end(), TuningChoice(shape)) != found.end();
    if (!known && fits(slot, shape)) found.emplace_back(shape);
  };
  for (const int columns : {16, 32}) {
    RegisterShape other = shipped;
    other.columns = columns;
    add(other);
  }
  for (const int simdgroups : {4, 8}) {
    RegisterShape other = shipped;
    other.simdgroups = simdgroups;
    add(other);
  }
  for (const int fragments : {1, 2}) {
    RegisterShape other = shipped;
    other.row_fragments = fragments;
    add(other);
  }
  RegisterShape other = shipped;
  other.held = !shipped.held;
  add(other);
  if (slot.kind != KernelKind::kForward) {
    other = shipped;
    other.value_held = !shipped.value_held;
    add(other);
  }
  found.emplace_back(std::nullopt);
  return found;
}

TuningChoice TuningTable::choice(const TuningSlot& slot) const {
  const auto found = choices_.find(slot);
  return found == choices_.end() ? shipped_choice(slot) : found->second;
}

std::string TuningTable::to_text() const {
  std::string text = std::string(kFirstLine) + "\n";
  for (const auto& [slot, choice] : choices_) {
    text += to_string(slot) + " " + to_string(slot, choice) + "\n";
  }
  return text + "end\n";
}

std::optional<TuningTable> TuningTable::parse(std::string_view text) {
  std::istringstream lines{std::string(text)};
  std::string line;
  if (!std::getline(lines, line) || line != kFirstLine) return std::nullopt;
  TuningTable table;
  while (std::getline(lines, line) && line != "end") {
    const std::size_t space = line.rfind(' ');
    if (space == std::string::npos) return std::nullopt;
    const std::optional<TuningSlot> slot = slot_named(std::string_view(line).substr(0, space));
    if (!slot) return std::nullopt;
    const std::vector<TuningChoice> known = candidates(*slot);
    const auto found = std::find_if(known.begin(), known.end(), [&](const TuningChoice& choice) {
      return to_string(*slot, choice) == line.substr(space + 1);
    });
    if (found == known.end()) return std::nullopt;
    table.set(*slot, *found);
  }
  if (line != "end") return std::nullopt;  // cut off
  return table;
}

}  // namespace flashattn::metal
