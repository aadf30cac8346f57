// The list of built instruction sets and the questions to the processor. A feature counts only if
// the operating system saves its registers.
#include "cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "flashattn/error.h"

#if defined(__x86_64__)
#include "cpu/x86_features.h"
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace flashattn::cpu {

#if defined(FLASHATTN_HAVE_CPU_ISA_v4_bf16)
namespace isa_v4_bf16 {
extern const CpuKernels kKernels;
}
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v4)
namespace isa_v4 {
extern const CpuKernels kKernels;
}
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v3)
namespace isa_v3 {
extern const CpuKernels kKernels;
}
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v2)
namespace isa_v2 {
extern const CpuKernels kKernels;
}
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_neon)
namespace isa_neon {
extern const CpuKernels kKernels;
}
#endif

namespace {

#if defined(__x86_64__)
[[maybe_unused]] bool has_v2() { return X86Features().v2(); }
[[maybe_unused]] bool has_v3() { return X86Features().v3(); }
[[maybe_unused]] bool has_v4() { return X86Features().v4(); }
[[maybe_unused]] bool has_v4_bf16() { return X86Features().v4_bf16(); }
#elif defined(__aarch64__)
[[maybe_unused]] bool has_neon() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0;
#else
  return true;
#endif
}
#endif

struct Isa {
  const char* name;
  const CpuKernels* kernels;
  bool (*supported)();
};

constexpr Isa kIsas[] = {
#if defined(FLASHATTN_HAVE_CPU_ISA_v4_bf16)
    {"x86-64-v4-bf16", &isa_v4_bf16::kKernels, has_v4_bf16},
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v4)
    {"x86-64-v4", &isa_v4::kKernels, has_v4},
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v3)
    {"x86-64-v3", &isa_v3::kKernels, has_v3},
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v2)
    {"x86-64-v2", &isa_v2::kKernels, has_v2},
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_neon)
    {"neon", &isa_neon::kKernels, has_neon},
#endif
};

// Null until the first question.
std::atomic<const Isa*> active{nullptr};

// `source` is what the user set: the variable or the function.
const Isa& find_isa(std::string_view name, const char* source) {
  std::string choices;
  for (const Isa& isa : kIsas) {
    if (!isa.supported()) continue;
    if (name.empty() || name == isa.name) return isa;
    choices += (choices.empty() ? "" : ", ") + std::string(isa.name);
  }
  if (name.empty()) {
    throw Unsupported("cpu: this processor runs none of the built instruction sets");
  }
  throw InvalidArgument(std::string(source) + " (\"" + std::string(name) +
                        "\") must be an instruction set of this build and processor: " + choices);
}

const Isa& active_entry() {
  const Isa* isa = active.load(std::memory_order_acquire);
  if (isa != nullptr) return *isa;
  const char* name = std::getenv("FLASHATTN_CPU_ISA");
  const Isa* chosen = &find_isa(name == nullptr ? "" : name, "flashattn: FLASHATTN_CPU_ISA");
  // Another thread may have set one meanwhile; that one holds.
  return active.compare_exchange_strong(isa, chosen, std::memory_order_acq_rel) ? *chosen : *isa;
}

}  // namespace

std::vector<std::string> built_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) names.emplace_back(isa.name);
  return names;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if (isa.supported()) names.emplace_back(isa.name);
  }
  return names;
}

const CpuKernels& active_kernels() { return *active_entry().kernels; }

std::string active_isa() { return active_entry().name; }

void set_isa(const std::string& name) {
  active.store(&find_isa(name, "set_isa: name"), std::memory_order_release);
}

}  // namespace flashattn::cpu
