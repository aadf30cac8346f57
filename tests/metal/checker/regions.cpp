// A dispatch has at most 31 regions, so searches are linear.
#include "regions.h"

#include <algorithm>
#include <utility>

namespace metal_sim {

void DeviceRegions::build_spans() {
  std::vector<const Region*> sorted;
  for (const Region& region : regions_) sorted.push_back(&region);
  std::sort(sorted.begin(), sorted.end(),
            [](const Region* a, const Region* b) { return a->begin < b->begin; });
  std::vector<bool> writable;
  for (const Region* region : sorted) {
    char* end = region->begin + region->bytes;
    if (!spans_.empty() && region->begin < spans_.back().end) {
      spans_.back().end = std::max(spans_.back().end, end);
      writable.back() = writable.back() || region->writable;
    } else {
      spans_.push_back({region->begin, end, nullptr});
      writable.push_back(region->writable);
    }
  }
  for (std::size_t i = 0; i < spans_.size(); ++i)
    if (writable[i])
      spans_[i].cells = make_cells(static_cast<std::size_t>(spans_[i].end - spans_[i].begin));
}

const Region* DeviceRegions::find(const void* pointer, std::size_t bytes, bool write) const {
  const char* p = static_cast<const char*>(pointer);
  const Region* found = nullptr;
  for (const Region& region : regions_) {
    if (!region.contains(p, bytes)) continue;
    if (!write || region.writable) return &region;
    found = &region;
  }
  return found;
}

const Region* DeviceRegions::nearest(const void* pointer) const {
  const char* p = static_cast<const char*>(pointer);
  const Region* best = nullptr;
  std::ptrdiff_t best_distance = 0;
  for (const Region& region : regions_) {
    const char* end = region.begin + region.bytes;
    const std::ptrdiff_t distance = p < region.begin ? region.begin - p : p < end ? 0 : p - end;
    if (best == nullptr || distance < best_distance) {
      best = &region;
      best_distance = distance;
    }
  }
  return best;
}

Cell* DeviceRegions::cell(const void* pointer) {
  char* p = static_cast<char*>(const_cast<void*>(pointer));
  for (Span& span : spans_)
    if (p >= span.begin && p < span.end)
      return span.cells == nullptr
                 ? nullptr
                 : &span.cells[static_cast<std::size_t>(p - span.begin) / kCellBytes];
  return nullptr;
}

}  // namespace metal_sim
