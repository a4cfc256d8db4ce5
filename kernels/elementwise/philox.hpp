// Random numbers that need no state: the n-th is a function of a seed and of n, and the same on host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LADDER_HOST_DEVICE __host__ __device__
#else
#define LADDER_HOST_DEVICE
#endif

namespace ladder {

struct PhiloxWords {
  std::uint32_t word[4];
};

/// Philox4x32-10, a counter-based generator: a bijection of the counter that looks random for each key, so
/// the n-th number is had without the ones before it. Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
/// as easy as 1, 2, 3", SC 2011.
LADDER_HOST_DEVICE constexpr PhiloxWords philox4x32(PhiloxWords counter, std::uint32_t key0,
                                                    std::uint32_t key1) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter.word[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter.word[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<std::uint32_t>(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

/// A multiple of 2^-53 in [0, 1), the same for the same (seed, position).
LADDER_HOST_DEVICE constexpr double uniform(std::uint64_t seed, std::uint64_t position) {
  const PhiloxWords random =
      philox4x32({{static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32), 0, 0}},
                 static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  const std::uint64_t bits = static_cast<std::uint64_t>(random.word[1]) << 32 | random.word[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace ladder

#undef LADDER_HOST_DEVICE
