// Times the peak loops.
#include "cpu/measure_peak.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {
namespace {

constexpr int kRuns = 9;
// A run of about 5 ms: long against the clock's resolution, short enough that some run is not
// interrupted.
constexpr std::int64_t kRounds = 200000;
constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;

// Seconds of processor time of the calling thread: other processes on the core do not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double wall_seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Written, never read: results that are used cannot be optimised away.
volatile float sink;

double flops_per_second(float (*loop)(std::int64_t), std::int64_t flops) {
  double best = 0.0;
  for (int run = 0; run < kRuns; ++run) {
    const double start = cpu_seconds();
    sink = loop(kRounds);
    best = std::max(best, static_cast<double>(flops * kRounds) / (cpu_seconds() - start));
  }
  return best;
}

}  // namespace

double measure_multiply_add_peak() {
  const PeakKernels& peak = active_kernels().peak;
  return flops_per_second(peak.multiply_add, peak.multiply_add_flops);
}

double measure_bf16_dot_peak() {
  const PeakKernels& peak = active_kernels().peak;
  return peak.bf16_dot == nullptr ? 0.0 : flops_per_second(peak.bf16_dot, peak.bf16_dot_flops);
}

ReadBandwidth measure_read_bandwidth(std::size_t bytes) {
  const PeakKernels& peak = active_kernels().peak;
  const std::int64_t pieces =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes) / kPieceBytes);
  const auto total = static_cast<double>(pieces * kPieceBytes);
  const Workspace buffer(static_cast<std::size_t>(pieces * kPieceBytes));
  // Untouched pages would all be the one zero page.
  std::memset(buffer.data(), 1, buffer.bytes());
  const auto read_piece = [&](std::int64_t piece) {
    const float sum = peak.read(buffer.data() + piece * kPieceBytes, kPieceBytes);
    if (sum == -1.0F) sink = sum;  // never: the pieces hold tiny positive numbers
  };
  ReadBandwidth best;
  for (int run = 0; run < kRuns; ++run) {
    const double start = wall_seconds();
    ThreadPool::global().parallel_for(pieces, read_piece);
    best.per_second = std::max(best.per_second, total / (wall_seconds() - start));
    const double cpu_start = cpu_seconds();
    for (std::int64_t piece = 0; piece < pieces; ++piece) read_piece(piece);
    best.per_cpu_second = std::max(best.per_cpu_second, total / (cpu_seconds() - cpu_start));
  }
  return best;
}

}  // namespace flashattn::cpu
