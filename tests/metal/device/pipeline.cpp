// Making compute pipelines, and the methods of MTLComputePipelineState and its descriptor.
#include "device/pipeline.h"

#include <Metal/Metal.hpp>

#include "device/binary_archive.h"
#include "device/device.h"
#include "device/faults.h"
#include "objc/autorelease.h"
#include "objc/register.h"
#include "objc/validation.h"

namespace simulated {

PipelineState* make_pipeline(Function* function, Error** error) {
  if (function == nullptr)
    fail_validation("newComputePipelineState: the compute function must not be nil");
  if (refuses_pipeline(function->kernel()->name())) {
    report_error(error, "CompilerError", 1, "Compiler encountered an internal error");
    return nullptr;
  }
  const std::size_t threadgroup_bytes = function->kernel()->static_threadgroup_bytes();
  if (threadgroup_bytes > metal_sim::kMaxThreadgroupBytes) {
    report_error(error, "AGXMetal", 2,
                 "Threadgroup memory size (" + std::to_string(threadgroup_bytes) +
                     ") exceeds the maximum threadgroup memory allowed (" +
                     std::to_string(metal_sim::kMaxThreadgroupBytes) + ")");
    return nullptr;
  }
  return new PipelineState(function);
}

PipelineState* make_pipeline(const PipelineDescriptor* descriptor, unsigned long options,
                             Error** error) {
  if (descriptor == nullptr)
    fail_validation("newComputePipelineState: the descriptor must not be nil");
  if ((options & MTL::PipelineOptionFailOnBinaryArchiveMiss) != 0) {
    bool found = false;
    if (descriptor->archives) {
      for (const Ref<Object>& archive : descriptor->archives->items) {
        found =
            found || dynamic_cast<const BinaryArchive&>(*archive).contains(*descriptor->function);
      }
    }
    if (!found) {
      report_error(error, "MTLBinaryArchiveDomain", 1,
                   "the pipeline is in none of the binary archives");
      return nullptr;
    }
  }
  PipelineState* made = make_pipeline(descriptor->function.get(), error);
  if (made != nullptr) made->label = descriptor->label;
  return made;
}

void register_pipeline() {
  const char* const descriptor = "MTLComputePipelineDescriptor";
  allocatable<PipelineDescriptor>(descriptor);
  instance_method(descriptor, "setLabel:", [](PipelineDescriptor* self, SEL, String* label) {
    self->label = label->text();
  });
  instance_method(descriptor,
                  "setComputeFunction:", [](PipelineDescriptor* self, SEL, Function* function) {
                    self->function = Ref<Function>::retaining(function);
                  });
  instance_method(descriptor,
                  "setBinaryArchives:", [](PipelineDescriptor* self, SEL, Array* archives) {
                    self->archives = Ref<Array>::retaining(archives);
                  });

  const char* const state = "MTLComputePipelineState";
  instance_method(state, "label",
                  [](PipelineState* self, SEL) { return autoreleased(new String(self->label)); });
  instance_method(state, "maxTotalThreadsPerThreadgroup", [](PipelineState* self, SEL) {
    return static_cast<NS::UInteger>(self->kernel().max_total_threads_per_threadgroup());
  });
  instance_method(state, "threadExecutionWidth",
                  [](PipelineState*, SEL) -> NS::UInteger { return metal_sim::kSimdWidth; });
  instance_method(state, "staticThreadgroupMemoryLength", [](PipelineState* self, SEL) {
    return static_cast<NS::UInteger>(self->kernel().static_threadgroup_bytes());
  });
}

}  // namespace simulated
