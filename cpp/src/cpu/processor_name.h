// What the processor calls itself, for people and logs.
#pragma once

#include <string>

namespace flashattn::cpu {

// "AMD EPYC 9B14", "Apple M2", ...; the architecture where there is no better name.
std::string processor_name();

}  // namespace flashattn::cpu
