// Autorelease pools: one stack of pools per thread, as in Objective-C. Draining releases in the
// order of entry.
#pragma once

#include "objc/object.h"

namespace simulated {

class AutoreleasePool : public Object {
 public:
  AutoreleasePool();
  ~AutoreleasePool() override;

 private:
  unsigned long depth_;  // of this thread's stack with this pool on top
};

void add_to_autorelease_pool(Object* object);

// Hands the caller's reference to the innermost pool. Without a pool the object would leak, as on a
// Mac; here that is a validation failure.
template <typename T>
T* autoreleased(T* object) {
  if (object != nullptr) add_to_autorelease_pool(object);
  return object;
}

}  // namespace simulated
