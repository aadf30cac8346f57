// NSString's methods, as far as the host and these tests use them.
#include "objc/string.h"

#include <Foundation/Foundation.hpp>
#include <cstdlib>

#include "objc/autorelease.h"
#include "objc/register.h"
#include "objc/validation.h"

namespace simulated {

namespace {

const char* const kClass = "NSString";

const char* checked(const char* text) {
  if (text == nullptr) fail_validation("NSString: the C string must not be null");
  return text;
}

}  // namespace

void register_string() {
  allocatable<String>(kClass);
  class_method(kClass, "string", [](Object*, SEL) { return autoreleased(new String); });
  class_method(kClass,
               "stringWithCString:encoding:", [](Object*, SEL, const char* text, NS::UInteger) {
                 return autoreleased(new String(checked(text)));
               });
  class_method(kClass, "stringWithString:", [](Object*, SEL, String* other) {
    return autoreleased(new String(text_of(other)));
  });
  instance_method(
      kClass, "initWithCString:encoding:", [](String* self, SEL, const char* text, NS::UInteger) {
        self->assign(checked(text));
        return self;
      });
  instance_method(
      kClass, "initWithBytesNoCopy:length:encoding:freeWhenDone:",
      [](String* self, SEL, void* bytes, NS::UInteger length, NS::UInteger, bool free_when_done) {
        self->assign(std::string(static_cast<const char*>(bytes), length));
        if (free_when_done) std::free(bytes);
        return self;
      });
  instance_method(kClass, "UTF8String", [](String* self, SEL) { return self->text().c_str(); });
  instance_method(kClass, "cStringUsingEncoding:", [](String* self, SEL, NS::UInteger) {
    return self->text().c_str();
  });
  instance_method(kClass, "length",
                  [](String* self, SEL) { return static_cast<NS::UInteger>(self->text().size()); });
  instance_method(kClass, "lengthOfBytesUsingEncoding:", [](String* self, SEL, NS::UInteger) {
    return static_cast<NS::UInteger>(self->text().size());
  });
  instance_method(kClass, "isEqualToString:", [](String* self, SEL, String* other) {
    return other != nullptr && self->text() == other->text();
  });
  instance_method(kClass, "stringByAppendingString:", [](String* self, SEL, String* other) {
    return autoreleased(new String(self->text() + text_of(other)));
  });
  instance_method(kClass, "description", [](String* self, SEL) { return self; });
}

}  // namespace simulated
