// Candidates, shipped choices and the text form; see tuning_table.h.
#include "metal/tuning_table.h"

#include <algorithm>
#include <array>
#include <sstream>

namespace flashattn::metal {

namespace {

constexpr std::string_view kFirstLine = "flashattn tuning 1";
constexpr int kNarrow = kWidths.front();
constexpr int kWidest = kWidths.back();
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

bool fits(const TuningSlot& slot, const RegisterShape& shape) {
  const KernelKey key{.kind = slot.kind,
                      .dtype = slot.dtype,
                      .head_tile = slot.width,
                      .value_tile = slot.width,
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
  return slot.kind != KernelKind::kBackwardDkv || (slot.width == kNarrow && !slot.apple);
}

// Sums alone fill half the registers: what they are made of is read again for every block.
RegisterShape widest_shape(const TuningSlot& slot) {
  const bool forward = slot.kind == KernelKind::kForward;
  const bool half = slot.dtype == DType::kFloat16;
  const int columns = half && (forward || slot.kind == KernelKind::kBackwardDq) ? 16 : 8;
  return {columns, 1, 8, false, forward};
}

// Kernels that would need more than 128 registers: those of the widest tiles, three of them by a
// map that they learn.
bool ships_staged(const TuningSlot& slot) {
  if (slot.width != kWidest || slot.apple) return false;
  if (slot.kind == KernelKind::kBackwardDk) return slot.dtype != DType::kBFloat16;
  return slot.kind == KernelKind::kBackwardDq && slot.dtype == DType::kFloat16;
}

// The shipped register kernel, or what comes closest to one.
RegisterShape shipped_shape(const TuningSlot& slot) {
  if (slot.width == kWidest) return widest_shape(slot);
  const bool narrow = slot.width == kNarrow;
  const bool half = slot.dtype == DType::kFloat16;
  switch (slot.kind) {
    case KernelKind::kForward:
      if (narrow)
        return slot.apple ? RegisterShape{32, 2, 4, true, true}
                          : RegisterShape{32, 1, 8, true, true};
      if (half) return {32, 1, 8, true, true};
      return slot.apple ? RegisterShape{16, 2, 8, false, true}
                        : RegisterShape{16, 1, 8, true, true};
    case KernelKind::kBackwardDq:
      if (narrow || half) return {32, 1, 8, true, true};
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
      for (const int width : kWidths) {
        for (const bool apple : {false, true}) {
          const TuningSlot slot{.kind = kind, .dtype = dtype, .width = width, .apple = apple};
          if (exists(slot) && to_string(slot) == name) return slot;
        }
      }
    }
  }
  return std::nullopt;
}

}  // namespace

int width_of(int tile) { return *std::lower_bound(kWidths.begin(), kWidths.end(), tile); }

std::string to_string(const TuningSlot& slot) {
  return std::string(name_of(slot.kind)) + " " + std::string(dtype_name(slot.dtype)) + " " +
         std::to_string(slot.width) + (slot.apple ? " apple" : " any");
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
    for (const int width : kWidths) {
      for (const KernelKind kind : kKinds) {
        const bool apple = map == LaneMap::kApple && kind != KernelKind::kBackwardDkv;
        const TuningSlot slot{.kind = kind, .dtype = dtype, .width = width, .apple = apple};
        if (exists(slot)) slots.push_back(slot);
      }
    }
  }
  return slots;
}

TuningChoice shipped_choice(const TuningSlot& slot) {
  if (ships_staged(slot)) return std::nullopt;
  return shipped_shape(slot);
}

// One size at a time away from the shipped choice: the sizes matter nearly independently. The
// widest tiles leave no registers for more rows or for held ones.
std::vector<TuningChoice> candidates(const TuningSlot& slot) {
  const RegisterShape shipped = shipped_shape(slot);
  const bool widest = slot.width == kWidest;
  std::vector<TuningChoice> found = {shipped_choice(slot)};
  const auto add = [&](const TuningChoice& choice) {
    const bool known = std::find(found.begin(), found.end(), choice) != found.end();
    if (!known && (!choice || fits(slot, *choice))) found.push_back(choice);
  };
  add(shipped);
  for (const int columns : {8, 16, 32}) {
    if (columns == 8 && !widest) continue;
    RegisterShape other = shipped;
    other.columns = columns;
    add(other);
  }
  for (const int simdgroups : {4, 8}) {
    RegisterShape other = shipped;
    other.simdgroups = simdgroups;
    add(other);
  }
  if (!widest) {
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
  }
  add(std::nullopt);
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
