// A reader of .debug_line as clang writes it with -gdwarf-4: DWARF 4 standard, section 6.2. Only
// what it needs: one file name per entry (directories are dropped: reports show base names), rows,
// ends of sequences.
#include "line_table.h"

#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

namespace metal_sim {
namespace {

// Bounds-checked reading; past the end everything is zero.
class Reader {
 public:
  Reader(const std::uint8_t* begin, const std::uint8_t* end) : p_(begin), end_(end) {}
  bool at_end() const { return p_ >= end_; }
  const std::uint8_t* position() const { return p_; }
  void skip(std::uint64_t bytes) {
    p_ = bytes > static_cast<std::uint64_t>(end_ - p_) ? end_ : p_ + bytes;
  }
  template <class T>
  T fixed() {
    T value = 0;
    if (static_cast<std::size_t>(end_ - p_) >= sizeof(T)) std::memcpy(&value, p_, sizeof(T));
    skip(sizeof(T));
    return value;
  }
  std::uint64_t unsigned_leb() {
    std::uint64_t value = 0;
    for (int shift = 0; !at_end(); shift += 7) {
      const std::uint8_t byte = *p_++;
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) break;
    }
    return value;
  }
  std::int64_t signed_leb() {
    std::uint64_t value = 0;
    int shift = 0;
    std::uint8_t byte = 0;
    while (!at_end()) {
      byte = *p_++;
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      shift += 7;
      if ((byte & 0x80) == 0) break;
    }
    if (shift < 64 && (byte & 0x40) != 0) value |= ~std::uint64_t{0} << shift;
    return static_cast<std::int64_t>(value);
  }
  std::string text() {
    std::string result;
    while (!at_end() && *p_ != 0) result += static_cast<char>(*p_++);
    skip(1);
    return result;
  }

 private:
  const std::uint8_t* p_;
  const std::uint8_t* end_;
};

std::string base_name(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

std::vector<std::uint8_t> debug_line_section(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<std::uint8_t> image{std::istreambuf_iterator<char>(file), {}};
  Elf64_Ehdr header;
  if (image.size() < sizeof header) return {};
  std::memcpy(&header, image.data(), sizeof header);
  const auto section = [&](std::size_t i) {
    Elf64_Shdr result{};
    const std::size_t offset = header.e_shoff + i * sizeof result;
    if (offset + sizeof result <= image.size())
      std::memcpy(&result, image.data() + offset, sizeof result);
    return result;
  };
  const Elf64_Shdr names = section(header.e_shstrndx);
  for (std::size_t i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr s = section(i);
    const std::size_t name = names.sh_offset + s.sh_name;
    constexpr char kWanted[] = ".debug_line";
    if (name + sizeof kWanted > image.size() || s.sh_offset + s.sh_size > image.size()) continue;
    if (std::memcmp(image.data() + name, kWanted, sizeof kWanted) != 0) continue;
    const auto begin = image.begin() + static_cast<std::ptrdiff_t>(s.sh_offset);
    return {begin, begin + static_cast<std::ptrdiff_t>(s.sh_size)};
  }
  return {};
}

}  // namespace

// One unit of the section: a header, then a program for a little machine that emits rows.
class LineProgram {
 public:
  LineProgram(LineTable& table, Reader reader) : table_(table), reader_(reader) {}

  void run() {
    const std::uint16_t version = reader_.fixed<std::uint16_t>();
    if (version < 2 || version > 4) return;
    const std::uint32_t header_bytes = reader_.fixed<std::uint32_t>();
    Reader program = reader_;
    program.skip(header_bytes);
    minimum_length_ = reader_.fixed<std::uint8_t>();
    if (version >= 4) reader_.skip(1);  // operations per instruction: 1 on both processors
    reader_.skip(1);                    // default_is_stmt
    line_base_ = reader_.fixed<std::int8_t>();
    line_range_ = reader_.fixed<std::uint8_t>();
    opcode_base_ = reader_.fixed<std::uint8_t>();
    for (int i = 1; i < opcode_base_; ++i) operand_counts_.push_back(reader_.fixed<std::uint8_t>());
    while (!reader_.text().empty()) {  // include directories
    }
    files_.push_back(0);  // files are numbered from 1
    for (std::string name = reader_.text(); !name.empty(); name = reader_.text()) add_file(name);
    reader_ = program;
    reset();
    while (!reader_.at_end()) step();
  }

 private:
  void add_file(const std::string& name) {
    for (int i = 0; i < 3; ++i) reader_.unsigned_leb();  // directory, time, length
    files_.push_back(static_cast<std::uint32_t>(table_.files_.size()));
    table_.files_.push_back(base_name(name));
  }
  void reset() {
    address_ = 0;
    file_ = 1;
    line_ = 1;
    first_row_ = table_.rows_.size();
  }
  void emit() {
    const std::uint32_t file = file_ < files_.size() ? files_[file_] : 0;
    table_.rows_.push_back({address_, file, static_cast<std::uint32_t>(line_)});
  }
  void advance(std::uint64_t steps) { address_ += steps * minimum_length_; }

  void end_sequence() {
    table_.rows_.push_back({address_, LineTable::kEndOfSequence, 0});
    // Code the linker dropped keeps a sequence that starts at address 0.
    if (table_.rows_[first_row_].address == 0) table_.rows_.resize(first_row_);
    reset();
  }

  void extended() {
    const std::uint64_t bytes = reader_.unsigned_leb();
    Reader operand = reader_;
    reader_.skip(bytes);
    const std::uint8_t code = operand.fixed<std::uint8_t>();
    if (code == 1) end_sequence();
    if (code == 2) address_ = operand.fixed<std::uint64_t>();
    if (code == 3) {  // define_file
      const std::string name = operand.text();
      files_.push_back(static_cast<std::uint32_t>(table_.files_.size()));
      table_.files_.push_back(base_name(name));
    }
  }

  void step() {
    const std::uint8_t opcode = reader_.fixed<std::uint8_t>();
    if (opcode >= opcode_base_) {
      const int adjusted = opcode - opcode_base_;
      advance(static_cast<std::uint64_t>(adjusted / line_range_));
      line_ += line_base_ + adjusted % line_range_;
      emit();
      return;
    }
    switch (opcode) {
      case 0:
        extended();
        break;
      case 1:
        emit();
        break;
      case 2:
        advance(reader_.unsigned_leb());
        break;
      case 3:
        line_ += reader_.signed_leb();
        break;
      case 4:
        file_ = reader_.unsigned_leb();
        break;
      case 8:
        advance(static_cast<std::uint64_t>((255 - opcode_base_) / line_range_));
        break;
      case 9:
        address_ += reader_.fixed<std::uint16_t>();
        break;
      default:  // column, block and statement flags, ISA
        for (int i = 0; i < operand_counts_[opcode - 1u]; ++i) reader_.unsigned_leb();
    }
  }

  LineTable& table_;
  Reader reader_;
  std::uint8_t minimum_length_ = 1;
  std::int8_t line_base_ = 0;
  std::uint8_t line_range_ = 1;
  std::uint8_t opcode_base_ = 1;
  std::vector<std::uint8_t> operand_counts_;
  std::vector<std::uint32_t> files_;  // file register -> LineTable::files_
  std::uint64_t address_ = 0;
  std::uint64_t file_ = 1;
  std::int64_t line_ = 1;
  std::size_t first_row_ = 0;
};

void LineTable::parse(const std::vector<std::uint8_t>& section) {
  Reader reader(section.data(), section.data() + section.size());
  while (!reader.at_end()) {
    const std::uint32_t bytes = reader.fixed<std::uint32_t>();
    Reader unit = reader;
    unit.skip(bytes);
    LineProgram(*this, Reader(reader.position(), unit.position())).run();
    reader = unit;
  }
}

void LineTable::load() {
  loaded_ = true;
  parse(debug_line_section(path_));
  std::stable_sort(rows_.begin(), rows_.end(),
                   [](const Row& a, const Row& b) { return a.address < b.address; });
}

std::string LineTable::describe(std::uint64_t address) {
  if (!loaded_) load();
  const auto after =
      std::upper_bound(rows_.begin(), rows_.end(), address,
                       [](std::uint64_t a, const Row& row) { return a < row.address; });
  if (after != rows_.begin()) {
    // Line 0 marks code without a statement of its own: the statement before it is meant.
    for (auto row = after - 1; row->file != kEndOfSequence; --row) {
      if (row->line > 0) return files_[row->file] + ":" + std::to_string(row->line);
      if (row == rows_.begin()) break;
    }
  }
  char text[64];
  std::snprintf(text, sizeof text, "+0x%llx", static_cast<unsigned long long>(address));
  return base_name(path_) + text;
}

}  // namespace metal_sim
