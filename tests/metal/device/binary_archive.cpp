// Reading, writing and the methods of MTLBinaryArchive. The file is text: a first line that names
// the format, one line per pipeline, and a last line with a hash of what stands above it.
#include "device/binary_archive.h"

#include <Metal/Metal.hpp>
#include <fstream>
#include <functional>
#include <sstream>

#include "device/pipeline.h"
#include "objc/register.h"
#include "objc/validation.h"

namespace simulated {

namespace {

constexpr const char* kErrorDomain = "MTLBinaryArchiveDomain";
constexpr const char* kFirstLine = "simulated binary archive 1\n";

std::string hash_line(const std::string& text) {
  return "hash " + std::to_string(std::hash<std::string>()(text)) + '\n';
}

std::string serialized(const BinaryArchive& archive) {
  std::string text = kFirstLine;
  for (const std::string& identity : archive.identities) text += identity + '\n';
  return text + hash_line(text);
}

bool parse(const std::string& text, BinaryArchive* archive) {
  if (!text.starts_with(kFirstLine)) return false;
  const std::size_t last = text.rfind("hash ");
  if (last == std::string::npos || text.substr(last) != hash_line(text.substr(0, last)))
    return false;
  std::istringstream lines(text.substr(0, last).substr(std::string(kFirstLine).size()));
  for (std::string line; std::getline(lines, line);) archive->identities.insert(line);
  return true;
}

bool serialize_to(const BinaryArchive& archive, const Url* url, Error** error) {
  if (url == nullptr) fail_validation("serializeToURL: the URL must not be nil");
  std::ofstream file(url->path(), std::ios::binary | std::ios::trunc);
  file << serialized(archive);
  file.close();
  if (file) return true;
  report_error(error, kErrorDomain, MTL::BinaryArchiveErrorInvalidFile,
               "cannot write " + url->path());
  return false;
}

}  // namespace

BinaryArchive* open_binary_archive(const BinaryArchiveDescriptor* descriptor, Error** error) {
  auto* archive = new BinaryArchive;
  if (descriptor == nullptr || !descriptor->url) return archive;
  const std::string& path = descriptor->url->path();
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (file && parse(text.str(), archive)) return archive;
  archive->release();
  report_error(error, kErrorDomain, MTL::BinaryArchiveErrorInvalidFile,
               "invalid or missing file " + path);
  return nullptr;
}

void register_binary_archive() {
  allocatable<BinaryArchiveDescriptor>("MTLBinaryArchiveDescriptor");
  instance_method("MTLBinaryArchiveDescriptor",
                  "setUrl:", [](BinaryArchiveDescriptor* self, SEL, Url* url) {
                    self->url = Ref<Url>::retaining(url);
                  });
  const char* const name = "MTLBinaryArchive";
  instance_method(name, "setLabel:", [](BinaryArchive*, SEL, String*) {});
  instance_method(
      name, "addComputePipelineFunctionsWithDescriptor:error:",
      [](BinaryArchive* self, SEL, PipelineDescriptor* descriptor, Error**) {
        if (descriptor == nullptr || !descriptor->function) {
          fail_validation("addComputePipelineFunctions: the descriptor has no function");
        }
        self->identities.insert(descriptor->function->identity());
        return true;
      });
  instance_method(name,
                  "serializeToURL:error:", [](BinaryArchive* self, SEL, Url* url, Error** error) {
                    return serialize_to(*self, url, error);
                  });
}

}  // namespace simulated
