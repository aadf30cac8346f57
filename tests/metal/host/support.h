// What the tests of the Metal host share: a count of live objects, a child process that has to
// abort, a folder that goes away, and the small kernel that most of them run.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <Metal/Metal.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "metal/objects.h"
#include "objc/live_objects.h"

namespace flashattn::testing {

// Fails the test when objects of the simulated runtime outlive the enclosing block. A queue's
// thread lets go of a command buffer a moment after the wait for it ends, so the count gets two
// seconds to settle.
class LiveObjectCheck {
 public:
  LiveObjectCheck() {
    // What an earlier test left to a queue's thread goes first.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    before_ = flashattn_simulated_live_objects();
  }
  ~LiveObjectCheck() {
    for (int i = 0; i < 200 && flashattn_simulated_live_objects() != before_; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    BOOST_TEST(flashattn_simulated_live_objects() == before_);
  }
  LiveObjectCheck(const LiveObjectCheck&) = delete;
  LiveObjectCheck& operator=(const LiveObjectCheck&) = delete;

 private:
  long before_ = 0;
};

// Runs `body` in a child process and returns what it wrote to stderr; the child has to abort.
inline std::string text_of_abort(const std::function<void()>& body) {
  int ends[2];
  BOOST_REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);
    dup2(ends[1], STDERR_FILENO);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char part[512];
  for (ssize_t got = 0; (got = read(ends[0], part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(got));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const bool aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  BOOST_TEST(aborted, "the child must abort; it wrote: " << text);
  return text;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Sets an environment variable for the enclosing block.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  ~ScopedVariable() { unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
};

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "flashattn-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// y[i] = a * x[i ^ 1] + shift, through threadgroup memory; `shift` is a function constant.
inline constexpr const char* kAxpy = R"(
#include <metal_stdlib>
using namespace metal;
constant float shift [[function_constant(3)]];
[[kernel]] void axpy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                     constant float& a [[buffer(2)]], threadgroup float* scratch [[threadgroup(0)]],
                     uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  scratch[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a * scratch[t ^ 1] + shift;
}
)";

// The compiled pipeline of kAxpy with shift = 2.
struct Axpy {
  explicit Axpy(MTL::Device* device) {
    NS::Error* error = nullptr;
    const auto library = NS::TransferPtr(device->newLibrary(metal::to_ns(kAxpy), nullptr, &error));
    BOOST_REQUIRE_MESSAGE(library, metal::describe(error));
    const auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
    const float shift = 2.0F;
    constants->setConstantValue(&shift, MTL::DataTypeFloat, NS::UInteger{3});
    const auto function =
        NS::TransferPtr(library->newFunction(metal::to_ns("axpy"), constants.get(), &error));
    BOOST_REQUIRE_MESSAGE(function, metal::describe(error));
    pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
    BOOST_REQUIRE_MESSAGE(pipeline, metal::describe(error));
  }
  NS::SharedPtr<MTL::ComputePipelineState> pipeline;
};

}  // namespace flashattn::testing
