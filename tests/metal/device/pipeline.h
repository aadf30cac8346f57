// MTLComputePipelineState and its descriptor.
#pragma once

#include <memory>
#include <string>

#include "device/library.h"
#include "objc/collections.h"
#include "objc/string.h"

namespace simulated {

class PipelineDescriptor : public Object {
 public:
  PipelineDescriptor() : Object("MTLComputePipelineDescriptor") {}
  Ref<Function> function;
  std::string label;
  Ref<Array> archives;  // of BinaryArchive
};

class PipelineState : public Object {
 public:
  explicit PipelineState(Function* function)
      : Object("MTLComputePipelineState"), function_(Ref<Function>::retaining(function)) {}
  std::string label;
  const metal_sim::Kernel& kernel() const { return *function_->kernel(); }

 private:
  Ref<Function> function_;
};

}  // namespace simulated
