// NSURL for files: a path.
#pragma once

#include <string>
#include <utility>

#include "objc/object.h"

namespace simulated {

class Url : public Object {
 public:
  explicit Url(std::string path = {}) : Object("NSURL"), path_(std::move(path)) {}
  const std::string& path() const { return path_; }
  void assign(std::string path) { path_ = std::move(path); }

 private:
  std::string path_;
};

}  // namespace simulated
