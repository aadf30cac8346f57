// Asking the GPU for its lane maps; see lane_maps.h.
#include "metal/lane_maps.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "flashattn/error.h"
#include "metal/encode.h"
#include "metal/objects.h"

namespace flashattn::metal {

namespace {

constexpr const char* kVariable = "FLASHATTN_METAL_KERNELS";

std::atomic<int> generation{1};

// apple_lane_map of shaders/lane_map.h.
LanePositions apple_positions() {
  LanePositions positions{};
  for (std::uint32_t lane = 0; lane < abi::kSimdWidth; ++lane) {
    const std::uint32_t row = ((lane & 16U) >> 2U) | ((lane >> 1U) & 3U);
    const std::uint32_t column = ((lane & 8U) >> 1U) | ((lane & 1U) << 1U);
    positions[2 * lane] = row * abi::kFragment + column;
    positions[2 * lane + 1] = row * abi::kFragment + column + 1;
  }
  return positions;
}

// The strongest map that the environment allows kernels to be chosen for.
LaneMap allowed_map() {
  const char* const value = std::getenv(kVariable);
  const std::string text = value == nullptr ? "" : value;
  if (text.empty() || text == "register") return LaneMap::kApple;
  if (text == "any") return LaneMap::kAny;
  if (text == "staged") return LaneMap::kUnknown;
  throw InvalidArgument(std::string(kVariable) + " (" + text + ") must be register, any or staged");
}

const char* name_of(LaneMap map) {
  switch (map) {
    case LaneMap::kApple:
      return "register kernels for Apple's lane map";
    case LaneMap::kAny:
      return "register kernels for any lane map";
    case LaneMap::kUnknown:
      break;
  }
  return "staged kernels";
}

}  // namespace

LaneMap classify(const LanePositions& positions, const LanePositions& floats) {
  LanePositions sorted = positions;
  std::sort(sorted.begin(), sorted.end());
  for (std::uint32_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != i) return LaneMap::kUnknown;
  }
  if (positions != floats) return LaneMap::kUnknown;
  return positions == apple_positions() ? LaneMap::kApple : LaneMap::kAny;
}

int lane_map_generation() { return generation.load(); }

void forget_lane_maps() { ++generation; }

// Throws DeviceError where the device cannot even do this.
LanePositions LaneMaps::probe(DType dtype) const {
  const KernelKey key{.kind = KernelKind::kLaneMapProbe, .dtype = dtype, .block_rows = 2};
  Schedule schedule;
  schedule.dispatches.push_back(
      {.key = key, .threadgroups = 1, .threads_per_threadgroup = threads_per_threadgroup(key)});
  LanePositions positions{};
  const BufferPool::Lease buffer = pool_->take(sizeof positions);
  SlotTable slots{};
  slots[abi::kBufferOut] = {.buffer = buffer.get(), .offset = 0};
  std::vector<const CompiledKernel*> kernels;
  pipelines_->get_all(schedule.dispatches, &kernels);
  Submission submission;
  submission.commit(*device_, {.schedule = schedule, .kernels = kernels, .slots = slots});
  if (const std::string failure = submission.wait(schedule); !failure.empty()) {
    throw DeviceError(failure);
  }
  std::memcpy(positions.data(), buffer.contents(), sizeof positions);
  return positions;
}

void LaneMaps::ask() {
  const int wanted = generation.load();
  if (asked_ == wanted) return;
  demoted_.clear();
  asked_ = wanted;  // once: a device that fails here has the staged kernels
  try {
    const AutoreleaseScope scope;
    const LanePositions floats = probe(DType::kFloat32);
    float_ = classify(floats, floats);
    half_ = classify(probe(DType::kFloat16), floats);
  } catch (const DeviceError&) {
    float_ = half_ = LaneMap::kUnknown;
  }
}

DeviceFacts LaneMaps::facts(DeviceFacts reused) {
  DeviceFacts facts = std::move(reused);
  facts = device_->facts();
  const LaneMap allowed = allowed_map();
  if (allowed == LaneMap::kUnknown) return facts;
  const std::lock_guard lock(mutex_);
  ask();
  facts.float_map = std::min(float_, allowed);
  facts.half_map = std::min(half_, allowed);
  return facts;
}

void LaneMaps::demote(DType dtype, LaneMap chosen, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (demoted_.empty()) demoted_ = reason.substr(0, reason.find('\n'));
  LaneMap& map = dtype == DType::kFloat16 ? half_ : float_;
  const LaneMap weaker = chosen == LaneMap::kApple ? LaneMap::kAny : LaneMap::kUnknown;
  map = std::min(map, weaker);
}

std::string LaneMaps::describe() {
  DeviceFacts known;
  try {
    if (allowed_map() == LaneMap::kUnknown) {
      return std::string(name_of(LaneMap::kUnknown)) + " (" + kVariable + ")";
    }
    known = facts();
  } catch (const InvalidArgument& wrong) {
    return wrong.what();
  }
  std::string text = name_of(known.float_map);
  if (known.float_map == LaneMap::kUnknown) text += " (its lane map is not a usable one)";
  if (known.half_map != known.float_map) {
    text += ", float16: " + std::string(name_of(known.half_map));
  }
  const std::lock_guard lock(mutex_);
  if (!demoted_.empty()) text += ", because: " + demoted_;
  return text;
}

}  // namespace flashattn::metal
