// Tensor-core instructions: the lanes of a warp meet, each gets the operands of all, and works out its own
// part of the result. The layouts are those of the headers in kernels/device/.

#include <bit>
#include <cstring>

#include "harness/emulator/building_blocks.hpp"
#include "harness/emulator/hooks.hpp"

#define LADDER_EMU_HERE reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))

namespace ladder::emu {
namespace {

template <int A, int B>
struct Operands {
  std::uint32_t a[A], b[B];
};

/// Adds up the products for the four elements of D that this lane holds. The words of a row of A lie in the
/// four lanes of a group, those of a column of B too: word w < 4 in the lower registers, w >= 4 in the upper
/// ones. `add(sum, x, y)` adds the products of the parts of two words.
template <class Sum, int A, int B, class D, class Add>
void multiply(D (&d)[4], const std::uint32_t (&a)[A], const std::uint32_t (&b)[B], Instruction which,
              std::uintptr_t pc, Add add) {
  Operands<A, B> mine;
  std::memcpy(mine.a, a, sizeof a);
  std::memcpy(mine.b, b, sizeof b);
  Operands<A, B> all[32];
  warp_gather_at(&mine, all, sizeof mine, which, pc);
  const unsigned group = lane_index() / 4, member = lane_index() % 4;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned lower_row = i / 2;            // 0: row `group`, 1: row `group` + 8
    const unsigned column = 2 * member + i % 2;  // 0..7
    auto sum = static_cast<Sum>(d[i]);
    for (unsigned w = 0; w < 4 * B; ++w) {  // words along k
      const std::uint32_t x = all[4 * group + w % 4].a[lower_row + w / 4 * 2];
      const std::uint32_t y = all[4 * column + w % 4].b[w / 4];
      sum = add(sum, x, y);
    }
    d[i] = static_cast<D>(sum);
  }
}

std::uint32_t add_s8(std::uint32_t sum, std::uint32_t x, std::uint32_t y) {
  for (unsigned byte = 0; byte < 4; ++byte) {
    sum += static_cast<std::uint32_t>(static_cast<std::int8_t>(x >> (8 * byte) & 0xffu) *
                                      static_cast<std::int8_t>(y >> (8 * byte) & 0xffu));
  }
  return sum;
}

double add_f16(double sum, std::uint32_t x, std::uint32_t y) {
  for (unsigned part = 0; part < 2; ++part) {
    sum += static_cast<double>(half_bits_to_float(static_cast<std::uint16_t>(x >> (16 * part)))) *
           static_cast<double>(half_bits_to_float(static_cast<std::uint16_t>(y >> (16 * part))));
  }
  return sum;
}

}  // namespace

unsigned lane_index() noexcept { return current.lane != nullptr ? current.lane->linear % 32 : 0; }

void mma_m16n8k16_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  multiply<double>(d, a, b, Instruction::mma_f16, LADDER_EMU_HERE, add_f16);
}

void mma_m16n8k8_f16(float (&d)[4], const std::uint32_t (&a)[2], const std::uint32_t (&b)[1]) {
  multiply<double>(d, a, b, Instruction::mma_f16, LADDER_EMU_HERE, add_f16);
}

void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  multiply<double>(d, a, b, Instruction::mma_f16, LADDER_EMU_HERE,
                   [](double sum, std::uint32_t x, std::uint32_t y) {
                     constexpr std::uint32_t kKept = 0xffffe000u;  // 10 bits of fraction
                     return sum + static_cast<double>(std::bit_cast<float>(x & kKept)) *
                                      static_cast<double>(std::bit_cast<float>(y & kKept));
                   });
}

void mma_m16n8k16_s8(int (&d)[4], const std::uint32_t (&a)[2], const std::uint32_t (&b)[1]) {
  multiply<std::uint32_t>(d, a, b, Instruction::mma_s8, LADDER_EMU_HERE, add_s8);
}

void mma_m16n8k32_s8(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  multiply<std::uint32_t>(d, a, b, Instruction::mma_s8, LADDER_EMU_HERE, add_s8);
}

void ldmatrix(std::uint32_t* fragment, const void* row, int matrices, bool transposed) {
  const std::uintptr_t pc = LADDER_EMU_HERE;
  const unsigned lane = lane_index(), count = static_cast<unsigned>(matrices);
  struct Row {
    std::uint16_t element[8];
  };
  Row mine, all[32];
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
  warp_gather_at(&mine, all, sizeof mine, Instruction::ldmatrix, pc);
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
