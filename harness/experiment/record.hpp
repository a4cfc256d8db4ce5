// One measurement: what was run, what it moved, how long it took, and how much of the roof that is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "harness/device/device_info.hpp"
#include "harness/device/shape.hpp"
#include "harness/experiment/json.hpp"

namespace ladder {

/// Median and quartiles of a set of samples, in ns, and why sampling stopped.
struct TimeStats {
  double median = 0, q1 = 0, q3 = 0;
  int n = 0;
  bool stopped_by_iqr = false;  ///< false: the time limit ended it
  double sm_mhz = 0;            ///< clock of a GPU's multiprocessors while it was measured; 0: unknown
};

/// Quartiles by linear interpolation between order statistics. `samples` must not be empty.
inline TimeStats summarize(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double q) {
    const double pos = q * static_cast<double>(samples.size() - 1);
    const auto i = static_cast<std::size_t>(pos);
    const double frac = pos - static_cast<double>(i);
    return i + 1 < samples.size() ? samples[i] * (1 - frac) + samples[i + 1] * frac : samples[i];
  };
  TimeStats s;
  s.median = at(0.5);
  s.q1 = at(0.25);
  s.q3 = at(0.75);
  s.n = static_cast<int>(samples.size());
  return s;
}

/// Bytes that an operation must move when each operand is moved once.
struct Traffic {
  double weights = 0, acts = 0, out = 0;
  constexpr double total() const { return weights + acts + out; }
};

/// Operations and their unit: "flop" (a multiply and an add count two) or "int8_op".
struct Work {
  double count = 0;
  const char* unit = "flop";
};

/// The ceilings that a measurement is placed under, taken in the same run.
struct Roof {
  double bandwidth_gbps = 0;  ///< read-only bandwidth, 1e9 bytes/s
  double peak_gops = 0;       ///< 1e9 operations/s of the unit that does the work
  const char* unit = "flop";
  const char* source = "measured";
};

/// One line of data/runs/<device>/<chapter>.jsonl. Optional parts that do not apply are left out of the line.
struct Record {
  std::string rung;
  Executor executor = Executor::cpu;
  std::string device;  ///< slug
  std::string type;    ///< weight type, e.g. "f32"; empty for probes
  std::optional<Shape> shape;
  std::string layer;  ///< e.g. "7b.ffn_down"; empty when the shape was given by numbers
  std::string mode;   ///< "cold", "hot", or empty
  std::optional<Traffic> traffic;
  std::optional<double> bytes_total;  ///< for probes that have one figure only
  std::optional<Work> work;
  std::optional<TimeStats> time;
  std::optional<Roof> roof;
  std::string bound;  ///< "memory", "compute", "latency", or empty
  std::optional<bool> valid;
  std::string why_not;
  std::optional<double> check_max_error_over_bound;
  std::optional<bool> check_exact_case;
  std::string counters_json;  ///< the `counters` object, as JSON; empty without counters
  JsonObject params, peer;

  double moved_bytes() const { return traffic ? traffic->total() : bytes_total.value_or(0.0); }

  /// The least time the roofs allow, in ns; 0 without roofs.
  double floor_ns() const {
    if (!roof) return 0;
    double t = 0;
    if (roof->bandwidth_gbps > 0) t = std::max(t, moved_bytes() / roof->bandwidth_gbps);
    if (work && roof->peak_gops > 0) t = std::max(t, work->count / roof->peak_gops);
    return t;
  }

  std::string json() const {
    JsonObject o;
    o.add("schema", 1).add("rung", rung).add("executor", to_string(executor)).add("device", device);
    if (!type.empty()) o.add("type", type);
    if (shape) o.add("shape", JsonObject().add("nt", shape->nt).add("od", shape->od).add("id", shape->id));
    if (!layer.empty()) o.add("layer", layer);
    if (!mode.empty()) o.add("mode", mode);
    if (!params.empty()) o.add("params", params);
    if (traffic) {
      o.add("bytes", JsonObject()
                         .add("weights", static_cast<long long>(traffic->weights))
                         .add("acts", static_cast<long long>(traffic->acts))
                         .add("out", static_cast<long long>(traffic->out))
                         .add("total", static_cast<long long>(traffic->total())));
    } else if (bytes_total) {
      o.add("bytes", JsonObject().add("total", static_cast<long long>(*bytes_total)));
    }
    if (work) {
      o.add("work", JsonObject().add("count", static_cast<long long>(work->count)).add("unit", work->unit));
    }
    if (work && moved_bytes() > 0) o.add("intensity", work->count / moved_bytes());
    if (time) {
      o.add("time_ns", JsonObject()
                           .add("median", time->median)
                           .add("q1", time->q1)
                           .add("q3", time->q3)
                           .add("n", time->n)
                           .add("stop", time->stopped_by_iqr ? "iqr" : "time_limit"));
      if (time->sm_mhz > 0) o.add("sm_mhz", time->sm_mhz);
      if (moved_bytes() > 0) o.add("gbps", moved_bytes() / time->median);
      if (work) o.add("gops", work->count / time->median);
    }
    if (roof) {
      JsonObject r;
      if (roof->bandwidth_gbps > 0) r.add("bandwidth_gbps", roof->bandwidth_gbps);
      if (roof->peak_gops > 0) r.add("peak_gops", roof->peak_gops).add("unit", roof->unit);
      r.add("source", roof->source);
      o.add("roof", r);
      if (time && floor_ns() > 0) o.add("percent_of_roof", 100.0 * floor_ns() / time->median);
    }
    if (!bound.empty()) o.add("bound", bound);
    if (valid) o.add("valid", *valid);
    if (!why_not.empty()) o.add("why_not", why_not);
    if (check_max_error_over_bound || check_exact_case) {
      JsonObject c;
      if (check_max_error_over_bound) c.add("max_error_over_bound", *check_max_error_over_bound);
      if (check_exact_case) c.add("exact_case", *check_exact_case);
      o.add("check", c);
    }
    if (!counters_json.empty()) o.raw("counters", counters_json);
    if (!peer.empty()) o.add("peer", peer);
    return o.str();
  }
};

}  // namespace ladder
