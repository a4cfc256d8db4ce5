// Rows shared out among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace ladder::qwen {

/// Calls work(first, last) for pieces of [0, rows) on up to `threads` threads, and returns when all are done.
/// The first exception of a piece ends the others at their next piece and is thrown here.
/// @param piece rows of a piece, >= 1
template <class Work>
void parallel_rows(int threads, std::int64_t rows, std::int64_t piece, const Work& work) {
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto run = [&] {
    for (std::int64_t first = next.fetch_add(piece); first < rows; first = next.fetch_add(piece)) {
      try {
        work(first, std::min(first + piece, rows));
      } catch (...) {
        const std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
        next = rows;
      }
    }
  };
  std::vector<std::jthread> helpers;
  const std::int64_t useful = std::min<std::int64_t>(threads, (rows + piece - 1) / piece);
  for (std::int64_t i = 1; i < useful; ++i) helpers.emplace_back(run);
  run();
  helpers.clear();  // joins
  if (error) std::rethrow_exception(error);
}

}  // namespace ladder::qwen
