// The shader sources that the build embeds in the library, and the one text that Metal compiles:
// Metal's run-time compiler has no include path, so includes of our own headers are pasted in.
// Plain C++20.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flashattn::metal {

struct EmbeddedFile {
  std::string_view name;  // "forward.metal", "tile.h"
  std::string_view text;
};

// Every file of shaders/; defined in a file that cmake/embed_shaders.cmake writes.
const std::vector<EmbeddedFile>& embedded_shaders();

// shaders/<file>.metal with its quoted includes in place, each once, and #line directives, so that
// every message names the file and line a person edits. Then `instantiation` on a line of its own.
std::string shader_program(const std::string& file, const std::string& instantiation);

// What stands at `line` of an embedded file, "" when there is none.
std::string source_line(std::string_view file_name, int line);

// Of a compiler's log: the source line of the first message that names an embedded file, with the
// place before it;
// "" when no message does.
std::string quoted_line(const std::string& log);

}  // namespace flashattn::metal
