// What the emulator does in place of the tensor-core and asynchronous instructions. Kernels do not call
// these: each is the host side of one device function in kernels/device/, whose header says what it computes.
//
// They are functions of the library, not inline: the library is not instrumented, so the work of emulating an
// instruction is not counted as the kernel's own.
#pragma once

#include <cstdint>

#include "harness/emulator/cuda.hpp"

namespace ladder::emu {

/// 0..31: the place of the calling thread in its warp.
[[gnu::const]] unsigned lane_index() noexcept;

/// mma.cuh. d += a . b of the warp's fragments; counted as one mma.
LADDER_EMU_MEETING void mma_m16n8k16_f16(float (&d)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]);
LADDER_EMU_MEETING void mma_m16n8k8_f16(float (&d)[4], const std::uint32_t (&a)[2],
                                        const std::uint32_t (&b)[1]);
LADDER_EMU_MEETING void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]);
LADDER_EMU_MEETING void mma_m16n8k16_s8(int (&d)[4], const std::uint32_t (&a)[2],
                                        const std::uint32_t (&b)[1]);
LADDER_EMU_MEETING void mma_m16n8k32_s8(int (&d)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2]);

/// ldmatrix.cuh. One 16-byte read of shared memory for each of the first 8 * `matrices` lanes.
LADDER_EMU_MEETING void ldmatrix(std::uint32_t* fragment, const void* row, int matrices, bool transposed);

/// cp_async.cuh. The destination is poisoned until the copy is waited for.
void cp_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes, bool through_l1);
void cp_async_commit_group();
void cp_async_wait_group(unsigned groups_left);
void cp_async_wait_all();

/// mbarrier.cuh.
void mbarrier_init(std::uint64_t* b, unsigned arrivals);
void mbarrier_arrive(std::uint64_t* b, unsigned arrivals, unsigned expected_bytes);
void mbarrier_expect_bytes(std::uint64_t* b, unsigned bytes);
void mbarrier_wait(std::uint64_t* b, unsigned parity);

/// tma.cuh. The destination is poisoned until a thread waits for the mbarrier.
void bulk_copy(void* shared, const void* global, unsigned bytes, std::uint64_t* b);

/// Ends the launch with an error: `what` has no emulated body.
[[noreturn]] void needs_gpu(const char* what);

}  // namespace ladder::emu
