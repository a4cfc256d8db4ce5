// The engine: a model loaded on one executor, and its KV cache. Three implementations behind one interface.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "chapters/09-qwen/model.hpp"
#include "chapters/09-qwen/sampler.hpp"
#include "harness/device/device_info.hpp"
#include "kernels/dispatch/dispatch.hpp"

namespace ladder::qwen {

struct EngineOptions {
  int context = 0;              ///< tokens of KV cache; 0: the model's context_length, at most 4096
  bool kv_f16 = true;           ///< f16 or f32 keys and values
  int threads = 0;              ///< cpu: 0 is one for each CPU
  int batch = 512;              ///< largest number of rows of one prefill pass (longer prompts go in pieces)
  bool exact = false;           ///< multiply with f32 activations, on any executor, instead of rounding them
  dispatch::Switches switches;  ///< of the device engine; nothing else reads the environment
  dispatch::Table gates = dispatch::default_table();  ///< which kernel multiplies, on the device
  /// Called while weights load, with bytes done and bytes in all; the last call has done == total. May be
  /// empty.
  std::function<void(std::uint64_t, std::uint64_t)> on_progress;
};

/// What the engine did so far, for reports.
struct EngineInfo {
  std::string executor;  ///< "gpu", "emulator" or "cpu"
  std::string device;    ///< the device's name
  std::string kernels;   ///< one line: which kernels multiply (for the user)
  int kernels_per_token =
      0;  ///< launches for a single token; 0 before the first one, and where nothing is launched
};

class Engine {
 public:
  virtual ~Engine() = default;
  [[nodiscard]] virtual const EngineInfo& info() const = 0;
  [[nodiscard]] virtual int context() const = 0;   ///< tokens that fit in the KV cache
  [[nodiscard]] virtual int position() const = 0;  ///< tokens in the KV cache

  /// Runs `tokens` (ids, 0 <= id < vocabulary) at positions position(), position()+1, ... and appends them to
  /// the KV cache.
  /// @param logits [rows][vocabulary], f32: rows == 1 asks for the last token's logits only, rows ==
  ///        tokens.size() for
  ///        every token's; empty for none
  /// Throws std::invalid_argument for a token out of range, an empty batch or a wrong logits size,
  /// ContextFull when the tokens do not fit (nothing is then changed).
  virtual void evaluate(std::span<const std::int32_t> tokens, std::span<float> logits) = 0;

  /// Room for a token's logits that belongs to the engine: evaluate() has nothing to copy when it is given this span.
  /// Empty for an engine to which all memory is the same.
  [[nodiscard]] virtual std::span<float> logits_room() { return {}; }

  /// Prepares follow(). false: this engine does not draw so.
  [[nodiscard]] virtual bool can_follow(const Drawing& drawing) {
    (void)drawing;
    return false;
  }
  /// Runs `token`, then the token that the last can_follow() draws after it, and so on, without a look at the logits in
  /// between: drawn.size() tokens, the last of which is drawn and not run. A token that cannot be drawn, as
  /// logits are no numbers, is -1, and nothing after it means anything.
  /// Throws std::invalid_argument for a token out of range and no room, ContextFull when the tokens do not fit.
  virtual void follow(std::int32_t token, std::span<std::int32_t> drawn) {
    (void)token, (void)drawn;
    throw std::logic_error("this engine has no follow()");
  }

  /// Forgets all tokens from `position` on. 0 <= position <= position().
  virtual void truncate(int position) = 0;
};

class ContextFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Options with what they leave open filled in: the context, and a batch that is not larger. Throws
/// std::invalid_argument for a negative context or number of threads and for a batch below 1.
[[nodiscard]] EngineOptions completed(EngineOptions options, const Hyperparameters& hp);
/// What would make a model fit that does not, to end a sentence: "; -c 1024 would fit".
/// @param fixed bytes that it needs whatever the context is @param token bytes for each token of the context
[[nodiscard]] std::string what_would_fit(std::uint64_t available, std::uint64_t fixed, std::uint64_t token);
/// Throws what Engine::evaluate says. @param logits how many floats there is room for
void check_evaluate(const Engine& engine, int vocabulary, std::span<const std::int32_t> tokens,
                    std::size_t logits);
/// Throws what Engine::follow says. @param steps how many tokens it is to run
void check_follow(const Engine& engine, int vocabulary, std::int32_t token, std::size_t steps);
/// Throws what Engine::truncate says: std::invalid_argument for a position beyond the cache.
void check_truncate(const Engine& engine, int position);

/// The CPU twins: threads and SIMD.
[[nodiscard]] std::unique_ptr<Engine> make_cpu_engine(const Model& model, const EngineOptions& options);
/// The device of this build: the GPU in a CUDA build, the emulator otherwise (engine_device.cu).
[[nodiscard]] std::unique_ptr<Engine> make_device_engine(const Model& model, const EngineOptions& options);
/// "gpu" or "emulator": what make_device_engine makes.
[[nodiscard]] const char* device_executor();
/// Whether there is such a device; always true for the emulator.
[[nodiscard]] bool device_present();
/// What kernels are chosen by: the GPU, or the one that the emulator models.
[[nodiscard]] DeviceInfo build_device();

/// The rotations of RoPE, NEOX pairing: for pair i of a head (i < head_dim/2) at `position`, with YaRN where
/// the model asks for it. Computed in f64, rounded once.
/// @param cosines, sines [head_dim/2]
void rope_row(const Hyperparameters& hp, int position, std::span<float> cosines, std::span<float> sines);

}  // namespace ladder::qwen
