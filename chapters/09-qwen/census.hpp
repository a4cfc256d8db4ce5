// What a model's header says about its speed: bytes by tensor type, bytes that one token reads, and the rate
// that a memory bandwidth allows. No weights are read: a header is enough.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "chapters/09-qwen/model.hpp"

namespace ladder::qwen {

/// A device by its memory bandwidth.
struct Bandwidth {
  std::string name;
  double gbps;  ///< 1e9 bytes per second
};

struct Census {
  struct Type {
    WeightType type{};
    std::int64_t tensors = 0, elements = 0, bytes = 0;
  };
  /// A bound, not a forecast: bandwidth over the bytes that a token must read.
  struct Ceiling {
    std::string device;
    double gbps = 0;
    double tokens_per_second = 0;
  };
  std::string name, size_label, file_type;
  Hyperparameters hp;
  bool tied = false;
  std::size_t parts = 0;
  std::uint64_t file_bytes = 0;  ///< of the files as they are here, which may be headers alone
  std::int64_t parameters = 0, tensor_bytes = 0;
  std::int64_t bytes_per_token = 0;                 ///< weights that one decoded token reads
  std::int64_t kv_bytes_f16 = 0, kv_bytes_f32 = 0;  ///< of the KV cache, for each token of context
  int context = 0;                                  ///< tokens of context that the ceilings count in, f16
  std::vector<Type> types;                          ///< most bytes first
  std::vector<Ceiling> ceilings;                    ///< in the order of the devices
};

/// @param context tokens already in the cache, whose keys and values (f16) are read too; 0 to
/// hp.context_length Throws std::invalid_argument: a bandwidth that is not a positive number, a context out
/// of range.
[[nodiscard]] Census census(const Model& model, std::span<const Bandwidth> devices, int context = 0);

/// A table for people.
void print_text(std::ostream& out, const Census& census);
/// One JSON object on one line.
[[nodiscard]] std::string to_json(const Census& census);

}  // namespace ladder::qwen
