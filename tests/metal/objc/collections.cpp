// The methods of NSArray, NSDictionary and NSNumber.
#include "objc/collections.h"

#include <Foundation/Foundation.hpp>

#include "objc/autorelease.h"
#include "objc/register.h"
#include "objc/string.h"
#include "objc/validation.h"

namespace simulated {

namespace {

Array* make_array(Object* const* objects, NS::UInteger count) {
  auto* array = new Array;
  for (NS::UInteger i = 0; i < count; ++i)
    array->items.push_back(Ref<Object>::retaining(objects[i]));
  return array;
}

Dictionary* make_dictionary(Object* const* objects, Object* const* keys, NS::UInteger count) {
  auto* dictionary = new Dictionary;
  for (NS::UInteger i = 0; i < count; ++i) {
    dictionary->items.emplace_back(Ref<Object>::retaining(keys[i]),
                                   Ref<Object>::retaining(objects[i]));
  }
  return dictionary;
}

Object* object_for_key(const Dictionary* dictionary, const Object* key) {
  const auto* wanted = dynamic_cast<const String*>(key);
  for (const auto& [candidate, value] : dictionary->items) {
    const auto* name = dynamic_cast<const String*>(candidate.get());
    if (name != nullptr && wanted != nullptr && name->text() == wanted->text()) return value.get();
  }
  return nullptr;
}

}  // namespace

void register_collections() {
  class_method("NSArray", "array", [](Object*, SEL) { return autoreleased(new Array); });
  class_method("NSArray", "arrayWithObject:", [](Object*, SEL, Object* object) {
    return autoreleased(make_array(&object, 1));
  });
  class_method("NSArray",
               "arrayWithObjects:count:", [](Object*, SEL, Object** objects, NS::UInteger count) {
                 return autoreleased(make_array(objects, count));
               });
  instance_method("NSArray", "count",
                  [](Array* self, SEL) { return static_cast<NS::UInteger>(self->items.size()); });
  instance_method("NSArray", "objectAtIndex:", [](Array* self, SEL, NS::UInteger index) {
    if (index >= self->items.size()) {
      fail_validation("-[NSArray objectAtIndex:]: index %lu beyond count %lu",
                      static_cast<unsigned long>(index),
                      static_cast<unsigned long>(self->items.size()));
    }
    return self->items[index].get();
  });

  class_method("NSDictionary",
               "dictionaryWithObject:forKey:", [](Object*, SEL, Object* object, Object* key) {
                 return autoreleased(make_dictionary(&object, &key, 1));
               });
  class_method("NSDictionary", "dictionaryWithObjects:forKeys:count:",
               [](Object*, SEL, Object** objects, Object** keys, NS::UInteger count) {
                 return autoreleased(make_dictionary(objects, keys, count));
               });
  instance_method("NSDictionary", "count", [](Dictionary* self, SEL) {
    return static_cast<NS::UInteger>(self->items.size());
  });
  instance_method("NSDictionary", "objectForKey:", [](Dictionary* self, SEL, Object* key) {
    return object_for_key(self, key);
  });

  class_method("NSNumber", "numberWithInt:", [](Object*, SEL, int value) {
    return autoreleased(new Number(value));
  });
  class_method("NSNumber", "numberWithBool:", [](Object*, SEL, bool value) {
    return autoreleased(new Number(value));
  });
  instance_method("NSNumber", "intValue",
                  [](Number* self, SEL) { return static_cast<int>(self->value()); });
}

}  // namespace simulated
