// NSError: a domain, a code and a description.
#pragma once

#include <string>

#include "objc/string.h"

namespace simulated {

class Error : public Object {
 public:
  Error(const std::string& domain, long code, const std::string& description);

  String* domain() const { return domain_.get(); }
  long code() const { return code_; }
  String* description() const { return description_.get(); }

 private:
  Ref<String> domain_;
  long code_;
  Ref<String> description_;
};

// Fills an `NSError**` argument with an autoreleased error; a null argument means nobody asks.
void report_error(Error** destination, const std::string& domain, long code,
                  const std::string& description);

}  // namespace simulated
