// See metal_tuning.h. Tables and choices cross as text, in the form of tuning_table.h.
#include "metal_tuning.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "flashattn/error.h"
#include "metal/encode.h"
#include "metal/stored_tuning.h"
#include "metal/tuning_table.h"

namespace flashattn::python {

namespace {

using metal::TuningChoice;
using metal::TuningSlot;
using metal::TuningTable;

metal::TuningStore& store() {
  metal::TuningStore* const found = metal::device_tuning();
  if (found == nullptr) throw DeviceError("tune: this machine has no Metal device");
  return *found;
}

TuningTable parse(const std::string& text) {
  std::optional<TuningTable> table = TuningTable::parse(text);
  if (!table) throw InvalidArgument("tune: this is no tuning table of this version:\n" + text);
  return std::move(*table);
}

// [(slot, choice in force, candidates)]; the first candidate is the shipped one.
std::vector<std::tuple<std::string, std::string, std::vector<std::string>>> slots() {
  const auto table = store().table();
  std::vector<std::tuple<std::string, std::string, std::vector<std::string>>> found;
  for (const TuningSlot& slot : metal::tuning_slots(metal::device_facts_in_force())) {
    std::vector<std::string> names;
    for (const TuningChoice& choice : metal::candidates(slot)) {
      names.push_back(metal::to_string(slot, choice));
    }
    const TuningChoice chosen = table ? table->choice(slot) : metal::shipped_choice(slot);
    found.emplace_back(metal::to_string(slot), metal::to_string(slot, chosen), std::move(names));
  }
  return found;
}

// [(kernel, threads it is run with, most threads that the device allows it)].
std::vector<std::tuple<std::string, int, int>> pipelines() {
  std::vector<std::tuple<std::string, int, int>> found;
  if (metal::device_tuning() == nullptr) return found;
  for (const metal::PipelineFacts& facts : metal::device_pipelines()) {
    found.emplace_back(facts.kernel, facts.threads, facts.most_threads);
  }
  return found;
}

void use(const std::optional<std::string>& text) {
  store().use(text ? std::optional(parse(*text)) : std::nullopt);
}

}  // namespace

void bind_metal_tuning(nanobind::module_& module) {
  namespace nb = nanobind;
  module.def("metal_tuning_slots", &slots);
  module.def("metal_use_tuning", &use, nb::arg("table").none());
  module.def("metal_save_tuning",
             [](const std::string& text) { return store().save(parse(text)); });
  module.def("metal_tuning_source", [] { return store().describe(); });
  module.def("metal_pipelines", &pipelines);
  module.def("metal_gpu_seconds", &metal::gpu_seconds);
}

}  // namespace flashattn::python
