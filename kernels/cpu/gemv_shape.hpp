// What every gemv twin checks first.
#pragma once

#include <stdexcept>
#include <string>

#include "harness/device/shape.hpp"

namespace ladder::cpu {

/// Throws std::invalid_argument, naming the twin and what is allowed, unless nt, od and id are all >= 1.
inline void require_valid(const char* twin, const Shape& shape) {
  if (shape.nt < 1 || shape.od < 1 || shape.id < 1) {
    throw std::invalid_argument(std::string(twin) + ": nt, od and id must be >= 1, not " +
                                std::to_string(shape.nt) + ", " + std::to_string(shape.od) + ", " +
                                std::to_string(shape.id));
  }
}

}  // namespace ladder::cpu
