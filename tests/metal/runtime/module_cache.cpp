// The key is a hash of everything that decides the result: program, options, and the text of the
// translator, the MSL headers and the hooks. A finished module is renamed into place, so a reader
// never sees half of one.
#include "module_cache.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern char** environ;

namespace metal_sim {
namespace {

namespace fs = std::filesystem;

// FNV-1a, twice with different starts: 128 bits.
class Hash {
 public:
  void add(std::string_view text) {
    mix(text);
    mix(std::string_view("\0", 1));  // "ab" + "c" is not "a" + "bc"
  }
  std::string hex() const {
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(a_),
                  static_cast<unsigned long long>(b_));
    return text;
  }

 private:
  void mix(std::string_view text) {
    for (const char c : text) {
      a_ = (a_ ^ static_cast<unsigned char>(c)) * 1099511628211u;
      b_ = (b_ ^ static_cast<unsigned char>(c)) * 1099511628211u;
    }
  }
  std::uint64_t a_ = 14695981039346656037u;
  std::uint64_t b_ = 0x9E3779B97F4A7C15u;
};

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void add_folder(Hash& hash, const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(folder, error)) {
    const std::string extension = entry.path().extension().string();
    if (extension == ".py" || extension == ".h" || extension == ".cpp" || extension == ".metal")
      files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) hash.add(read_file(file));
}

std::string module_key(std::string_view source, const CompileOptions& options,
                       const Settings& settings) {
  Hash hash;
  hash.add(source);
  hash.add(options.file_name);
  hash.add(settings.check ? "checked" : "plain");
  hash.add(settings.compiler);
  for (const std::string& folder : options.include_directories) {
    hash.add(folder);
    add_folder(hash, folder);
  }
  for (const auto& [name, value] : options.macros) {
    hash.add(name);
    hash.add(value);
  }
  const fs::path translator = settings.translator;
  add_folder(hash, translator);
  add_folder(hash, translator.parent_path() / "runtime" / "msl");
  hash.add(read_file(translator.parent_path() / "runtime" / "kernel_abi.h"));
  hash.add(read_file(translator.parent_path() / "checker" / "hooks.cpp"));
  return hash.hex();
}

// Holds an exclusive lock on a file for its lifetime.
class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : descriptor_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (descriptor_ < 0) throw CompileError("cannot write " + path + ": " + std::strerror(errno));
    while (flock(descriptor_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~FileLock() { close(descriptor_); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_;
};

// Runs a command with stdout and stderr in `log`; returns whether it succeeded.
bool run_command(const std::vector<std::string>& command, const std::string& log) {
  std::vector<char*> arguments;
  for (const std::string& argument : command)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_adddup2(&actions, 2, 1);
  pid_t child = 0;
  const int error =
      posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw CompileError("cannot start " + command[0] + ": " + std::strerror(error));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void build(std::string_view source, const CompileOptions& options, const Settings& settings,
           const std::string& stem) {
  const std::string text_path = stem + ".metal";
  std::ofstream(text_path, std::ios::binary) << source;
  std::vector<std::string> command{settings.python, settings.translator + "/build_kernel.py",
                                   "--source",      text_path,
                                   "--output",      stem + ".tmp.so",
                                   "--file-name",   options.file_name,
                                   "--clang",       settings.compiler};
  if (settings.check) command.push_back("--check");
  for (const std::string& folder : options.include_directories) {
    command.push_back("--include");
    command.push_back(folder);
  }
  for (const auto& [name, value] : options.macros) {
    command.push_back("--macro");
    command.push_back(value.empty() ? name : name + "=" + value);
  }
  const std::string log = stem + ".log";
  if (!run_command(command, log)) {
    const std::string text = read_file(log);
    throw CompileError(text.empty() ? "the translator failed without a message" : text);
  }
  fs::rename(stem + ".tmp.so", stem + ".so");
  fs::remove(text_path);
  fs::remove(log);
}

}  // namespace

std::string compiled_module(std::string_view source, const CompileOptions& options,
                            const Settings& settings) {
  if (settings.cache_folder.empty()) {
    throw CompileError("no folder for compiled kernels: set METAL_SIM_CACHE or HOME");
  }
  const std::string stem = settings.cache_folder + "/" + module_key(source, options, settings);
  const std::string path = stem + ".so";
  if (fs::exists(path)) return path;
  std::error_code error;
  fs::create_directories(settings.cache_folder, error);
  const FileLock lock(stem + ".lock");
  if (!fs::exists(path)) build(source, options, settings, stem);
  return path;
}

}  // namespace metal_sim
