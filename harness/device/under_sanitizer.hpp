// Tests under compute-sanitizer, where a kernel takes a hundred times as long.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <vector>

namespace ladder {

/// Whether scripts/sanitize_gpu.sh runs this test (LADDER_SANITIZER=1): the largest shapes and most repetitions are left
/// out then. What a sanitizer looks for happens at every shape with the same tails.
inline bool under_sanitizer() {
  const char* set = std::getenv("LADDER_SANITIZER");
  return set != nullptr && *set != '\0' && *set != '0';
}

/// Under a sanitizer every n-th of `all`, beginning with number `from` % n; otherwise all. With another `from` in each
/// step of a loop around it, every one has its turn.
template <class T>
std::vector<T> sampled(const std::vector<T>& all, std::size_t n, std::size_t from = 0) {
  if (!under_sanitizer()) return all;
  std::vector<T> part;
  for (std::size_t i = from % n; i < all.size(); i += n) part.push_back(all[i]);
  return part;
}

}  // namespace ladder
