// The file is opened per dispatch and written in one call, so that several processes can append to
// it.
#include "report.h"

#include <cstdio>
#include <utility>

namespace metal_sim {

bool ReportSink::wants(const std::string& key) {
  return seen_.size() < kMaxReports && seen_.insert(key).second;
}

std::vector<std::string> ReportSink::take(const std::string& kernel,
                                          const std::string& reports_file) {
  for (std::string& text : texts_) text = kernel + ": " + text;
  if (!reports_file.empty() && !texts_.empty()) {
    std::string lines;
    for (const std::string& text : texts_) lines += text + "\n";
    if (std::FILE* file = std::fopen(reports_file.c_str(), "a")) {
      std::fwrite(lines.data(), 1, lines.size(), file);
      std::fclose(file);
    }
  }
  return std::exchange(texts_, {});
}

}  // namespace metal_sim
