// NSString: UTF-8 bytes. Lengths are in bytes, not in UTF-16 units, which only matters beyond
// ASCII.
#pragma once

#include <string>
#include <utility>

#include "objc/object.h"

namespace simulated {

class String : public Object {
 public:
  String() : Object("NSString") {}
  explicit String(std::string text) : Object("NSString"), text_(std::move(text)) {}

  const std::string& text() const { return text_; }
  void assign(std::string text) { text_ = std::move(text); }

 private:
  std::string text_;
};

// The text, or "" for nil.
inline std::string text_of(const String* string) {
  return string == nullptr ? std::string() : string->text();
}

}  // namespace simulated
