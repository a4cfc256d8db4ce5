#include "harness/emulator/symbols.hpp"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

extern char** environ;

namespace ladder::emu {
namespace {

struct Function {
  std::uintptr_t begin;
  std::size_t bytes;
  std::string name;
};

struct Tables {
  Program program;
  std::vector<Function> functions;  // sorted by begin, process addresses
};

std::string demangle(const std::string& mangled) {
  int status = 0;
  char* plain = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string out = status == 0 && plain != nullptr ? plain : mangled;
  std::free(plain);
  return out;
}

/// A thread-local variable declared inside a function. In a program that runs kernels on the emulator that is a
/// __shared__ variable, unless the function belongs to a library that has such variables of its own.
bool declared_in_function(const std::string& mangled) {
  if (!mangled.starts_with("_ZZ")) return false;
  for (const char* own : {"_ZZNSt", "_ZZSt", "_ZZN5boost", "_ZZN7doctest", "_ZZN12_GLOBAL__N_17doctest",
                          "_ZZN9__gnu_cxx", "_ZZN6ladder3emu"}) {
    if (mangled.starts_with(own)) return false;
  }
  return true;
}

/// Splits "_ZZ<function>E<length><name>[_n]" into the mangled function and the variable's name.
SharedVariable shared_variable(const std::string& mangled, std::size_t offset, std::size_t bytes) {
  SharedVariable v{offset, bytes, "", ""};
  const std::string plain = demangle(mangled);
  const std::size_t colon = plain.rfind("::");
  v.name = colon == std::string::npos ? plain : plain.substr(colon + 2);
  // The last 'E' that is followed by the length of the variable's name ends the function's encoding.
  const std::size_t name_at = mangled.rfind(std::to_string(v.name.size()) + v.name);
  if (name_at != std::string::npos && name_at > 3) v.function = "_Z" + mangled.substr(3, name_at - 4);
  return v;
}

template <class Header>
const Header* view(const std::vector<char>& image, std::size_t offset, std::size_t count = 1) {
  if (offset > image.size() || count > (image.size() - offset) / sizeof(Header)) return nullptr;
  return reinterpret_cast<const Header*>(image.data() + offset);
}

void read_symbols(Tables& t) {
  std::ifstream in(t.program.path, std::ios::binary);
  const std::vector<char> image((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const auto* header = view<ElfW(Ehdr)>(image, 0);
  if (header == nullptr || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return;
  const auto* sections = view<ElfW(Shdr)>(image, header->e_shoff, header->e_shnum);
  if (sections == nullptr) return;
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB || sections[i].sh_link >= header->e_shnum) continue;
    const std::size_t n = sections[i].sh_size / sizeof(ElfW(Sym));
    const auto* symbols = view<ElfW(Sym)>(image, sections[i].sh_offset, n);
    const auto& strings = sections[sections[i].sh_link];
    if (symbols == nullptr || view<char>(image, strings.sh_offset, strings.sh_size) == nullptr) return;
    t.program.has_symbols = true;
    for (std::size_t s = 0; s < n; ++s) {
      const auto& symbol = symbols[s];
      if (symbol.st_shndx == SHN_UNDEF || symbol.st_name >= strings.sh_size) continue;
      const char* name = image.data() + strings.sh_offset + symbol.st_name;
      const auto type = symbol.st_info & 0xf;
      if (type == STT_FUNC && symbol.st_size > 0) {
        t.functions.push_back({t.program.base + symbol.st_value, symbol.st_size, name});
      } else if (type == STT_TLS && symbol.st_size > 0 && declared_in_function(name)) {
        t.program.shared.push_back(shared_variable(name, symbol.st_value, symbol.st_size));
      } else if (type == STT_TLS && std::string_view(name).starts_with("_ZGVZ")) {
        t.program.guards.push_back(symbol.st_value);
      }
    }
  }
  std::sort(t.functions.begin(), t.functions.end(),
            [](const Function& a, const Function& b) { return a.begin < b.begin; });
  std::sort(t.program.guards.begin(), t.program.guards.end());
  std::sort(t.program.shared.begin(), t.program.shared.end(),
            [](const SharedVariable& a, const SharedVariable& b) { return a.offset < b.offset; });
}

int locate(dl_phdr_info* info, std::size_t, void* out) {
  // The first object is the executable itself.
  auto& p = static_cast<Tables*>(out)->program;
  p.base = info->dlpi_addr;
  p.begin = ~std::uintptr_t{0};
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& h = info->dlpi_phdr[i];
    if (h.p_type != PT_LOAD) continue;
    p.begin = std::min<std::uintptr_t>(p.begin, p.base + h.p_vaddr);
    p.end = std::max<std::uintptr_t>(p.end, p.base + h.p_vaddr + h.p_memsz);
  }
  return 1;
}

const Tables& tables() {
  static const Tables* t = [] {
    auto* fresh = new Tables;
    std::error_code ignored;
    fresh->program.path = std::filesystem::read_symlink("/proc/self/exe", ignored).string();
    dl_iterate_phdr(locate, fresh);
    read_symbols(*fresh);
    return fresh;
  }();
  return *t;
}

const Function* function_at(std::uintptr_t address) {
  const auto& f = tables().functions;
  auto it = std::upper_bound(f.begin(), f.end(), address,
                             [](std::uintptr_t a, const Function& x) { return a < x.begin; });
  if (it == f.begin()) return nullptr;
  --it;
  return address - it->begin < it->bytes ? &*it : nullptr;
}

int find_thread_block(dl_phdr_info* info, std::size_t, void* out) {
  auto& b = *static_cast<ThreadBlock*>(out);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
    b.begin = reinterpret_cast<std::uintptr_t>(info->dlpi_tls_data);
    b.bytes = info->dlpi_phdr[i].p_memsz;
  }
  return 1;
}

/// Runs addr2line over file addresses and returns its output, or "" when it cannot be run.
std::string run_addr2line(const std::vector<std::uintptr_t>& addresses) {
  std::vector<std::string> words = {"addr2line", "-e", program().path, "-a", "-i", "-f", "-C"};
  for (const std::uintptr_t a : addresses) {
    std::ostringstream hex;
    hex << "0x" << std::hex << a;
    words.push_back(hex.str());
  }
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (auto& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  int fds[2];
  if (pipe(fds) != 0) return "";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, fds[0]);
  posix_spawn_file_actions_addclose(&actions, fds[1]);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, "addr2line", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(fds[1]);
  std::string text;
  if (failed == 0) {
    char chunk[4096];
    for (ssize_t n; (n = read(fds[0], chunk, sizeof chunk)) > 0;)
      text.append(chunk, static_cast<std::size_t>(n));
    int status = 0;
    waitpid(child, &status, 0);
  }
  close(fds[0]);
  return text;
}

std::string tidy_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path normal = std::filesystem::path(path).lexically_normal();
  const std::filesystem::path here = std::filesystem::current_path(error);
  if (error) return normal.string();
  const std::filesystem::path relative = normal.lexically_relative(here);
  return relative.empty() || relative.native().starts_with("..") ? normal.string() : relative.string();
}

/// One block of addr2line's output: an address line, then pairs of function and file:line, innermost first.
SourceLine choose(const std::vector<std::string>& lines) {
  SourceLine best;
  for (std::size_t i = 0; i + 1 < lines.size(); i += 2) {
    std::string place = lines[i + 1];
    const std::size_t note = place.find(" (");  // "(discriminator 3)"
    if (note != std::string::npos) place.resize(note);
    const std::size_t colon = place.rfind(':');
    if (colon == std::string::npos) continue;
    SourceLine s;
    s.file = place.substr(0, colon);
    s.line = std::atoi(place.c_str() + colon + 1);
    s.function = shorten(lines[i]);
    if (s.line == 0 || s.file.starts_with("?")) continue;
    best = s;
    if (!of_the_emulator(s.file) && !s.file.starts_with("/usr/")) break;
  }
  if (best.line != 0) best.file = tidy_path(best.file);
  return best;
}

}  // namespace

const Program& program() { return tables().program; }

ThreadBlock thread_block() {
  ThreadBlock b;
  dl_iterate_phdr(find_thread_block, &b);
  return b;
}

std::string_view mangled_name(const void* address) {
  const Function* f = function_at(reinterpret_cast<std::uintptr_t>(address));
  return f == nullptr ? std::string_view{} : std::string_view{f->name};
}

std::string shorten(const std::string& demangled) {
  // Cut at the parameter list: the last parenthesis group that is outside <> and not "(anonymous namespace)".
  std::string s = demangled;
  const std::size_t close = s.rfind(')');
  if (close != std::string::npos) {
    int depth = 0;
    for (std::size_t i = close + 1; i-- > 0;) {
      if (s[i] == ')') ++depth;
      if (s[i] == '(' && --depth == 0) {
        if (s.compare(i, 11, "(anonymous ") != 0) s.resize(i);
        break;
      }
    }
  }
  // A template's demangled name starts with the return type.
  int depth = 0;
  std::size_t start = 0;
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '<' || s[i] == '(') ++depth;
    if (s[i] == '>' || s[i] == ')') --depth;
    if (s[i] == ' ' && depth == 0 && !s.substr(0, i).ends_with("operator")) start = i + 1;
  }
  s = s.substr(start);
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  if (s.starts_with(kAnonymous)) s = s.substr(kAnonymous.size());
  return s;
}

std::string kernel_name(const void* address) {
  const std::string_view mangled = mangled_name(address);
  if (mangled.empty()) return "kernel";
  return shorten(demangle(std::string(mangled)));
}

std::size_t static_shared_bytes(const void* kernel) {
  const std::string_view mangled = mangled_name(kernel);
  std::size_t bytes = 0;
  for (const SharedVariable& v : program().shared) {
    if (v.function == mangled) bytes += v.bytes;
  }
  return bytes;
}

bool of_the_emulator(const std::string& file) {
  // Device functions that stand for one instruction: a kernel's own line is the one that calls them. All of them
  // are forced inline, so that it is known.
  if (const std::size_t at = file.find("kernels/device/"); at != std::string::npos) {
    static constexpr std::string_view kInstructionFiles[] = {
        "mma.cuh", "ldmatrix.cuh", "cp_async.cuh", "wmma.cuh", "mbarrier.cuh", "tma.cuh", "wgmma.cuh"};
    const std::string_view name = std::string_view(file).substr(at + std::strlen("kernels/device/"));
    for (const std::string_view f : kInstructionFiles) {
      if (name == f) return true;
    }
  }
  if (file.find("harness/device/device_emulator.hpp") != std::string::npos) return true;
  return file.find("harness/emulator/") != std::string::npos &&
         file.find("harness/emulator/test_") == std::string::npos &&
         file.find("harness/emulator/example/") == std::string::npos;
}

bool operator==(const SourceLine& a, const SourceLine& b) { return a.line == b.line && a.file == b.file; }

std::string to_string(const SourceLine& s) {
  return s.line == 0 ? "unknown line" : s.file + ":" + std::to_string(s.line);
}

std::vector<SourceLine> source_lines(const std::vector<std::uintptr_t>& return_addresses) {
  static std::mutex mutex;
  static auto* cache = new std::map<std::uintptr_t, SourceLine>;
  const std::lock_guard lock(mutex);
  std::vector<std::uintptr_t> missing;
  for (const std::uintptr_t a : return_addresses) {
    if (!cache->contains(a)) missing.push_back(a);
  }
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  constexpr std::size_t kBatch = 512;  // keeps the command line short
  for (std::size_t first = 0; first < missing.size(); first += kBatch) {
    const std::size_t last = std::min(first + kBatch, missing.size());
    std::vector<std::uintptr_t> file_addresses;
    for (std::size_t i = first; i < last; ++i) file_addresses.push_back(missing[i] - 1 - program().base);
    std::istringstream out(run_addr2line(file_addresses));
    std::vector<std::vector<std::string>> blocks;
    for (std::string line; std::getline(out, line);) {
      if (line.starts_with("0x")) {
        blocks.emplace_back();
      } else if (!blocks.empty()) {
        blocks.back().push_back(line);
      }
    }
    for (std::size_t i = first; i < last; ++i) {
      SourceLine s;
      if (i - first < blocks.size()) s = choose(blocks[i - first]);
      if (s.line == 0) {
        if (const Function* f = function_at(missing[i] - 1)) s.function = shorten(demangle(f->name));
      }
      cache->emplace(missing[i], s);
    }
  }
  std::vector<SourceLine> lines;
  lines.reserve(return_addresses.size());
  for (const std::uintptr_t a : return_addresses) lines.push_back(cache->at(a));
  return lines;
}

SourceLine source_line(std::uintptr_t return_address) { return source_lines({return_address})[0]; }

}  // namespace ladder::emu
