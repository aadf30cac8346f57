// What the files of the simulated device ask of each other: the makers of libraries and pipelines.
#pragma once

#include "device/library.h"
#include "objc/error.h"
#include "objc/string.h"

namespace simulated {

class CommandQueue;
class PipelineDescriptor;
class PipelineState;

// The system's one device, never freed.
Object* the_device();

// Each returns an owned object, or null with *error set.
Library* compile_library(const String* source, const CompileOptions* options, Error** error);
PipelineState* make_pipeline(Function* function, Error** error);
PipelineState* make_pipeline(const PipelineDescriptor* descriptor, unsigned long options,
                             Error** error);
CommandQueue* make_command_queue();

}  // namespace simulated
