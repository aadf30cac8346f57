// NSArray, NSDictionary and NSNumber: immutable, and only as large as the host's use of them.
#pragma once

#include <utility>
#include <vector>

#include "objc/object.h"

namespace simulated {

class Array : public Object {
 public:
  Array() : Object("NSArray") {}
  std::vector<Ref<Object>> items;
};

class Dictionary : public Object {
 public:
  Dictionary() : Object("NSDictionary") {}
  std::vector<std::pair<Ref<Object>, Ref<Object>>> items;  // key, value
};

class Number : public Object {
 public:
  explicit Number(long value) : Object("NSNumber"), value_(value) {}
  long value() const { return value_; }

 private:
  long value_;
};

}  // namespace simulated
