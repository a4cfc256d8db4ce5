// Tensor-core instructions: the lanes of a warp meet, the product is worked out from the operands of all, and
// each takes its own part of the result. The layouts are those of the headers in kernels/device/.

#include <bit>
#include <cstring>

#include "harness/emulator/building_blocks.hpp"
#include "harness/emulator/hooks.hpp"

#define LADDER_EMU_HERE reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))

namespace ladder::emu {
namespace {

/// What a lane has of a product: A and B, and C, which becomes D.
template <class D, int A, int B>
struct Operands {
  std::uint32_t a[A], b[B];
  D d[4];
};

/// The product of a warp. The words of a row of A lie in the four lanes of a group, those of a column of B too: word
/// w < 4 in the lower registers, w >= 4 in the upper ones. Part::of(word, p) is part p of a word as a Part::Value; an
/// element of D is its C and then the products one after the other, as a Part::Sum.
template <class Part, class D, int A, int B>
void multiply_warp(void* operands) {
  auto* all = static_cast<Operands<D, A, B>*>(operands);
  constexpr unsigned kWords = 4 * B, kParts = Part::kParts, kColumns = 8;
  typename Part::Value y[kWords * kParts][kColumns];
  for (unsigned w = 0; w < kWords; ++w) {
    for (unsigned column = 0; column < kColumns; ++column) {
      const std::uint32_t word = all[4 * column + w % 4].b[w / 4];
      for (unsigned p = 0; p < kParts; ++p) y[kParts * w + p][column] = Part::of(word, p);
    }
  }
  for (unsigned row = 0; row < 16; ++row) {
    const unsigned group = row % 8, lower = row / 8;
    typename Part::Sum sum[kColumns];
    const auto d = [&](unsigned column) -> D& {
      return all[4 * group + column / 2].d[2 * lower + column % 2];
    };
    for (unsigned column = 0; column < kColumns; ++column) {
      sum[column] = static_cast<typename Part::Sum>(d(column));
    }
    for (unsigned w = 0; w < kWords; ++w) {
      const std::uint32_t word = all[4 * group + w % 4].a[lower + w / 4 * 2];
      for (unsigned p = 0; p < kParts; ++p) {
        const typename Part::Value x = Part::of(word, p);
        for (unsigned column = 0; column < kColumns; ++column) {
          sum[column] += static_cast<typename Part::Sum>(x * y[kParts * w + p][column]);
        }
      }
    }
    for (unsigned column = 0; column < kColumns; ++column) d(column) = static_cast<D>(sum[column]);
  }
}

template <class Part, class D, int A, int B>
void multiply(D (&d)[4], const std::uint32_t (&a)[A], const std::uint32_t (&b)[B], Instruction which,
              std::uintptr_t pc) {
  using Mine = Operands<D, A, B>;
  Mine mine;
  std::memcpy(mine.a, a, sizeof a);
  std::memcpy(mine.b, b, sizeof b);
  std::memcpy(mine.d, d, sizeof d);
  const void* all = warp_gather_at(&mine, sizeof mine, multiply_warp<Part, D, A, B>, which, pc);
  std::memcpy(d, static_cast<const Mine*>(all)[lane_index()].d, sizeof d);
}

struct Int8s {
  using Value = int;
  using Sum = std::uint32_t;  // wraps around
  static constexpr unsigned kParts = 4;
  static int of(std::uint32_t word, unsigned p) { return static_cast<std::int8_t>(word >> (8 * p) & 0xffu); }
};

struct Halves {
  using Value = double;
  using Sum = double;
  static constexpr unsigned kParts = 2;
  static double of(std::uint32_t word, unsigned p) {
    return static_cast<double>(half_bits_to_float(static_cast<std::uint16_t>(word >> (16 * p))));
  }
};

struct Tf32 {
  using Value = double;
  using Sum = double;
  static constexpr unsigned kParts = 1;
  static double of(std::uint32_t word, unsigned) {
    constexpr std::uint32_t kKept = 0xffffe000u;  // 10 bits of fraction
    return static_cast<double>(std::bit_cast<float>(word & kKept));
  }
};

}  // namespace

unsigned lane_index() noexcept { return current.lane != nullptr ? current.lane->linear % 32 : 0; }

void mma_m16n8k16_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  multiply<Halves>(d, a, b, Instruction::mma_f16, LADDER_EMU_HERE);
}

void mma_m16n8k8_f16(float (&d)[4], const std::uint32_t (&a)[2], const std::uint32_t (&b)[1]) {
  multiply<Halves>(d, a, b, Instruction::mma_f16, LADDER_EMU_HERE);
}

void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  multiply<Tf32>(d, a, b, Instruction::mma_f16, LADDER_EMU_HERE);
}

void mma_m16n8k16_s8(int (&d)[4], const std::uint32_t (&a)[2], const std::uint32_t (&b)[1]) {
  multiply<Int8s>(d, a, b, Instruction::mma_s8, LADDER_EMU_HERE);
}

void mma_m16n8k32_s8(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  multiply<Int8s>(d, a, b, Instruction::mma_s8, LADDER_EMU_HERE);
}

void ldmatrix(std::uint32_t* fragment, const void* row, int matrices, bool transposed) {
  const std::uintptr_t pc = LADDER_EMU_HERE;
  const unsigned lane = lane_index(), count = static_cast<unsigned>(matrices);
  struct Row {
    std::uint16_t element[8];
  };
  Row mine;
  std::memset(&mine, 0xff, sizeof mine);
  if (lane < 8 * count) {  // the other lanes' addresses are ignored, as on the hardware
    observe(row, sizeof mine, Access::read, reinterpret_cast<const void*>(pc));
    if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0 || !current.worker->in_shared(row, 16)) {
      current.recording = false;
      fail(("ldmatrix of a row that is not 16 aligned bytes of shared memory, at " +
            to_string(source_line(pc)))
               .c_str());
    }
    std::memcpy(&mine, row, sizeof mine);
  }
  const auto* all =
      static_cast<const Row*>(warp_gather_at(&mine, sizeof mine, nullptr, Instruction::ldmatrix, pc));
  for (unsigned m = 0; m < count; ++m) {
    const unsigned group = lane / 4, pair = 2 * (lane % 4);
    const std::uint16_t low =
        transposed ? all[8 * m + pair].element[group] : all[8 * m + group].element[pair];
    const std::uint16_t high =
        transposed ? all[8 * m + pair + 1].element[group] : all[8 * m + group].element[pair + 1];
    fragment[m] = std::uint32_t{high} << 16 | low;
  }
}

}  // namespace ladder::emu
