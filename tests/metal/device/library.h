// MTLLibrary, MTLFunction, MTLFunctionConstantValues and MTLCompileOptions, over the shader
// runtime's seam.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "objc/object.h"
#include "runtime/device_api.h"

namespace simulated {

class CompileOptions : public Object {
 public:
  CompileOptions() : Object("MTLCompileOptions") {}
  std::vector<std::pair<std::string, std::string>> macros;
};

class Library : public Object {
 public:
  Library(std::shared_ptr<const metal_sim::Library> program, std::string source_hash)
      : Object("MTLLibrary"), program_(std::move(program)), source_hash_(std::move(source_hash)) {}
  const metal_sim::Library& program() const { return *program_; }
  const std::string& source_hash() const { return source_hash_; }

 private:
  std::shared_ptr<const metal_sim::Library> program_;
  std::string source_hash_;
};

class FunctionConstantValues : public Object {
 public:
  FunctionConstantValues() : Object("MTLFunctionConstantValues") {}
  std::map<std::uint32_t, metal_sim::ConstantValue> values;  // by index
};

class Function : public Object {
 public:
  Function(std::shared_ptr<const metal_sim::Kernel> kernel, std::string identity)
      : Object("MTLFunction"), kernel_(std::move(kernel)), identity_(std::move(identity)) {}
  const std::shared_ptr<const metal_sim::Kernel>& kernel() const { return kernel_; }
  // Source, name and constants in one line: what a binary archive stores.
  const std::string& identity() const { return identity_; }

 private:
  std::shared_ptr<const metal_sim::Kernel> kernel_;
  std::string identity_;
};

}  // namespace simulated
