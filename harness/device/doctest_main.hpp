// The main of every test that runs kernels. A CUDA test without a CUDA device is skipped, and says so; it
// never passes.
#pragma once

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>

#include "harness/device/device.hpp"

int main(int argc, char** argv) {
  constexpr int kSkipStatus = 77;  // what Meson takes for "skipped"
  if (ladder::device_count() == 0) {
    std::printf("skipped: no CUDA device, or no driver for one\n");
    return kSkipStatus;
  }
  return doctest::Context(argc, argv).run();
}
