#include "chapters/09-qwen/handover.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/engine.hpp"

namespace ladder::qwen {
namespace {

namespace fs = std::filesystem;

/// Set for the program that takes over, which must not hand back.
constexpr const char* kMark = "LADDER_QWEN_HANDED_OVER";

/// Whether a driver of an NVIDIA GPU is loaded: on a PC, under WSL, on a Jetson.
bool driver_present() {
  std::error_code ignored;
  for (const char* node : {"/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu"}) {
    if (fs::exists(node, ignored)) return true;
  }
  return false;
}

/// The program `name` in the folder of this one; empty if there is none.
fs::path sibling(const char* name) {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) return {};
  fs::path other = self.parent_path() / name;
  if (!fs::is_regular_file(other, error) || ::access(other.c_str(), X_OK) != 0) return {};
  return other;
}

/// The arguments of this process, as the system keeps them.
std::vector<std::string> arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < all.size();) {
    const std::size_t end = std::min(all.find('\0', i), all.size());
    parts.push_back(all.substr(i, end - i));
    i = end + 1;
  }
  return parts;
}

[[noreturn]] void hand_over(const fs::path& program) {
  std::vector<std::string> words = arguments();
  if (words.empty())
    throw std::runtime_error("cannot start " + program.string() + ": the arguments are not known");
  words[0] = program.string();
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::setenv(kMark, "1", 1);
  std::fflush(nullptr);
  ::execv(program.c_str(), pointers.data());
  throw std::runtime_error("cannot start " + program.string() + ": " + std::strerror(errno));
}

}  // namespace

bool choose_device(std::string_view on) {
  const std::string_view mine = device_executor();
  if (on == "cpu") return false;
  if (on == mine) {
    if (!device_present())
      throw CommandError("--on " + std::string(on) + ": there is no GPU here that CUDA can use");
    return true;
  }
  const bool handed_over = std::getenv(kMark) != nullptr;
  if (on == "auto") {
    if (mine == "gpu") return device_present();
    if (handed_over || !driver_present()) return false;
    if (const fs::path other = sibling("qwen_cuda"); !other.empty()) hand_over(other);
    return false;
  }
  const char* name = on == "gpu" ? "qwen_cuda" : "qwen";
  const fs::path other = handed_over ? fs::path() : sibling(name);
  if (other.empty()) {
    throw CommandError("--on " + std::string(on) + ": this program has " + std::string(mine) +
                       " and cpu, and " + name + " is not beside it" +
                       (on == "gpu" ? " (it is built where nvcc is found)" : ""));
  }
  hand_over(other);
}

}  // namespace ladder::qwen
