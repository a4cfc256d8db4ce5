// RUNG      set_step: a position and up to eight token ids from a launch's arguments into device memory.
// PREV      none: a copy from the host would wait for the stream, and a graph cannot be replayed with other arguments
// COMPUTES  out[0] = position, out[1 + t] = tokens[t]        LAYOUT int32
// MAP       grid(1) block(32): thread -> one number
// NEEDS     nt 1..8 (checked by the launcher, and said in its error)
// TRAFFIC   4*(nt+1) B written     WORK none
// LOOK FOR  SASS: LDC, one STG.E
// EXPECT    the time of a launch, hidden behind the host's own work
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

inline constexpr int kMostStepTokens = 8;

/// Passed by value: a launch has its own copy, so the host may go on.
struct StepTokens {
  std::int32_t id[kMostStepTokens];
};

__global__ void __launch_bounds__(32) set_step(std::int32_t* out,  // [1 + nt]
                                               std::int32_t position, StepTokens tokens, int nt) {
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0) out[0] = position;
#pragma unroll
  for (int t = 0; t < kMostStepTokens; ++t) {  // by constant places: arguments have no addresses in registers
    if (i == t && t < nt) out[1 + t] = tokens.id[t];
  }
}

/// out[0] = position, out[1..] = tokens, in stream order: what a forward pass reads from device memory. Does not
/// synchronise.
inline Status launch_set_step(std::int32_t* out, int position, std::span<const std::int32_t> tokens,
                              Stream& stream) {
  if (tokens.empty() || tokens.size() > kMostStepTokens) {
    return Status::error("set_step: 1 to " + std::to_string(kMostStepTokens) + " tokens at once, not " +
                         std::to_string(tokens.size()));
  }
  StepTokens copy{};
  for (std::size_t t = 0; t < tokens.size(); ++t) copy.id[t] = tokens[t];
  return launch(set_step, dim3(1), dim3(32), 0, stream, out, position, copy, static_cast<int>(tokens.size()));
}

}  // namespace ladder
