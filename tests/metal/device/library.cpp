// The methods of MTLLibrary, MTLFunction, MTLFunctionConstantValues and MTLCompileOptions.
#include "device/library.h"

#include <Metal/Metal.hpp>
#include <cstdio>
#include <cstring>
#include <functional>

#include "device/device.h"
#include "objc/autorelease.h"
#include "objc/collections.h"
#include "objc/error.h"
#include "objc/register.h"
#include "objc/validation.h"

namespace simulated {

namespace {

constexpr const char* kErrorDomain = "MTLLibraryErrorDomain";

std::size_t size_of_constant(MTL::DataType type) {
  switch (type) {
    case MTL::DataTypeBool:
    case MTL::DataTypeChar:
    case MTL::DataTypeUChar:
      return 1;
    case MTL::DataTypeShort:
    case MTL::DataTypeUShort:
    case MTL::DataTypeHalf:
      return 2;
    case MTL::DataTypeInt:
    case MTL::DataTypeUInt:
    case MTL::DataTypeFloat:
      return 4;
    default:
      fail_validation("setConstantValue: data type %ld is not simulated", static_cast<long>(type));
  }
}

void set_constant(FunctionConstantValues* self, const void* value, MTL::DataType type,
                  NS::UInteger index) {
  metal_sim::ConstantValue constant{.index = static_cast<std::uint32_t>(index)};
  std::memcpy(constant.bytes.data(), value, size_of_constant(type));
  self->values[constant.index] = constant;
}

Function* make_function(const Library* library, const String* name,
                        const FunctionConstantValues* constants, Error** error) {
  if (name == nullptr) fail_validation("newFunctionWithName: the name must not be nil");
  std::vector<metal_sim::ConstantValue> values;
  std::string identity = library->source_hash() + ' ' + name->text();
  if (constants != nullptr) {
    for (const auto& [index, constant] : constants->values) {
      values.push_back(constant);
      identity += ' ' + std::to_string(index) + '=';
      for (const std::uint8_t byte : constant.bytes) identity += std::to_string(byte) + '.';
    }
  }
  try {
    return new Function(library->program().kernel(name->text(), values), identity);
  } catch (const metal_sim::RequestError& failure) {
    report_error(error, kErrorDomain, MTL::LibraryErrorFunctionNotFound, failure.what());
    return nullptr;
  }
}

}  // namespace

Library* compile_library(const String* source, const CompileOptions* options, Error** error) {
  if (source == nullptr) fail_validation("newLibraryWithSource: the source must not be nil");
  metal_sim::CompileOptions settings;
  std::string identity = source->text();
  if (options != nullptr) {
    settings.macros = options->macros;
    for (const auto& [name, value] : options->macros) identity += '\n' + name + '=' + value;
  }
  char hash[32];
  std::snprintf(hash, sizeof hash, "%016zx", std::hash<std::string>()(identity));
  try {
    return new Library(metal_sim::Library::compile(source->text(), settings), hash);
  } catch (const metal_sim::CompileError& failure) {
    report_error(error, kErrorDomain, MTL::LibraryErrorCompileFailure, failure.what());
    return nullptr;
  }
}

namespace {

void register_compile_options() {
  const char* const name = "MTLCompileOptions";
  allocatable<CompileOptions>(name);
  instance_method(name, "setFastMathEnabled:", [](CompileOptions*, SEL, bool) {});
  instance_method(name, "setMathMode:", [](CompileOptions*, SEL, MTL::MathMode) {});
  instance_method(name, "setLanguageVersion:", [](CompileOptions*, SEL, MTL::LanguageVersion) {});
  instance_method(
      name, "setPreprocessorMacros:", [](CompileOptions* self, SEL, Dictionary* macros) {
        self->macros.clear();
        for (const auto& [key, value] : macros->items) {
          const auto* number = dynamic_cast<const Number*>(value.get());
          self->macros.emplace_back(text_of(dynamic_cast<const String*>(key.get())),
                                    number != nullptr
                                        ? std::to_string(number->value())
                                        : text_of(dynamic_cast<const String*>(value.get())));
        }
      });
}

}  // namespace

void register_library() {
  register_compile_options();
  allocatable<FunctionConstantValues>("MTLFunctionConstantValues");
  instance_method("MTLFunctionConstantValues", "setConstantValue:type:atIndex:",
                  [](FunctionConstantValues* self, SEL, const void* value, MTL::DataType type,
                     NS::UInteger index) { set_constant(self, value, type, index); });

  instance_method("MTLLibrary", "setLabel:", [](Library*, SEL, String*) {});
  instance_method("MTLLibrary", "newFunctionWithName:", [](Library* self, SEL, String* name) {
    return make_function(self, name, nullptr, nullptr);
  });
  instance_method("MTLLibrary", "newFunctionWithName:constantValues:error:",
                  [](Library* self, SEL, String* name, FunctionConstantValues* constants,
                     Error** error) { return make_function(self, name, constants, error); });
  instance_method("MTLLibrary", "functionNames", [](Library* self, SEL) {
    auto* names = new Array;
    for (const std::string& name : self->program().function_names()) {
      names->items.push_back(Ref<Object>::adopting(new String(name)));
    }
    return autoreleased(names);
  });
  instance_method("MTLFunction", "name", [](Function* self, SEL) {
    return autoreleased(new String(self->kernel()->name()));
  });
  instance_method("MTLFunction", "setLabel:", [](Function*, SEL, String*) {});
}

}  // namespace simulated
