// What was counted, for people and for programs.

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "harness/emulator/counters.hpp"
#include "harness/experiment/json.hpp"

namespace ladder::emu {
namespace {

constexpr std::array<const char*, kInstructions> kInstructionNames = {
    "fma_f32", "fma_f16x2", "dp4a", "mma_f16", "mma_s8", "cp_async", "special", "ldmatrix", "bulk_copy"};
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
  out += print("occupancy at most %u blocks, %u of %u warps an SM (limit: %s)\n", c.occupancy.blocks_per_sm,
               c.occupancy.warps_per_sm, c.occupancy.max_warps_per_sm, c.occupancy.limited_by);
  out += (c.registers == 0 ? "registers not known, so they limit nothing"
                           : std::to_string(c.registers) + " registers a thread") +
         "; L1 model " + bytes_text(c.l1_bytes) + " a block\n";

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
    out += " requests sect/req (ideal) pass/req diverge  line\n";
    std::set<int> shown;
    constexpr int kAround = 2;
    for (const auto& [line, counts] : lines) {
      for (int i = line - kAround; i <= line + kAround; ++i) {
        if (i >= 1 && i < static_cast<int>(source.size())) shown.insert(i);
      }
    }
    constexpr std::size_t kMargin = 41, kWidth = 100;
    std::size_t common = kWidth;  // indentation of all lines shown
    for (const int i : shown)
      common = std::min(common, source[static_cast<std::size_t>(i)].find_first_not_of(' '));
    int previous = 0;
    for (const int i : shown) {
      if (previous != 0 && i != previous + 1) out += std::string(kMargin, ' ') + "  ...\n";
      previous = i;
      std::string margin(kMargin, ' ');
      const auto it = lines.find(i);
      if (it != lines.end()) {
        const GlobalCounts g = it->second.global_total();
        const SharedCounts s = it->second.shared_total();
        const std::uint64_t requests = g.requests + s.requests;
        margin = print("%9s ", requests > 0 ? grouped(requests).c_str() : "");
        margin += g.requests > 0
                      ? print("%8.2f %7.2f ", g.sectors_per_request(), ratio(g.ideal_sectors, g.requests))
                      : std::string(17, ' ');
        margin += s.requests > 0 ? print("%8.2f ", ratio(s.passes, s.requests)) : std::string(9, ' ');
        const std::uint64_t d = it->second.control.divergent_branches;
        margin += d > 0 ? print("%7s", grouped(d).c_str()) : std::string(7, ' ');
        margin.resize(std::max(margin.size(), kMargin), ' ');
      }
      // A line that is too long goes on below itself.
      std::string text = source[static_cast<std::size_t>(i)];
      text.erase(0, std::min(text.size(), common));
      const std::size_t own = std::min(text.find_first_not_of(' '), kWidth / 4);
      std::string row = margin + print(" %5d ", i);
      while (row.size() + text.size() > kWidth) {
        std::size_t fits = kWidth - row.size();
        const std::size_t space = text.rfind(' ', fits);
        if (space != std::string::npos && text.find_first_not_of(' ') < space) fits = space;
        out += row + text.substr(0, fits) + "\n";
        row = std::string(kMargin + 7 + own + 4, ' ');
        text.erase(0, std::min(text.find_first_not_of(' ', fits), text.size()));
      }
      row += text;
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
  if (c.registers > 0) m.add("registers_per_thread", c.registers);
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

constexpr int kCell = 15, kGap = 2, kLeft = 140, kTop = 92;
constexpr std::size_t kLanes = 32;

// Told apart by lightness too, so that they need no sense of colour and survive a grey printer.
constexpr const char* kUsed = "#1f5a99";       // dark blue, white text
constexpr const char* kUsedOther = "#4a86c5";  // the next lane's, where two boxes touch
constexpr const char* kExtra = "#e69f00";      // orange, black text: what a better pattern would not need
constexpr const char* kUnused = "#e4e4e4";
constexpr const char* kGrey = "#555555";

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

std::string svg_open(int width, int height, const std::string& title) {
  return print(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
             "font-family=\"sans-serif\" font-size=\"11\" role=\"img\">\n",
             width, height, width, height) +
         "<title>" + xml(title) + "</title>\n" +
         print("<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n", width, height);
}

enum class Anchor { start, middle, end };

std::string svg_text(int x, int y, const std::string& s, Anchor anchor = Anchor::start,
                     const char* fill = "#000000", bool bold = false) {
  constexpr std::array<const char*, 3> kAnchors = {"start", "middle", "end"};
  return print("<text x=\"%d\" y=\"%d\" text-anchor=\"%s\" fill=\"%s\"%s>", x, y,
               kAnchors[static_cast<std::size_t>(anchor)], fill, bold ? " font-weight=\"bold\"" : "") +
         xml(s) + "</text>\n";
}

std::string svg_box(int x, int y, int w, const char* fill, const std::string& title) {
  return print(
             "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\" stroke=\"#ffffff\" "
             "stroke-width=\"0.5\"><title>",
             x, y, w, kCell, fill) +
         xml(title) + "</title></rect>\n";
}

const char* ink(const char* fill) { return fill == kUsed || fill == kUsedOther ? "#ffffff" : "#000000"; }

/// A filled box and what it means; returns where the next one may start.
int svg_legend(std::string& out, int x, int y, const char* fill, const char* inside,
               const std::string& meaning) {
  out += svg_box(x, y, 22, fill, meaning);
  out += svg_text(x + 11, y + kCell - 4, inside, Anchor::middle, ink(fill));
  out += svg_text(x + 27, y + kCell - 4, meaning);
  return x + 27 + 6 * static_cast<int>(meaning.size()) + 16;
}

std::string headline(const CapturedRequest& r) {
  return file_name(r.line.file) + ":" + std::to_string(r.line.line) + ", one " + std::to_string(r.bytes) +
         "-byte " + kAccessNames[static_cast<std::size_t>(r.access)] + " of warp " + std::to_string(r.warp) +
         " in block " + std::to_string(r.block);
}

std::string plural(std::size_t n, const char* one, const char* many) {
  return std::to_string(n) + " " + (n == 1 ? one : many);
}

/// "3", "0-7" for neighbours, "0, 4, ..." for others.
std::string lane_label(const std::vector<int>& lanes) {
  if (lanes.size() == 1) return std::to_string(lanes.front());
  const bool neighbours = lanes.back() - lanes.front() + 1 == static_cast<int>(lanes.size());
  return std::to_string(lanes.front()) + (neighbours ? "-" + std::to_string(lanes.back()) : ", ...");
}

}  // namespace

std::string access_picture(const CapturedRequest& r) {
  constexpr auto kSector = static_cast<std::int64_t>(kSectorBytes);
  const auto bytes = static_cast<std::int64_t>(r.bytes);
  std::map<std::int64_t, std::vector<int>> lanes_at;  // by offset
  std::set<std::int64_t> sectors, asked;
  for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
    const std::int64_t o = r.offset[static_cast<std::size_t>(lane)];
    if (o < 0) continue;
    lanes_at[o].push_back(lane);
    for (std::int64_t b = o; b < o + bytes; ++b) {
      asked.insert(b);
      sectors.insert(b / kSector);
    }
  }
  constexpr int kByte = 16;
  const std::size_t ideal = (asked.size() + kSectorBytes - 1) / kSectorBytes;
  const int rows = static_cast<int>(sectors.size());
  std::string out = svg_open(kLeft + static_cast<int>(kSectorBytes) * kByte + 20,
                             kTop + rows * (kCell + kGap) + 14, headline(r));
  out += svg_text(10, 18, headline(r), Anchor::start, "#000000", true);
  out += svg_text(10, 35,
                  "touches " + plural(sectors.size(), "sector", "sectors") + " of '" + r.buffer + "' where " +
                      std::to_string(ideal) + " could hold it: " + std::to_string(asked.size()) + " of " +
                      std::to_string(sectors.size() * kSectorBytes) + " bytes are asked for");
  int x = svg_legend(out, 10, 44, kUsed, "3", "asked for, by the lane of that number");
  svg_legend(out, x, 44, kUnused, "", "in the same sector, not asked for");
  out += svg_text(kLeft - 8, kTop - 18, "sector at byte", Anchor::end, kGrey);
  for (int b = 0; b <= static_cast<int>(kSectorBytes); b += 4) {
    out += svg_text(kLeft + b * kByte, kTop - 5, std::to_string(b), Anchor::middle, kGrey);
  }
  out += svg_text(kLeft + static_cast<int>(kSectorBytes) * kByte / 2, kTop - 18, "byte within the sector",
                  Anchor::middle, kGrey);

  std::map<std::int64_t, int> row_of;
  for (const std::int64_t s : sectors) {
    const int y = kTop + static_cast<int>(row_of.size()) * (kCell + kGap);
    row_of.emplace(s, y);
    out += svg_text(kLeft - 8, y + kCell - 4, grouped(static_cast<std::uint64_t>(s * kSector)), Anchor::end);
    out += svg_box(kLeft, y, static_cast<int>(kSectorBytes) * kByte, kUnused, "not asked for");
  }
  for (const auto& [offset, lanes] : lanes_at) {
    const std::string label = lane_label(lanes);
    const char* fill = lanes.front() % 2 == 0 ? kUsed : kUsedOther;
    // An access that is not aligned to its size lies in two rows.
    for (std::int64_t at = offset; at < offset + bytes;) {
      const std::int64_t end = std::min(offset + bytes, (at / kSector + 1) * kSector);
      const int w = static_cast<int>(end - at) * kByte;
      const int left = kLeft + static_cast<int>(at % kSector) * kByte, y = row_of[at / kSector];
      out += svg_box(left, y, w, fill, plural(lanes.size(), "lane", "lanes") + ": " + label);
      if (w >= 7 * static_cast<int>(label.size()) + 2)
        out += svg_text(left + w / 2, y + kCell - 4, label, Anchor::middle, ink(fill));
      at = end;
    }
  }
  return out + "</svg>\n";
}

std::string bank_picture(const CapturedRequest& r) {
  // Lanes that are served together share a panel; in it, a column is a bank and a row is one pass.
  const std::size_t together = r.bytes <= 4 ? 32 : r.bytes == 8 ? 16 : 8;
  struct Word {
    std::int64_t word;
    std::vector<int> lanes;
  };
  struct Panel {
    std::array<std::vector<Word>, kLanes> bank;
    std::size_t passes = 0;
  };
  std::vector<Panel> panels(kLanes / together);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const std::int64_t o = r.offset[lane];
    if (o < 0) continue;
    Panel& p = panels[lane / together];
    for (unsigned b = 0; b < r.bytes; b += 4) {
      const std::int64_t word = (o + b) / 4;
      auto& bank = p.bank[static_cast<std::size_t>(word) % kLanes];
      auto it = std::find_if(bank.begin(), bank.end(), [&](const Word& w) { return w.word == word; });
      if (it == bank.end() || r.access == Access::atomic) it = bank.insert(bank.end(), Word{word, {}});
      it->lanes.push_back(static_cast<int>(lane));
      p.passes = std::max(p.passes, bank.size());
    }
  }
  std::size_t total = 0, ideal = 0;
  for (const Panel& p : panels) {
    total += p.passes;
    ideal += p.passes > 0 ? 1 : 0;
  }
  constexpr int kWide = 22;
  const int height = kTop + static_cast<int>(total) * (kCell + kGap) + static_cast<int>(ideal) * 8 + 8;
  std::string out = svg_open(kLeft + static_cast<int>(kLanes) * kWide + 20, height, headline(r));
  out += svg_text(10, 18, headline(r), Anchor::start, "#000000", true);
  out += svg_text(10, 35,
                  "served in " + plural(total, "pass", "passes") + " where " + std::to_string(ideal) +
                      " would do; in one pass a bank delivers one 4-byte word, to any number of lanes");
  int x = svg_legend(out, 10, 44, kUsed, "3", "word of lane 3");
  x = svg_legend(out, x, 44, kUsed, "3+", "of lane 3 and others");
  x = svg_legend(out, x, 44, kExtra, "3", "conflict: waits for a pass of its own");
  svg_legend(out, x, 44, kUnused, "", "idle");
  out += svg_text(kLeft - 8, kTop - 5, "lanes, pass", Anchor::end, kGrey);
  out += svg_text(kLeft + static_cast<int>(kLanes) * kWide / 2, kTop - 18, "bank", Anchor::middle, kGrey);
  for (int bank = 0; bank < static_cast<int>(kLanes); ++bank) {
    out += svg_text(kLeft + bank * kWide + kWide / 2, kTop - 5, std::to_string(bank), Anchor::middle, kGrey);
  }
  int y = kTop;
  for (std::size_t k = 0; k < panels.size(); ++k) {
    const Panel& p = panels[k];
    if (p.passes == 0) continue;
    const std::string lanes = std::to_string(k * together) + "-" + std::to_string((k + 1) * together - 1);
    for (std::size_t pass = 0; pass < p.passes; ++pass) {
      out += svg_text(kLeft - 8, y + kCell - 4, (pass == 0 ? lanes + ", " : "") + std::to_string(pass + 1),
                      Anchor::end);
      out += svg_box(kLeft, y, static_cast<int>(kLanes) * kWide, kUnused, "idle");
      for (std::size_t bank = 0; bank < kLanes; ++bank) {
        const int left = kLeft + static_cast<int>(bank) * kWide;
        if (pass >= p.bank[bank].size()) continue;
        const Word& w = p.bank[bank][pass];
        const char* fill = pass == 0 ? kUsed : kExtra;
        out += svg_box(left, y, kWide, fill,
                       "word " + std::to_string(w.word) + ", lanes " + lane_label(w.lanes));
        out += svg_text(left + kWide / 2, y + kCell - 4,
                        std::to_string(w.lanes.front()) + (w.lanes.size() > 1 ? "+" : ""), Anchor::middle,
                        ink(fill));
      }
      y += kCell + kGap;
    }
    y += 8;
  }
  for (std::size_t bank = 1; bank < kLanes; ++bank) {
    const int left = kLeft + static_cast<int>(bank) * kWide;
    out += print("<path d=\"M%d %dV%d\" stroke=\"#ffffff\"/>\n", left, kTop, y);
  }
  return out + "</svg>\n";
}

std::vector<std::string> write_pictures(const Counters& c, const std::string& folder,
                                        const std::string& prefix) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::vector<std::string> files;
  for (const CapturedRequest& r : c.captured) {
    const std::string where = r.line.line > 0 ? "line" + std::to_string(r.line.line) : r.line.function;
    const std::string file =
        folder + "/" + prefix + "-" + where + "-" + (r.shared ? "shared" : r.buffer) + ".svg";
    std::ofstream out(file);
    out << (r.shared ? bank_picture(r) : access_picture(r));
    out.close();
    if (!out) throw std::runtime_error("cannot write " + file);
    files.push_back(file);
  }
  return files;
}

}  // namespace ladder::emu
