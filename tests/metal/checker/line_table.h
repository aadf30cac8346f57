// Program counter -> .metal file and line, from the DWARF 4 line table of a kernel module.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace metal_sim {

class LineTable {
 public:
  // Reads nothing yet; a module without defects never pays for its table.
  explicit LineTable(std::string module_path) : path_(std::move(module_path)) {}
  // "forward.metal:123" for an address relative to the module's load address, else "module+0x...".
  std::string describe(std::uint64_t address);

 private:
  struct Row {
    std::uint64_t address = 0;
    std::uint32_t file = 0;  // into files_; kEndOfSequence after the last instruction of a function
    std::uint32_t line = 0;
  };
  static constexpr std::uint32_t kEndOfSequence = 0xffffffffu;

  void load();
  void parse(const std::vector<std::uint8_t>& section);
  friend class LineProgram;

  std::string path_;
  bool loaded_ = false;
  std::vector<std::string> files_;
  std::vector<Row> rows_;  // sorted by address
};

}  // namespace metal_sim
