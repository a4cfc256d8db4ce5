// The program: `qwen` from the host compiler (CPU and emulator), `qwen_cuda` from nvcc (CPU and GPU).
#include "chapters/09-qwen/commands.hpp"

int main(int argc, char** argv) { return ladder::qwen::command_line(argc, argv); }
