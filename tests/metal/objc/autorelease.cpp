// The per-thread stack of autorelease pools, and NSAutoreleasePool's methods.
#include "objc/autorelease.h"

#include <vector>

#include "objc/register.h"
#include "objc/validation.h"

namespace simulated {

namespace {

std::vector<std::vector<Object*>>& pools() {
  thread_local std::vector<std::vector<Object*>> stack;
  return stack;
}

}  // namespace

AutoreleasePool::AutoreleasePool() : Object("NSAutoreleasePool") {
  pools().emplace_back();
  depth_ = pools().size();
}

AutoreleasePool::~AutoreleasePool() {
  // Pools that were pushed later and never drained go with this one.
  while (pools().size() >= depth_) {
    const std::vector<Object*> objects = std::move(pools().back());
    pools().pop_back();
    for (Object* object : objects) {
      if (!is_alive(object)) {
        fail_validation("an autorelease pool holds %p, which was released once too often",
                        static_cast<void*>(object));
      }
      object->release();
    }
  }
}

void add_to_autorelease_pool(Object* object) {
  if (pools().empty()) {
    fail_validation("%s %p autoreleased with no pool in place - it would leak",
                    object->isa()->name().c_str(), static_cast<void*>(object));
  }
  pools().back().push_back(object);
}

void register_autorelease_pool() {
  allocatable<AutoreleasePool>("NSAutoreleasePool");
  instance_method("NSAutoreleasePool", "drain",
                  [](AutoreleasePool* self, SEL) { self->release(); });
  class_method("NSAutoreleasePool", "showPools", [](Object*, SEL) {});
}

}  // namespace simulated
