// Small helpers over metal-cpp: pools, strings and error texts. Owned objects are NS::SharedPtr
// everywhere.
#pragma once

#include <Foundation/Foundation.hpp>
#include <string>

namespace flashattn::metal {

// An autorelease pool for the enclosing block. Every entry into the backend opens one: Python and
// C++ threads have none.
class AutoreleaseScope {
 public:
  AutoreleaseScope() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~AutoreleaseScope() { pool_->release(); }
  AutoreleaseScope(const AutoreleaseScope&) = delete;
  AutoreleaseScope& operator=(const AutoreleaseScope&) = delete;

 private:
  NS::AutoreleasePool* pool_;
};

// Autoreleased.
inline NS::String* to_ns(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

// "" for nil.
inline std::string to_std(const NS::String* text) {
  const char* bytes = text == nullptr ? nullptr : text->utf8String();
  return bytes == nullptr ? std::string() : std::string(bytes);
}

// The driver's own words, with its domain and code.
inline std::string describe(const NS::Error* error) {
  if (error == nullptr) return "no error object";
  return to_std(error->localizedDescription()) + " (" + to_std(error->domain()) + " " +
         std::to_string(error->code()) + ")";
}

}  // namespace flashattn::metal
