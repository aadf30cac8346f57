// NSProcessInfo: the operating system's version, which keys the host's cache of compiled pipelines.
// FLASHATTN_SIMULATED_OS overrides the text, so that a test can pretend that the system was
// updated.
#include <Foundation/Foundation.hpp>
#include <cstdlib>

#include "objc/autorelease.h"
#include "objc/register.h"
#include "objc/string.h"

namespace simulated {

namespace {

class ProcessInfo : public Object {
 public:
  ProcessInfo() : Object("NSProcessInfo") {}
};

std::string version_text() {
  const char* given = std::getenv("FLASHATTN_SIMULATED_OS");
  return given == nullptr ? "Version 14.0 (simulated)" : given;
}

// The 14 of "Version 14.0 ...".
NS::Integer major_version() {
  const std::string text = version_text();
  return std::atol(text.c_str() + text.find(' ') + 1);
}

}  // namespace

void register_process_info() {
  class_method("NSProcessInfo", "processInfo",
               [](Object*, SEL) -> Object* { return autoreleased(new ProcessInfo); });
  instance_method("NSProcessInfo", "operatingSystemVersionString",
                  [](Object*, SEL) { return autoreleased(new String(version_text())); });
  instance_method("NSProcessInfo", "operatingSystemVersion",
                  [](Object*, SEL) -> NS::OperatingSystemVersion {
                    return {.majorVersion = major_version(), .minorVersion = 0, .patchVersion = 0};
                  });
}

}  // namespace simulated
