// Collects the defects one dispatch shows, each once, and appends them to METAL_SIM_REPORTS.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

namespace metal_sim {

class ReportSink {
 public:
  // `key` identifies the defect whatever thread shows it; only its first report is kept.
  // Returns whether the key is new and there is room, so that a caller may build the text
  // afterwards.
  bool wants(const std::string& key);
  void add(std::string text) { texts_.push_back(std::move(text)); }
  std::vector<std::string> take(const std::string& kernel, const std::string& reports_file);

 private:
  static constexpr std::size_t kMaxReports = 32;
  std::unordered_set<std::string> seen_;
  std::vector<std::string> texts_;
};

}  // namespace metal_sim
