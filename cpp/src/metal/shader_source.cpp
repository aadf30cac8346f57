// Pasting includes and finding source lines; see shader_source.h.
#include "metal/shader_source.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <set>

namespace flashattn::metal {

namespace {

const EmbeddedFile* find_file(std::string_view name) {
  for (const EmbeddedFile& file : embedded_shaders()) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

// Calls `use(line, number)` for every line, numbered from 1.
template <typename Use>
void for_each_line(std::string_view text, Use&& use) {
  int number = 1;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    use(text.substr(0, end), number++);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// The name in `#include "name"`, "" for any other line.
std::string_view quoted_include(std::string_view line) {
  constexpr std::string_view kInclude = "#include \"";
  if (!line.starts_with(kInclude)) return {};
  line.remove_prefix(kInclude.size());
  return line.substr(0, line.find('"'));
}

std::string line_directive(int line, std::string_view file) {
  return "#line " + std::to_string(line) + " \"" + std::string(file) + "\"\n";
}

void paste(std::string_view name, std::set<std::string, std::less<>>* pasted,
           std::string* program) {
  if (!pasted->insert(std::string(name)).second) return;
  const EmbeddedFile* file = find_file(name);
  assert(file != nullptr);
  *program += line_directive(1, name);
  for_each_line(file->text, [&](std::string_view line, int number) {
    const std::string_view included = quoted_include(line);
    if (!included.empty()) {
      paste(included, pasted, program);
      *program += line_directive(number + 1, name);
    } else if (line != "#pragma once") {
      program->append(line).push_back('\n');
    } else {
      program->push_back('\n');  // keeps the line numbers
    }
  });
}

}  // namespace

std::string shader_program(const std::string& file, const std::string& instantiation) {
  std::string program;
  std::set<std::string, std::less<>> pasted;
  paste(file + ".metal", &pasted, &program);
  return program + line_directive(1, "instantiation") + instantiation + "\n";
}

std::string source_line(std::string_view file_name, int line) {
  const EmbeddedFile* file = find_file(file_name);
  std::string found;
  if (file == nullptr) return found;
  for_each_line(file->text, [&](std::string_view text, int number) {
    if (number == line) found = text;
  });
  return found;
}

std::string quoted_line(const std::string& log) {
  for (const EmbeddedFile& file : embedded_shaders()) {
    const std::string mark = std::string(file.name) + ":";
    for (std::size_t at = log.find(mark); at != std::string::npos; at = log.find(mark, at + 1)) {
      const int line = std::atoi(log.c_str() + at + mark.size());
      const std::string text = source_line(file.name, line);
      if (!text.empty()) return mark + std::to_string(line) + ": " + text;
    }
  }
  return {};
}

}  // namespace flashattn::metal
