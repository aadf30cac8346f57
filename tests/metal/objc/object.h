// The object model of the simulated Objective-C runtime: reference counts, classes, selectors,
// methods. Objects are C++ objects that derive from Object; the address of one is what metal-cpp
// calls an `id`. Methods are captureless lambdas (self, selector, arguments...); written with
// metal-cpp's own types they have the right calling convention by construction. There
// is no inheritance between Objective-C classes but from NSObject, no ivars, no categories, no
// forwarding: what is not registered aborts.
#pragma once

#include <objc/runtime.h>

#include <atomic>
#include <string>
#include <unordered_map>
#include <utility>

#include "objc/driver_code.h"

struct objc_selector {
  std::string name;
};

namespace simulated {

class Class;

class Object {
 public:
  explicit Object(Class* isa);
  explicit Object(const char* class_name);
  virtual ~Object();
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  Class* isa() const { return isa_; }
  long retain_count() const { return references_.load(); }
  void retain() { ++references_; }
  void release();

 private:
  Class* isa_;
  std::atomic<long> references_{1};
};

class Class : public Object {
 public:
  Class(std::string name, Class* metaclass, Class* superclass)
      : Object(metaclass), name_(std::move(name)), superclass_(superclass) {}

  const std::string& name() const { return name_; }
  bool is_metaclass() const { return isa() == nullptr; }
  Class* superclass() const { return superclass_; }
  void* method(SEL selector) const;
  void set_method(SEL selector, void* implementation) { methods_[selector] = implementation; }

  std::atomic<long> live_instances{0};
  std::atomic<long> made_instances{0};

 private:
  std::string name_;
  Class* superclass_;
  std::unordered_map<SEL, void*> methods_;
};

// The class of that name, made on first use: metal-cpp looks its classes up in static initialisers.
Class* class_named(const std::string& name);
SEL selector_named(const std::string& name);
// False for an object that was freed: what a message to it, or a pool that still holds it, is found
// out by.
bool is_alive(const Object* object);
// The implementation that answers `selector` for this object, or null.
void* find_method(const Object* object, SEL selector);

enum class MethodKind { kInstance, kClass };

void set_method(MethodKind kind, const char* class_name, const char* selector,
                void* implementation);

// The plain function that runs a lambda as code of the driver.
template <typename Lambda, typename Signature>
struct Method;

template <typename Lambda, typename Result, typename Self, typename... Arguments>
struct Method<Lambda, Result (Lambda::*)(Self*, SEL, Arguments...) const> {
  static Result call(Self* self, SEL selector, Arguments... arguments) {
    const DriverCode inside;
    return Lambda{}(self, selector, arguments...);
  }
};

template <typename Lambda>
void* method_of(Lambda) {
  return reinterpret_cast<void*>(&Method<Lambda, decltype(&Lambda::operator())>::call);
}

template <typename Lambda>
void instance_method(const char* class_name, const char* selector, Lambda lambda) {
  set_method(MethodKind::kInstance, class_name, selector, method_of(lambda));
}

template <typename Lambda>
void class_method(const char* class_name, const char* selector, Lambda lambda) {
  set_method(MethodKind::kClass, class_name, selector, method_of(lambda));
}

// +alloc that makes a T; the matching -init is NSObject's, which returns self.
template <typename T>
void allocatable(const char* class_name) {
  class_method(class_name, "alloc", [](Object*, SEL) -> Object* { return new T; });
}

template <typename T>
T* retained(T* object) {
  if (object != nullptr) object->retain();
  return object;
}

inline void release(Object* object) {
  if (object != nullptr) object->release();
}

// An owning reference: `Ref<Buffer> b = Ref<Buffer>::retaining(p)`.
template <typename T>
class Ref {
 public:
  Ref() = default;
  static Ref retaining(T* object) { return Ref(retained(object)); }
  static Ref adopting(T* object) { return Ref(object); }
  Ref(const Ref& other) : object_(retained(other.object_)) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { release(object_); }

  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(T* object) : object_(object) {}
  T* object_ = nullptr;
};

}  // namespace simulated
