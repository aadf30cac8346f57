// TuningTable: which of a few candidate kernels each product runs with. The shipped choices are the
// cost model's (docs/metal-performance.md), not measurements; `python -m flashattn tune` measures
// on the device that is there and writes a table that takes their place. Candidates differ in speed
// and in the order of sums, never in what they compute. Plain C++20, tested on every machine.
#pragma once

#include <array>
#include <compare>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "metal/device_facts.h"
#include "metal/kernel_key.h"

namespace flashattn::metal {

// Sizes of a register kernel: shaders/register_*.metal.
struct RegisterShape {
  int columns = 0;        // rows of the other side that it takes per step
  int row_fragments = 0;  // strips of 8 rows that each simdgroup owns
  int simdgroups = 0;
  bool held = false;        // Q, or K, stays in registers
  bool value_held = false;  // and so does dO, or V

  bool operator==(const RegisterShape&) const = default;
};

// A register kernel, or nothing: the staged kernel, and for dK and dV together two kernels.
using TuningChoice = std::optional<RegisterShape>;

// Kernels are chosen for three ranges of tiles, by their ends.
inline constexpr std::array<int, 3> kWidths = {64, 128, 256};
int width_of(int tile);

// What a choice is made for.
struct TuningSlot {
  KernelKind kind = KernelKind::kForward;
  DType dtype = DType::kFloat32;
  int width = kWidths.front();  // of kWidths: the larger tile is not above it
  bool apple = false;           // by kernels for Apple's lane map, else by those that learn the map

  auto operator<=>(const TuningSlot&) const = default;
};

// "forward float32 64 apple"; the number is the width.
std::string to_string(const TuningSlot& slot);

// "c32f2s4hv": columns, fragments, simdgroups, held, value held; "staged" or "split" for nothing.
std::string to_string(const TuningSlot& slot, const TuningChoice& choice);

// Every slot whose kernels can run with the device's lane maps.
std::vector<TuningSlot> tuning_slots(const DeviceFacts& facts);

TuningChoice shipped_choice(const TuningSlot& slot);

// The shipped choice, and what else is worth a measurement.
std::vector<TuningChoice> candidates(const TuningSlot& slot);

class TuningTable {
 public:
  // The table that to_text wrote; nothing when it is damaged or names a candidate that there is
  // not.
  static std::optional<TuningTable> parse(std::string_view text);
  std::string to_text() const;

  void set(const TuningSlot& slot, const TuningChoice& choice) { choices_[slot] = choice; }
  // The shipped one for a slot that the table does not name.
  TuningChoice choice(const TuningSlot& slot) const;

 private:
  std::map<TuningSlot, TuningChoice> choices_;
};

}  // namespace flashattn::metal
