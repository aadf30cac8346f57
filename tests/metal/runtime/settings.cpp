// Reads the environment once and keeps the result behind a lock.
#include "settings.h"

#include <cstdlib>
#include <mutex>
#include <stdexcept>

#include "matrix_map.h"

namespace metal_sim {
namespace {

#ifndef METAL_SIM_TRANSLATOR_FOLDER
#error "define METAL_SIM_TRANSLATOR_FOLDER as the path of tests/metal/translate"
#endif

constexpr const char* kNames[] = {"check",   "map",   "schedule", "seed",   "shuffle",
                                  "reports", "cache", "compiler", "python", "translator"};

bool parse_switch(std::string_view name, std::string_view value) {
  if (value == "0") return false;
  if (value == "1") return true;
  throw std::invalid_argument("METAL_SIM setting " + std::string(name) +
                              ": expected 0 or 1, got '" + std::string(value) + "'");
}

Schedule parse_schedule(std::string_view value) {
  if (value == "fifo") return Schedule::kFifo;
  if (value == "lifo") return Schedule::kLifo;
  if (value == "random") return Schedule::kRandom;
  if (value == "priority") return Schedule::kPriority;
  throw std::invalid_argument("METAL_SIM_SCHEDULE: expected fifo, lifo, random or priority, got '" +
                              std::string(value) + "'");
}

void assign(Settings& target, std::string_view name, std::string_view value) {
  if (name == "check") {
    target.check = parse_switch(name, value);
  } else if (name == "map") {
    make_matrix_map(value);  // throws for an unknown name
    target.map = value;
  } else if (name == "schedule") {
    target.schedule = parse_schedule(value);
  } else if (name == "seed") {
    target.seed = std::stoull(std::string(value));
  } else if (name == "shuffle") {
    target.shuffle_threadgroups = parse_switch(name, value);
  } else if (name == "reports") {
    target.reports_file = value;
  } else if (name == "cache") {
    target.cache_folder = value;
  } else if (name == "compiler") {
    target.compiler = value;
  } else if (name == "python") {
    target.python = value;
  } else if (name == "translator") {
    target.translator = value;
  } else {
    throw std::invalid_argument("METAL_SIM: no setting named '" + std::string(name) + "'");
  }
}

std::string default_cache() {
  if (const char* folder = std::getenv("XDG_CACHE_HOME")) return std::string(folder) + "/metal-sim";
  if (const char* home = std::getenv("HOME")) return std::string(home) + "/.cache/metal-sim";
  return {};  // no folder that others could write to: modules are loaded from it
}

Settings from_environment() {
  Settings result;
  result.cache_folder = default_cache();
  result.python = "python3";
  result.translator = METAL_SIM_TRANSLATOR_FOLDER;
  for (const char* name : kNames) {
    std::string variable = "METAL_SIM_";
    for (const char* c = name; *c != '\0'; ++c) variable += static_cast<char>(*c - 'a' + 'A');
    const char* value = std::getenv(variable.c_str());
    if (value != nullptr && *value != '\0') assign(result, name, value);
  }
  return result;
}

struct Store {
  std::mutex mutex;
  Settings value = from_environment();
};

Store& store() {
  static Store instance;
  return instance;
}

}  // namespace

Settings settings() {
  Store& current = store();
  const std::lock_guard<std::mutex> lock(current.mutex);
  return current.value;
}

void set_setting(std::string_view name, std::string_view value) {
  Store& current = store();
  const std::lock_guard<std::mutex> lock(current.mutex);
  assign(current.value, name, value);
}

}  // namespace metal_sim
