// NSError's methods.
#include "objc/error.h"

#include <Foundation/Foundation.hpp>

#include "objc/autorelease.h"
#include "objc/register.h"

namespace simulated {

Error::Error(const std::string& domain, long code, const std::string& description)
    : Object("NSError"),
      domain_(Ref<String>::adopting(new String(domain))),
      code_(code),
      description_(Ref<String>::adopting(new String(description))) {}

void report_error(Error** destination, const std::string& domain, long code,
                  const std::string& description) {
  if (destination != nullptr) *destination = autoreleased(new Error(domain, code, description));
}

void register_error() {
  const char* const name = "NSError";
  instance_method(name, "domain", [](Error* self, SEL) { return self->domain(); });
  instance_method(name, "code",
                  [](Error* self, SEL) { return static_cast<NS::Integer>(self->code()); });
  instance_method(name, "localizedDescription",
                  [](Error* self, SEL) { return self->description(); });
  instance_method(name, "description", [](Error* self, SEL) { return self->description(); });
  // No user info: the host has to do with the description, as it has to when a driver gives none.
  instance_method(name, "userInfo", [](Error*, SEL) -> Object* { return nullptr; });
  instance_method(name, "localizedFailureReason", [](Error*, SEL) -> Object* { return nullptr; });
}

}  // namespace simulated
