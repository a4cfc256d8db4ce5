// Two programs with one command line: `qwen` has the CPU and the emulator, `qwen_cuda` the CPU and the GPU.
// Whichever is started hands over to the other when that one has what was asked for.
#pragma once

#include <string_view>

namespace ladder::qwen {

/// The executor to use for `--on`, if it is in this program: true for its device, false for the CPU.
/// Otherwise does not return: the other program takes the place of this one, with the same arguments. "auto"
/// is the GPU where there is one (and the program for it), else the CPU; never the emulator. Throws
/// CommandError when the other program is not built, and for a device that is not there.
[[nodiscard]] bool choose_device(std::string_view on);

}  // namespace ladder::qwen
