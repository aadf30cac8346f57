// MTLBinaryArchive: a file that remembers which pipelines were added to it. It holds no machine
// code: the shader runtime has a cache of its own. What it shows is how the host treats missing,
// damaged and foreign files.
#pragma once

#include <set>
#include <string>

#include "device/library.h"
#include "objc/error.h"
#include "objc/url.h"

namespace simulated {

class BinaryArchiveDescriptor : public Object {
 public:
  BinaryArchiveDescriptor() : Object("MTLBinaryArchiveDescriptor") {}
  Ref<Url> url;  // of the file to open; null for a new archive
};

class BinaryArchive : public Object {
 public:
  BinaryArchive() : Object("MTLBinaryArchive") {}
  bool contains(const Function& function) const { return identities.contains(function.identity()); }
  std::set<std::string> identities;
};

// An owned archive, or null with *error set when the file is missing or damaged.
BinaryArchive* open_binary_archive(const BinaryArchiveDescriptor* descriptor, Error** error);

}  // namespace simulated
