// A rung of the ladder: one matmul kernel with everything the harness needs to check it, time it and place it
// under the roofs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/experiment/traffic.hpp"

namespace ladder {

namespace cpu {
class ThreadPool;
}

/// An operand on its way into a launcher, which takes it as a pointer to whatever it reads it as: `const float*`,
/// blocks of a packed type, `const void*` for a launcher that serves several types.
class OperandPointer {
 public:
  OperandPointer(const void* p) : p_(p) {}
  template <class T>
  operator const T*() const {
    return static_cast<const T*>(p_);
  }

 private:
  const void* p_;
};
using WeightsPointer = OperandPointer;
using ActsPointer = OperandPointer;

/// Weights in another order than a file's, made once, when they are loaded.
struct WeightLayout {
  const char* name;  ///< "tiles"
  /// Bytes that a matrix takes in this order.
  std::size_t (*bytes)(WeightType type, Shape shape);
  /// From a file's blocks, both in device memory. Does not synchronise.
  Status (*repack)(WeightType type, const void* blocks, void* out, Shape shape, Stream& stream);
};

/// How a kernel wants its operands.
struct OperandForm {
  OperandForm(WeightType t = WeightType::f32, ActivationFormat a = ActivationFormat::f32,
              const WeightLayout* l = nullptr)
      : type(t), acts(a), layout(l) {}
  WeightType type;
  ActivationFormat acts;
  const WeightLayout* layout;  ///< null: the order of a file
  bool operator==(const OperandForm&) const = default;
};

/// What a matmul launcher takes. `weights` are packed as the rung's WeightType says, row-major [od], a row being
/// id / block_elems blocks of block_bytes bytes, or in the rung's layout; `acts` are in its ActivationFormat.
using DeviceMatmul =
    std::function<Status(WeightsPointer weights, ActsPointer acts, float* out, Shape shape, Stream& stream)>;
using CpuMatmul = std::function<void(WeightsPointer weights, ActsPointer acts, float* out, Shape shape,
                                     cpu::ThreadPool& pool)>;

/// Which unit of a GPU does a rung's arithmetic: its peak is the rung's compute roof, and its operations are counted.
/// On the CPU the roof is the f32 peak in any case.
enum class MathUnit {
  f32,        ///< multiply-adds of the ordinary cores, FLOP
  mma_f16,    ///< mma.sync with f16 operands, FLOP
  mma_s8,     ///< mma.sync with int8 operands, integer operations
  wgmma_f16,  ///< wgmma with f16 operands, FLOP
};

struct Rung {
  std::string id;       ///< one id in file, kernel, launcher, test, record and plot label
  std::string chapter;  ///< "01-scalar-gemv"
  std::string title;    ///< the idea in a few words
  /// File that holds the kernel between ANCHOR lines named after the id, or a list "file#anchor,file#anchor" of code
  /// that rungs share, the kernel first.
  std::string source;
  std::string cpu_source;  ///< such a list for the CPU twin, if its anchor is not cpu_<id>
  WeightType weight_type = WeightType::f32;
  ActivationFormat acts = ActivationFormat::f32;
  const WeightLayout* layout = nullptr;  ///< null: weights in the order of a file
  MathUnit math = MathUnit::f32;
  /// Largest relative error of a weight as the kernel multiplies it, 2^-11 where it is rounded to f16 on the way; 0 where
  /// weights are what the file says. The error bound grows by this times the sum of |terms|.
  double operand_rounding = 0;
  /// Which shapes the kernel takes on this device; the error says what would be allowed.
  std::function<Status(Shape, const DeviceInfo&)> supported;
  DeviceMatmul device;  ///< launcher for `gpu` and `emulator`; empty if there is none
  CpuMatmul cpu;        ///< the CPU twin; empty if there is none
  /// Upper bound on the f32 roundings any single term meets on its way into an output (see check_outputs).
  std::function<double(Shape, Executor)> roundings;
  std::string peer_name;  ///< set for somebody else's kernel that is only measured against
  std::string peer_version;

  OperandForm form() const { return {weight_type, acts, layout}; }
  Traffic traffic(const Shape& s) const { return compulsory_traffic(weight_type, acts, s); }
  Work work(const Shape& s) const { return {matmul_ops(s), math == MathUnit::mma_s8 ? "int8_op" : "flop"}; }
  bool runs_on(Executor e) const {
    return e == Executor::cpu ? static_cast<bool>(cpu) : static_cast<bool>(device);
  }
};

/// Accepts every shape with positive axes.
inline Status any_shape(Shape s, const DeviceInfo&) {
  if (s.nt >= 1 && s.od >= 1 && s.id >= 1) return {};
  return Status::error("nt, od and id must all be at least 1");
}

/// Accepts every shape with positive axes whose rows are whole blocks of `type`.
inline Status whole_blocks(WeightType type, Shape s) {
  if (Status ok = any_shape(s, {}); !ok.ok()) return ok;
  const WeightTypeInfo& t = info(type);
  if (s.id % t.block_elems == 0) return {};
  return Status::error("id must be a multiple of " + std::to_string(t.block_elems) + ", the block of " +
                       t.name + ", not " + std::to_string(s.id));
}

}  // namespace ladder
