// x86 answers by CPUID, Apple by sysctl; an aarch64 Linux kernel has no name to give.
#include "cpu/processor_name.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace flashattn::cpu {
namespace {

std::string trimmed(const char* text) {
  std::string name(text);
  name.erase(0, name.find_first_not_of(' '));
  name.erase(name.find_last_not_of(' ') + 1);
  return name;
}

}  // namespace

std::string processor_name() {
#if defined(__x86_64__)
  constexpr unsigned kFirstLeaf = 0x80000002;  // of three with 16 characters each
  unsigned a = 0, b = 0, c = 0, d = 0;
  std::array<char, 49> text{};
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    if (__get_cpuid(kFirstLeaf + leaf, &a, &b, &c, &d) == 0) return "x86-64";
    const unsigned registers[4] = {a, b, c, d};
    std::memcpy(text.data() + 16 * leaf, registers, sizeof(registers));
  }
  const std::string name = trimmed(text.data());
  return name.empty() ? "x86-64" : name;
#elif defined(__APPLE__)
  std::array<char, 128> text{};
  std::size_t bytes = text.size() - 1;
  if (sysctlbyname("machdep.cpu.brand_string", text.data(), &bytes, nullptr, 0) == 0) {
    return trimmed(text.data());
  }
  return "arm64";
#else
  return "aarch64";
#endif
}

}  // namespace flashattn::cpu
