// The registry of classes and selectors, method lookup for objc_msgSend, and NSObject's own
// methods.
#include <Foundation/Foundation.hpp>
#include <mutex>
#include <unordered_set>

#include "objc/autorelease.h"
#include "objc/live_objects.h"
#include "objc/object.h"
#include "objc/register.h"
#include "objc/string.h"
#include "objc/validation.h"

namespace simulated {

namespace {

// Function-local, never destroyed: the first use is in another file's static initialiser and the
// last may be in one of its destructors.
struct Registry {
  std::recursive_mutex mutex;
  std::unordered_map<std::string, Class*> classes;
  std::unordered_map<std::string, SEL> selectors;
};

Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

// Every object that was made and not freed, so that a message to a freed one is a clear failure.
struct LiveSet {
  std::mutex mutex;
  std::unordered_set<const Object*> objects;
};

LiveSet& live_set() {
  static LiveSet* const instance = new LiveSet;
  return *instance;
}

const char* const kRootClass = "NSObject";

std::string described(const Object* object) {
  const Class* isa = object->isa();
  if (isa == nullptr || !isa->is_metaclass()) return isa == nullptr ? "?" : isa->name();
  return static_cast<const Class*>(object)->name();
}

}  // namespace

Object::Object(Class* isa) : isa_(isa) {
  if (isa_ != nullptr && !isa_->is_metaclass()) {
    ++isa_->live_instances;
    ++isa_->made_instances;
  }
  const std::lock_guard lock(live_set().mutex);
  live_set().objects.insert(this);
}

Object::Object(const char* class_name) : Object(class_named(class_name)) {}

Object::~Object() {
  if (isa_ != nullptr && !isa_->is_metaclass()) --isa_->live_instances;
  const std::lock_guard lock(live_set().mutex);
  live_set().objects.erase(this);
}

bool is_alive(const Object* object) {
  const std::lock_guard lock(live_set().mutex);
  return live_set().objects.contains(object);
}

void Object::release() {
  if (--references_ == 0) delete this;
}

void* Class::method(SEL selector) const {
  const auto found = methods_.find(selector);
  if (found != methods_.end()) return found->second;
  return superclass_ == nullptr ? nullptr : superclass_->method(selector);
}

Class* class_named(const std::string& name) {
  Registry& state = registry();
  const std::lock_guard lock(state.mutex);
  if (const auto found = state.classes.find(name); found != state.classes.end())
    return found->second;
  Class* root = name == kRootClass ? nullptr : class_named(kRootClass);
  auto* metaclass = new Class(name, nullptr, root == nullptr ? nullptr : root->isa());
  auto* made = new Class(name, metaclass, root);
  state.classes.emplace(name, made);
  return made;
}

SEL selector_named(const std::string& name) {
  Registry& state = registry();
  const std::lock_guard lock(state.mutex);
  SEL& selector = state.selectors[name];
  if (selector == nullptr) selector = new objc_selector{name};
  return selector;
}

void* find_method(const Object* object, SEL selector) {
  static std::once_flag registered;
  std::call_once(registered, register_every_class);
  const std::lock_guard lock(registry().mutex);
  return object->isa() == nullptr ? nullptr : object->isa()->method(selector);
}

void set_method(MethodKind kind, const char* class_name, const char* selector,
                void* implementation) {
  const std::lock_guard lock(registry().mutex);
  Class* owner = class_named(class_name);
  (kind == MethodKind::kClass ? owner->isa() : owner)
      ->set_method(selector_named(selector), implementation);
}

void register_object() {
  instance_method(kRootClass, "retain", [](Object* self, SEL) { return retained(self); });
  instance_method(kRootClass, "release", [](Object* self, SEL) { self->release(); });
  instance_method(kRootClass, "autorelease", [](Object* self, SEL) { return autoreleased(self); });
  instance_method(kRootClass, "init", [](Object* self, SEL) { return self; });
  instance_method(kRootClass, "retainCount", [](Object* self, SEL) {
    return static_cast<NS::UInteger>(self->retain_count());
  });
  instance_method(kRootClass, "hash",
                  [](Object* self, SEL) { return reinterpret_cast<NS::UInteger>(self); });
  instance_method(kRootClass,
                  "isEqual:", [](Object* self, SEL, Object* other) { return self == other; });
  instance_method(kRootClass, "respondsToSelector:", [](Object* self, SEL, SEL selector) {
    return find_method(self, selector) != nullptr;
  });
  // metal-cpp asks for the signature before it sends a selector that a system may lack.
  instance_method(kRootClass, "methodSignatureForSelector:", [](Object* self, SEL, SEL selector) {
    return find_method(self, selector);
  });
  instance_method(kRootClass, "description", [](Object* self, SEL) -> Object* {
    return autoreleased(new String("<" + described(self) + ">"));
  });
  class_method(kRootClass, "retain", [](Object* self, SEL) { return self; });
  class_method(kRootClass, "release", [](Object*, SEL) {});
}

}  // namespace simulated

extern "C" {

void* objc_lookUpClass(const char* name) { return simulated::class_named(name); }

void* objc_getProtocol(const char* name) {
  return simulated::class_named("@protocol " + std::string(name));
}

SEL sel_registerName(const char* name) { return simulated::selector_named(name); }

// Called by message_send.S with the receiver and the selector of a message; never returns null.
void* flashattn_simulated_lookup(simulated::Object* receiver, SEL selector) {
  simulated::count_message();
  const simulated::DriverCode inside;
  if (!simulated::is_alive(receiver)) {
    simulated::fail_validation("-[%p %s]: message to a freed object", static_cast<void*>(receiver),
                               selector->name.c_str());
  }
  void* found = simulated::find_method(receiver, selector);
  if (found == nullptr) {
    const bool is_class = receiver->isa() != nullptr && receiver->isa()->is_metaclass();
    simulated::fail_validation("%c[%s %s]: not implemented", is_class ? '+' : '-',
                               simulated::described(receiver).c_str(), selector->name.c_str());
  }
  return found;
}

long flashattn_simulated_live_objects(void) {
  simulated::Registry& state = simulated::registry();
  const std::lock_guard lock(state.mutex);
  long total = 0;
  for (const auto& [name, found] : state.classes) total += found->live_instances.load();
  return total;
}

long flashattn_simulated_made_objects(void) {
  simulated::Registry& state = simulated::registry();
  const std::lock_guard lock(state.mutex);
  long total = 0;
  for (const auto& [name, found] : state.classes) total += found->made_instances.load();
  return total;
}

long flashattn_simulated_made_instances(const char* class_name) {
  return simulated::class_named(class_name)->made_instances.load();
}

long flashattn_simulated_live_instances(const char* class_name) {
  return simulated::class_named(class_name)->live_instances.load();
}

}  // extern "C"
