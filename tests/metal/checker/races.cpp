// The race rule. Two accesses to one cell by different threads, at least one of them a write, are a
// race unless
// * both are in one threadgroup and a threadgroup barrier naming the address space lies between
// them, or
// * both are in one simdgroup and a simdgroup barrier naming it lies between them, or
// * both are atomic.
// Shuffles, votes and matrix multiplies order nothing, although lanes of today's GPUs run in step.
#include <string>

#include "../runtime/dispatch_state.h"
#include "../runtime/threadgroup.h"
#include "access.h"

namespace metal_sim {
namespace {

constexpr int kMemDevice = 1;  // metal::mem_flags
constexpr int kMemThreadgroup = 2;

}  // namespace

void AccessChecker::barrier_passed(abi::BarrierScope scope, int flags, abi::Source source) {
  const bool whole_group = scope == abi::BarrierScope::kThreadgroup;
  if ((flags & kMemThreadgroup) == 0)
    weak_threadgroup_ = source;
  else if (whole_group)
    weak_threadgroup_ = {nullptr, 0};
  if ((flags & kMemDevice) == 0)
    weak_device_ = source;
  else if (whole_group)
    weak_device_ = {nullptr, 0};
}

bool AccessChecker::unordered(const AccessRecord& before, const AccessRecord& now) const {
  if (before.run == 0 || (before.atomic && now.atomic)) return false;
  if (before.run != now.run) return true;
  if (before.epoch != now.epoch || before.thread == now.thread) return false;
  if (before.thread / 32 != now.thread / 32) return true;
  return before.simdgroup_epoch == now.simdgroup_epoch;
}

// Whether a write races with any of the reads the cell remembers.
bool AccessChecker::read_races(const Cell& cell, const AccessRecord& now) const {
  if (unordered(cell.read, now)) return true;
  if (cell.read.run != now.run || cell.read.epoch != now.epoch || cell.read.atomic) return false;
  if ((cell.reading_simdgroups & ~(1u << (now.thread / 32))) != 0) return true;
  return cell.read.several_lanes && cell.read.simdgroup_epoch == now.simdgroup_epoch;
}

void AccessChecker::remember(Cell& cell, bool write, const AccessRecord& now) const {
  if (write) {
    cell.write = now;
    cell.initialised = true;
    return;
  }
  const std::uint32_t bit = 1u << (now.thread / 32);
  const AccessRecord& old = cell.read;
  const bool same_epoch = old.run == now.run && old.epoch == now.epoch;
  const bool same_lanes = same_epoch && old.thread / 32 == now.thread / 32 &&
                          old.simdgroup_epoch == now.simdgroup_epoch;
  const bool several = same_lanes && (old.several_lanes || old.thread != now.thread);
  cell.reading_simdgroups = (same_epoch ? cell.reading_simdgroups : 0u) | bit;
  cell.read = now;
  cell.read.several_lanes = several;
}

void AccessChecker::check_cell(Cell& cell, const Access& access, AccessRecord now) {
  if (unordered(cell.write, now)) report_race(access, cell.write, "write");
  if (access.write && read_races(cell, now)) report_race(access, cell.read, "read");
  remember(cell, access.write, now);
}

void AccessChecker::check_cells(Cell* cells, const Access& access, std::uint32_t epoch) {
  const Epochs& simdgroup = group_.simdgroup().epochs;
  const bool device = access.space[0] == 'd';
  const AccessRecord now{.run = group_.index() + 1,
                         .epoch = epoch,
                         .simdgroup_epoch = device ? simdgroup.device : simdgroup.threadgroup,
                         .location = access.location,
                         .thread = group_.thread().index,
                         .atomic = access.atomic,
                         .several_lanes = false};
  for (std::size_t i = 0; i * kCellBytes < access.bytes; ++i) check_cell(cells[i], access, now);
}

void AccessChecker::report_race(const Access& access, const AccessRecord& before,
                                const char* earlier) {
  const bool other_group = before.run != group_.index() + 1;
  const std::string where = describe(access.location);
  const std::string there = describe(before.location);
  const std::string kind = access.write ? "write" : "read";
  std::string text = "race on " + std::string(access.space) + " '" + access.name + "': " + kind +
                     " at " + where + " by " + by_thread(group_.thread().index) + ", earlier " +
                     earlier + " at " + there;
  // The cell remembers the last reader alone, who may be the writer: then another thread read
  // before it.
  text += before.thread == group_.thread().index && !other_group
              ? " by several threads"
              : " by thread " + std::to_string(before.thread);
  if (other_group) {
    text +=
        " of threadgroup " + std::to_string(before.run - 1) + ": no barrier orders threadgroups";
  } else {
    const abi::Source weak = access.space[0] == 'd' ? weak_device_ : weak_threadgroup_;
    if (weak.file != nullptr) {
      const std::string path = weak.file;
      text += "; the barrier at " + path.substr(path.rfind('/') + 1) + ":" +
              std::to_string(weak.line) + " does not name this memory in its mem_flags";
    }
  }
  group_.report("race|" + where + there + kind + earlier + access.name, text);
}

}  // namespace metal_sim
