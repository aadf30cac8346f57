// The choice of a backend out of a list: what choose_backend does once it knows the list and the
// name. Kept apart from the list itself so that the rule can be tested with backends made up for
// the test.
#pragma once

#include <string>
#include <vector>

#include "flashattn/backend.h"

namespace flashattn {

// A backend's name, empty for none, and where it was given: what messages call it.
struct BackendName {
  std::string name{};
  const char* source = "backend";
};

// The backend that was asked for, or with an empty name the first of `candidates` that is chosen by
// default, available and supports the problem. Throws InvalidArgument for an unknown name, and
// Unsupported with each asked backend's reason.
Backend& choose_from(const std::vector<Backend*>& candidates, const AttentionProblem& problem,
                     const BackendName& asked);

// Each backend's one object, made on first use; defined in the backend's own folder.
Backend& cpu_backend();
Backend& metal_backend();  // only with FLASHATTN_WITH_METAL

}  // namespace flashattn
