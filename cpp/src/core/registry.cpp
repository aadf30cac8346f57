// The ordered list of this build's backends, and the choice among them. Metal stands in it when
// the build defines FLASHATTN_WITH_METAL.
#include "core/registry.h"

#include <cstdlib>

namespace flashattn {

namespace {

constexpr const char* kBackendVariable = "FLASHATTN_BACKEND";

Support can_run(const Backend& backend, const AttentionProblem& problem) {
  Support available = backend.available();
  return available.ok ? backend.supports(problem) : available;
}

std::string prefix(const AttentionProblem& problem) {
  return std::string(problem.function) + (problem.pass == Pass::kBackward ? "_backward: " : ": ");
}

Backend& find_by_name(const std::vector<Backend*>& candidates, const AttentionProblem& problem,
                      const BackendName& asked) {
  std::string known;
  for (Backend* backend : candidates) {
    if (backend->name() == asked.name) return *backend;
    known += (known.empty() ? "" : ", ") + backend->name();
  }
  throw InvalidArgument(prefix(problem) + asked.source + " (\"" + asked.name +
                        "\") must be one of: " + known);
}

}  // namespace

Backend& choose_from(const std::vector<Backend*>& candidates, const AttentionProblem& problem,
                     const BackendName& asked) {
  if (!asked.name.empty()) {
    Backend& backend = find_by_name(candidates, problem, asked);
    const Support support = can_run(backend, problem);
    if (support.ok) return backend;
    throw Unsupported(prefix(problem) + asked.source + " \"" + asked.name + "\" cannot do " +
                      to_string(problem) + ": " + support.reason);
  }
  std::string reasons;
  for (Backend* backend : candidates) {
    if (!backend->chosen_by_default()) continue;
    const Support support = can_run(*backend, problem);
    if (support.ok) return *backend;
    reasons += "\n  " + backend->name() + ": " + support.reason;
  }
  throw Unsupported(prefix(problem) + "no backend can do " + to_string(problem) + reasons);
}

const std::vector<Backend*>& backends() {
  static const std::vector<Backend*> list = {
#ifdef FLASHATTN_WITH_METAL
      &metal_backend(),
#endif
      &cpu_backend(),
  };
  return list;
}

Backend& choose_backend(const AttentionProblem& problem, const std::string& name) {
  if (!name.empty()) return choose_from(backends(), problem, {.name = name});
  const char* from_environment = std::getenv(kBackendVariable);
  return choose_from(
      backends(), problem,
      {.name = from_environment == nullptr ? "" : from_environment, .source = kBackendVariable});
}

}  // namespace flashattn
