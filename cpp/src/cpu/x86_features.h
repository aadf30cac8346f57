// What an x86-64 processor and its operating system offer, read from cpuid and xgetbv. The
// compilers'
// __builtin_cpu_supports would do, but zig's clang answers it with "nothing". A feature counts only
// if the operating system saves its registers.
#pragma once

#include <cpuid.h>

namespace flashattn::cpu {

class X86Features {
 public:
  X86Features() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) != 0) basic_ = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
      extended_ = b;
      if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) more_ = a;
    }
    if (__get_cpuid(0x80000001, &a, &b, &c, &d) != 0) amd_ = c;
    if (bit(basic_, 27)) {  // OSXSAVE: xgetbv exists
      unsigned low = 0, high = 0;
      __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
      saved_ = low;
    }
  }

  // SSE3, SSSE3, SSE4.1, SSE4.2, POPCNT
  bool v2() const {
    return bit(basic_, 0) && bit(basic_, 9) && bit(basic_, 19) && bit(basic_, 20) &&
           bit(basic_, 23);
  }
  // AVX, AVX2, FMA, F16C, MOVBE, BMI1, BMI2, LZCNT; the system saves XMM and YMM
  bool v3() const {
    const bool saved = (saved_ & 0x6U) == 0x6U;
    return v2() && saved && bit(basic_, 28) && bit(basic_, 12) && bit(basic_, 29) &&
           bit(basic_, 22) && bit(extended_, 3) && bit(extended_, 5) && bit(extended_, 8) &&
           bit(amd_, 5);
  }
  // AVX-512 F, DQ, CD, BW, VL; the system saves masks and ZMM
  bool v4() const {
    const bool saved = (saved_ & 0xe0U) == 0xe0U;
    return v3() && saved && bit(extended_, 16) && bit(extended_, 17) && bit(extended_, 28) &&
           bit(extended_, 30) && bit(extended_, 31);
  }
  bool v4_bf16() const { return v4() && bit(more_, 5); }

 private:
  static bool bit(unsigned word, int number) { return (word >> number & 1U) != 0; }

  unsigned basic_ = 0;     // leaf 1, ecx
  unsigned extended_ = 0;  // leaf 7.0, ebx
  unsigned more_ = 0;      // leaf 7.1, eax
  unsigned amd_ = 0;       // leaf 0x80000001, ecx
  unsigned saved_ = 0;     // register states that the system saves, XCR0
};

}  // namespace flashattn::cpu
