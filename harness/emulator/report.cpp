// What was counted, for people and for programs.

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "harness/emulator/counters.hpp"
#include "harness/experiment/json.hpp"

namespace ladder::emu {
namespace {

constexpr std::array<const char*, kInstructions> kInstructionNames = {
    "fma_f32", "fma_f16x2", "dp4a", "mma_f16", "mma_s8", "cp_async", "special"};
constexpr std::array<const char*, kAccesses> kAccessNames = {"load", "store", "atomic"};

[[gnu::format(printf, 1, 2)]] std::string print(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

/// 1234567 -> "1,234,567".
std::string grouped(std::uint64_t n) {
  std::string s = std::to_string(n);
  for (std::size_t i = s.size(); i > 3;) s.insert(i -= 3, 1, ',');
  return s;
}

std::string bytes_text(std::uint64_t n) {
  if (n >= 1'000'000'000) return print("%.2f GB", static_cast<double>(n) / 1e9);
  if (n >= 1'000'000) return print("%.2f MB", static_cast<double>(n) / 1e6);
  if (n >= 10'000) return print("%.1f kB", static_cast<double>(n) / 1e3);
  return grouped(n) + " B";
}

double ratio(std::uint64_t a, std::uint64_t b) {
  return b == 0 ? 0.0 : static_cast<double>(a) / static_cast<double>(b);
}

std::string wrap(const std::string& text, std::size_t width, const std::string& indent) {
  std::string out;
  std::size_t column = 0;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = text.find(' ', at);
    if (end == std::string::npos) end = text.size();
    const std::size_t n = end - at;
    if (column > indent.size() && column + 1 + n > width) {
      out += "\n";
      column = 0;
    }
    if (column == 0) {
      out += indent;
      column = indent.size();
    } else if (column > indent.size()) {
      out += " ";
      ++column;
    }
    out += text.substr(at, n);
    column += n;
    at = end + 1;
  }
  return out + "\n";
}

std::string file_name(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string line_name(const SourceLine& l, std::size_t width) {
  std::string s = l.line == 0 ? "(" + (l.function.empty() ? "unknown" : l.function) + ")"
                              : file_name(l.file) + ":" + std::to_string(l.line);
  if (s.size() > width) s.replace(0, s.size() - width + 3, "...");
  return s;
}

}  // namespace

std::string text_report(const Counters& c) {
  std::string out;
  out +=
      wrap(c.kernel + "  grid (" + std::to_string(c.grid.x) + "," + std::to_string(c.grid.y) + "," +
               std::to_string(c.grid.z) + ")  block (" + std::to_string(c.block.x) + "," +
               std::to_string(c.block.y) + "," + std::to_string(c.block.z) + ")  shared " +
               std::to_string(c.static_shared_bytes) + " + " + std::to_string(c.dynamic_shared_bytes) + " B",
           100, "");
  out += print("occupancy at most %u blocks, %u of %u warps an SM (limit: %s); L1 model %s a block\n",
               c.occupancy.blocks_per_sm, c.occupancy.warps_per_sm, c.occupancy.max_warps_per_sm,
               c.occupancy.limited_by, bytes_text(c.l1_bytes).c_str());

  const bool global = c.total.global_total().requests > 0;
  if (global) {
    out +=
        "\nglobal memory                            requests sect/req  ideal     asked   sectors   past L1\n";
    for (const LineCounts& l : c.lines) {
      for (const BufferAccess& b : l.buffers) {
        const GlobalCounts& g = b.counts;
        out += print("  %-20s %-6s %-9s %10s %8.2f %6.2f %9s %9s %9s\n", line_name(l.line, 20).c_str(),
                     kAccessNames[static_cast<std::size_t>(b.access)], b.buffer.substr(0, 9).c_str(),
                     grouped(g.requests).c_str(), g.sectors_per_request(), ratio(g.ideal_sectors, g.requests),
                     bytes_text(g.bytes).c_str(), bytes_text(g.sectors * kSectorBytes).c_str(),
                     bytes_text(g.l1_sectors * kSectorBytes).c_str());
      }
    }
    out += "\nbuffer                                  size      touched by loads    touched by stores\n";
    for (const BufferCounts& b : c.buffers) {
      out += print("  %-30s %11s %21s %20s\n", b.name.substr(0, 30).c_str(), bytes_text(b.bytes).c_str(),
                   bytes_text(b.sectors_read * kSectorBytes).c_str(),
                   bytes_text(b.sectors_written * kSectorBytes).c_str());
    }
  }
  if (c.total.shared_total().requests > 0) {
    out += "\nshared memory                        requests  passes/req   (ideal)  conflicts      asked\n";
    for (const LineCounts& l : c.lines) {
      for (int k = 0; k < kAccesses; ++k) {
        const SharedCounts& s = l.counts.shared[static_cast<std::size_t>(k)];
        if (s.requests == 0) continue;
        out += print("  %-26s %-6s %10s %11.2f %9.2f %10s %10s\n", line_name(l.line, 26).c_str(),
                     kAccessNames[static_cast<std::size_t>(k)], grouped(s.requests).c_str(),
                     ratio(s.passes, s.requests), ratio(s.ideal_passes, s.requests),
                     grouped(s.conflicts()).c_str(), bytes_text(s.bytes).c_str());
      }
    }
  }
  out += "\n";
  if (c.total.control.blocks > 0) {
    out += print("control: %s divergent branches; %.1f of 32 lanes active on average\n",
                 grouped(c.total.control.divergent_branches).c_str(), c.total.control.active_lanes());
    for (const LineCounts& l : c.lines) {
      if (l.counts.control.divergent_branches == 0) continue;
      out += print("  %-33s %10s divergent\n", line_name(l.line, 33).c_str(),
                   grouped(l.counts.control.divergent_branches).c_str());
    }
  }
  out += print("barriers %s, warp collectives %s", grouped(c.total.barriers).c_str(),
               grouped(c.total.collectives).c_str());
  for (std::size_t i = 0; i < kInstructions; ++i) {
    if (c.total.instructions[i] > 0)
      out += print(", %s %s", kInstructionNames[i], grouped(c.total.instructions[i]).c_str());
  }
  out += "\n";
  out += c.findings.empty() ? "checks: nothing found\n" : print("checks: %zu found\n", c.findings.size());
  for (const Finding& f : c.findings) {
    out += wrap(std::string(to_string(f.check)) + (f.times > 1 ? " (" + grouped(f.times) + " times)" : "") +
                    ": " + f.text,
                100, "  ");
  }
  return out;
}

std::string annotated_source(const Counters& c) {
  std::map<std::string, std::map<int, Counts>> files;
  for (const LineCounts& l : c.lines) {
    const bool visible = l.counts.global_total().requests + l.counts.shared_total().requests +
                             l.counts.control.divergent_branches >
                         0;
    if (l.line.line > 0 && visible) files[l.line.file][l.line.line] += l.counts;
  }
  std::string out;
  for (const auto& [file, lines] : files) {
    std::ifstream in(file);
    out += file + "\n";
    if (!in) {
      out += "  (the file cannot be read from here)\n";
      continue;
    }
    std::vector<std::string> source(1);
    for (std::string text; std::getline(in, text);) source.push_back(text);
    out += " requests sect/req (ideal) passes/req diverge  line\n";
    std::set<int> shown;
    constexpr int kAround = 2;
    for (const auto& [line, counts] : lines) {
      for (int i = line - kAround; i <= line + kAround; ++i) {
        if (i >= 1 && i < static_cast<int>(source.size())) shown.insert(i);
      }
    }
    int previous = 0;
    for (const int i : shown) {
      if (previous != 0 && i != previous + 1) out += std::string(48, ' ') + "...\n";
      previous = i;
      std::string margin(43, ' ');
      const auto it = lines.find(i);
      if (it != lines.end()) {
        const GlobalCounts g = it->second.global_total();
        const SharedCounts s = it->second.shared_total();
        const std::uint64_t requests = g.requests + s.requests;
        margin = print("%9s ", requests > 0 ? grouped(requests).c_str() : "");
        margin += g.requests > 0
                      ? print("%8.2f %7.2f ", g.sectors_per_request(), ratio(g.ideal_sectors, g.requests))
                      : std::string(17, ' ');
        margin += s.requests > 0 ? print("%10.2f ", ratio(s.passes, s.requests)) : std::string(11, ' ');
        const std::uint64_t d = it->second.control.divergent_branches;
        margin += d > 0 ? print("%7s", grouped(d).c_str()) : std::string(7, ' ');
        margin.resize(std::max<std::size_t>(margin.size(), 43), ' ');
      }
      std::string row = margin + print(" %5d ", i) + source[static_cast<std::size_t>(i)];
      while (!row.empty() && row.back() == ' ') row.pop_back();
      out += row + "\n";
    }
  }
  return out;
}

// --- JSON -------------------------------------------------------------------------------------------------------

namespace {

void add_counts(JsonObject& m, const Counts& c) {
  for (std::size_t k = 0; k < kAccesses; ++k) {
    const SharedCounts& s = c.shared[k];
    if (s.requests > 0) {
      JsonObject o;
      o.add("requests", s.requests)
          .add("lanes", s.lanes)
          .add("bytes_requested", s.bytes)
          .add("bank_passes", s.passes);
      o.add("ideal_passes", s.ideal_passes).add("bank_conflicts", s.conflicts());
      m.add(std::string("shared_") + kAccessNames[k], o);
    }
  }
  if (c.control.blocks > 0) {
    m.add("divergent_branches", c.control.divergent_branches).add("active_lanes", c.control.active_lanes());
  }
  if (c.barriers > 0) m.add("barriers", c.barriers);
  if (c.collectives > 0) m.add("warp_collectives", c.collectives);
  for (std::size_t i = 0; i < kInstructions; ++i) {
    if (c.instructions[i] > 0) m.add(kInstructionNames[i], c.instructions[i]);
  }
}

template <class T, class F>
std::string array_of(const std::vector<T>& v, F object) {
  std::string out;
  for (const T& x : v) {
    const std::string o = object(x);
    if (o.empty()) continue;
    out += out.empty() ? "" : ", ";
    out += o;
  }
  return "[" + out + "]";
}

}  // namespace

std::string record_json(const Counters& c) {
  JsonObject m;
  const GlobalCounts g = c.total.global_total();
  const SharedCounts s = c.total.shared_total();
  m.add("requests", g.requests).add("sectors", g.sectors).add("sectors_per_request", g.sectors_per_request());
  m.add("ideal_sectors", g.ideal_sectors).add("bytes_requested", g.bytes);
  m.add("unique_bytes", (c.unique_sectors_read() + c.unique_sectors_written()) * kSectorBytes);
  m.add("unique_bytes_read", c.unique_sectors_read() * kSectorBytes);
  m.add("unique_bytes_written", c.unique_sectors_written() * kSectorBytes);
  m.add("past_l1_bytes", g.l1_sectors * kSectorBytes);
  m.add("load_requests", c.total.loads().requests).add("load_sectors", c.total.loads().sectors);
  m.add("store_requests", c.total.stores().requests).add("store_sectors", c.total.stores().sectors);
  if (c.total.atomics().requests > 0) m.add("atomic_requests", c.total.atomics().requests);
  if (s.requests > 0) {
    m.add("shared_requests", s.requests).add("bank_passes", s.passes).add("bank_conflicts", s.conflicts());
  }
  if (c.total.control.blocks > 0) {
    m.add("divergent_branches", c.total.control.divergent_branches)
        .add("active_lanes", c.total.control.active_lanes());
  }
  if (c.total.barriers > 0) m.add("barriers", c.total.barriers);
  if (c.total.collectives > 0) m.add("warp_collectives", c.total.collectives);
  for (std::size_t i = 0; i < kInstructions; ++i) {
    if (c.total.instructions[i] > 0) m.add(kInstructionNames[i], c.total.instructions[i]);
  }
  m.add("findings", static_cast<std::uint64_t>(c.findings.size()));
  return m.str();
}

std::string json(const Counters& c) {
  JsonObject m;
  m.add("kernel", c.kernel).raw("total", record_json(c));
  m.add("blocks_per_sm", c.occupancy.blocks_per_sm).add("warps_per_sm", c.occupancy.warps_per_sm);
  m.raw("lines", array_of(c.lines, [](const LineCounts& l) {
          JsonObject o;
          if (!l.buffers.empty()) {
            o.raw(
                "global", array_of(l.buffers, [](const BufferAccess& b) {
                  const GlobalCounts& g = b.counts;
                  JsonObject a;
                  a.add("buffer", b.buffer).add("access", kAccessNames[static_cast<std::size_t>(b.access)]);
                  a.add("requests", g.requests).add("lanes", g.lanes).add("bytes_requested", g.bytes);
                  a.add("sectors", g.sectors).add("ideal_sectors", g.ideal_sectors);
                  a.add("sectors_per_request", g.sectors_per_request()).add("past_l1_sectors", g.l1_sectors);
                  return a.str();
                }));
          }
          add_counts(o, l.counts);
          if (o.empty()) return std::string();
          JsonObject named;
          named.add("file", l.line.file).add("line", l.line.line).add("counts", o);
          return named.str();
        }));
  m.raw("buffers", array_of(c.buffers, [](const BufferCounts& b) {
          JsonObject o;
          o.add("name", b.name).add("bytes", b.bytes);
          o.add("unique_bytes_read", b.sectors_read * kSectorBytes);
          o.add("unique_bytes_written", b.sectors_written * kSectorBytes);
          return o.str();
        }));
  m.raw("findings", array_of(c.findings, [](const Finding& f) {
          JsonObject o;
          o.add("check", to_string(f.check)).add("text", f.text).add("times", f.times);
          return o.str();
        }));
  return m.str();
}

// --- Pictures ---------------------------------------------------------------------------------------------------

namespace {

constexpr int kCell = 14, kLeft = 120, kTop = 56;

/// Eight hues that stay apart for readers who do not see red and green.
constexpr std::array<const char*, 8> kColours = {"#4477aa", "#ee6677", "#228833", "#ccbb44",
                                                 "#66ccee", "#aa3377", "#bbbbbb", "#ee8866"};

std::string xml(const std::string& s) {
  std::string out;
  for (const char c : s) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string svg_open(int width, int height) {
  return print(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n",
      width, height, width, height, width, height);
}

std::string svg_text(int x, int y, const std::string& s, const char* extra = "") {
  return print("<text x=\"%d\" y=\"%d\" %s>", x, y, extra) + xml(s) + "</text>\n";
}

std::string svg_box(double x, double y, double w, double h, const char* fill, const std::string& title) {
  return print(
             "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\" stroke=\"#ffffff\" "
             "stroke-width=\"0.5\"><title>",
             x, y, w, h, fill) +
         xml(title) + "</title></rect>\n";
}

std::string headline(const CapturedRequest& r) {
  return file_name(r.line.file) + ":" + std::to_string(r.line.line) + ", " + std::to_string(r.bytes) +
         "-byte " + kAccessNames[static_cast<std::size_t>(r.access)] + " of warp " + std::to_string(r.warp) +
         ", block " + std::to_string(r.block);
}

}  // namespace

std::string access_picture(const CapturedRequest& r) {
  // A row for each distinct sector, eight words wide; gaps between sectors are not drawn to scale.
  std::map<std::int64_t, std::vector<int>> lanes_of;
  for (int lane = 0; lane < 32; ++lane) {
    const std::int64_t o = r.offset[static_cast<std::size_t>(lane)];
    if (o < 0) continue;
    lanes_of[o / static_cast<std::int64_t>(kSectorBytes)].push_back(lane);
  }
  constexpr int kByte = 16;
  const int width = kLeft + static_cast<int>(kSectorBytes) * kByte + 20;
  const int height = kTop + static_cast<int>(lanes_of.size()) * (kCell + 2) + 20;
  std::string out = svg_open(width, height);
  out += svg_text(10, 18, headline(r), "font-weight=\"bold\"");
  out += svg_text(10, 34,
                  std::to_string(lanes_of.size()) + " sectors of 32 bytes in " +
                      (r.shared ? std::string("shared memory") : "'" + r.buffer + "'") +
                      "; a row is a sector, a box what a lane asks for");
  int y = kTop;
  for (const auto& [sector, lanes] : lanes_of) {
    const std::int64_t start = sector * static_cast<std::int64_t>(kSectorBytes);
    out += svg_text(kLeft - 8, y + kCell - 3, "byte " + grouped(static_cast<std::uint64_t>(start)),
                    "text-anchor=\"end\"");
    out += svg_box(kLeft, y, static_cast<double>(kSectorBytes) * kByte, kCell, "#eeeeee", "fetched");
    std::map<std::int64_t, std::vector<int>> at;
    for (const int lane : lanes) at[r.offset[static_cast<std::size_t>(lane)]].push_back(lane);
    for (const auto& [offset, who] : at) {
      std::string label = std::to_string(who.front());
      if (who.size() > 1) label += "-" + std::to_string(who.back());
      const double x = kLeft + static_cast<double>(offset - start) * kByte;
      out += svg_box(x, y, static_cast<double>(r.bytes) * kByte, kCell,
                     kColours[static_cast<std::size_t>(who.front()) % kColours.size()], "lane " + label);
      if (r.bytes * kByte >= 7 * label.size()) {
        out += svg_text(static_cast<int>(x) + static_cast<int>(r.bytes) * kByte / 2, y + kCell - 3, label,
                        "text-anchor=\"middle\" fill=\"#ffffff\" font-size=\"10\"");
      }
    }
    y += kCell + 2;
  }
  return out + "</svg>\n";
}

std::string bank_picture(const CapturedRequest& r) {
  // Lanes that are served together share a panel; in it, a column is a bank and a row is one pass.
  const int together = r.bytes <= 4 ? 32 : r.bytes == 8 ? 16 : 8;
  struct Word {
    std::int64_t word;
    std::vector<int> lanes;
  };
  std::vector<std::array<std::vector<Word>, 32>> panels(static_cast<std::size_t>(32 / together));
  std::vector<std::size_t> passes(panels.size(), 0);
  for (int lane = 0; lane < 32; ++lane) {
    const std::int64_t o = r.offset[static_cast<std::size_t>(lane)];
    if (o < 0) continue;
    const auto p = static_cast<std::size_t>(lane / together);
    for (unsigned b = 0; b < r.bytes; b += 4) {
      const std::int64_t word = (o + b) / 4;
      auto& bank = panels[p][static_cast<std::size_t>(word % 32)];
      auto it = std::find_if(bank.begin(), bank.end(), [&](const Word& w) { return w.word == word; });
      if (it == bank.end() || r.access == Access::atomic) it = bank.insert(bank.end(), Word{word, {}});
      it->lanes.push_back(lane);
      passes[p] = std::max(passes[p], bank.size());
    }
  }
  std::size_t rows = 0, total = 0;
  for (const std::size_t p : passes) {
    rows += p > 0 ? p + 1 : 0;
    total += p;
  }
  constexpr int kWide = 22;
  std::string out = svg_open(kLeft + 32 * kWide + 20, kTop + 16 + static_cast<int>(rows) * (kCell + 2) + 10);
  out += svg_text(10, 18, headline(r), "font-weight=\"bold\"");
  out += svg_text(
      10, 34, std::to_string(total) + " passes; a column is a bank, a row a pass, a number the lane served");
  for (int bank = 0; bank < 32; ++bank) {
    out += svg_text(kLeft + bank * kWide + kWide / 2, kTop, std::to_string(bank),
                    "text-anchor=\"middle\" fill=\"#555555\" font-size=\"10\"");
  }
  int y = kTop + 6;
  for (std::size_t p = 0; p < panels.size(); ++p) {
    if (passes[p] == 0) continue;
    const int first = static_cast<int>(p) * together;
    for (std::size_t pass = 0; pass < passes[p]; ++pass) {
      out += svg_text(
          kLeft - 8, y + kCell - 3,
          pass == 0 ? "lanes " + std::to_string(first) + "-" + std::to_string(first + together - 1) : "again",
          "text-anchor=\"end\"");
      for (std::size_t bank = 0; bank < 32; ++bank) {
        const bool used = pass < panels[p][bank].size();
        const double x = kLeft + static_cast<double>(bank) * kWide;
        if (!used) {
          out += svg_box(x, y, kWide, kCell, "#eeeeee", "idle");
          continue;
        }
        const Word& w = panels[p][bank][pass];
        std::string label = std::to_string(w.lanes.front());
        if (w.lanes.size() > 1) label += "+";
        out += svg_box(x, y, kWide, kCell, pass == 0 ? kColours[0] : kColours[1],
                       "word " + std::to_string(w.word) + ", " + std::to_string(w.lanes.size()) + " lanes");
        out += svg_text(static_cast<int>(x) + kWide / 2, y + kCell - 3, label,
                        "text-anchor=\"middle\" fill=\"#ffffff\" font-size=\"10\"");
      }
      y += kCell + 2;
    }
    y += kCell + 2;
  }
  return out + "</svg>\n";
}

}  // namespace ladder::emu
