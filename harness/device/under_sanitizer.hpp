// Tests under compute-sanitizer, where a kernel takes a hundred times as long.
#pragma once

#include <cstdlib>

namespace ladder {

/// Whether scripts/sanitize_gpu.sh runs this test (LADDER_SANITIZER=1): the largest shapes and most repetitions are left
/// out then. What a sanitizer looks for happens at every shape with the same tails.
inline bool under_sanitizer() {
  const char* set = std::getenv("LADDER_SANITIZER");
  return set != nullptr && *set != '\0' && *set != '0';
}

}  // namespace ladder
