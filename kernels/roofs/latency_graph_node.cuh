// RUNG      latency_graph_node: the same kernels, recorded once and replayed.  PREV latency_launch: the CPU
//           handed each kernel over
// COMPUTES  counter[0] += nodes when it is given a counter    LAYOUT one word
// MAP       nodes kernels in one chain, each of grid(blocks) block(threads)
// NEEDS     nodes >= 1
// TRAFFIC   none                                          WORK none
// LOOK FOR  Nsight Systems: no CPU activity between the nodes
// EXPECT    about 1 us a node
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "kernels/roofs/latency_launch.cuh"

namespace ladder {

// ANCHOR: latency_graph_node
/// Kernels launched on one stream in capture mode become a chain of graph nodes: each waits for the one
/// before.
inline Graph capture_empty_chain(unsigned* counter, int nodes, int blocks, int threads, Stream& stream) {
  return Graph::capture(stream, [&](Stream& s) {
    for (int i = 0; i < nodes; ++i) {
      if (Status status = launch_latency_launch(counter, blocks, threads, s); !status.ok()) return status;
    }
    return Status{};
  });
}
// ANCHOR_END: latency_graph_node

}  // namespace ladder
