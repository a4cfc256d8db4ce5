// What the tests of every matmul chapter share: the shapes that find bugs, and the loop over them.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "harness/device/under_sanitizer.hpp"
#include "harness/experiment/experiment.hpp"
#include "harness/experiment/main.hpp"

namespace ladder::testing {

/// A context on `executor`, without measured roofs.
inline Context context_on(Executor executor) {
  Options o;
  o.executor = executor;
  return make_context(o, true);
}

/// The executors of this build.
inline std::vector<Executor> executors() {
#if defined(__CUDACC__)
  return {Executor::gpu};
#else
  return {Executor::emulator, Executor::cpu};
#endif
}

/// 1, a tile less one, a tile, a tile and one, primes, and rows of real models; never od == id.
inline std::vector<Shape> ragged_shapes() {
  std::vector<Shape> shapes;
  for (const long long nt : {1, 2, 7, 8, 9, 64, 65}) {
    for (const auto& [od, id] : {std::pair<long long, long long>{1, 4},
                                 {7, 8},
                                 {8, 12},
                                 {9, 256},
                                 {31, 260},
                                 {128, 264},
                                 {127, 1000},
                                 {17, 3},
                                 {5, 31},
                                 {3, 257},
                                 {2, 1}}) {
      shapes.push_back({nt, od, id});
    }
  }
  shapes.push_back({1, 67, 4864});
  shapes.push_back({3, 131, 896});
  shapes.push_back({512, 5, 40});
  return shapes;
}

/// As ragged_shapes, for weights in blocks of 32 and 256: one block, a pass of a warp and one more, odd
/// numbers of blocks, rows of real models.
inline std::vector<Shape> block_shapes() {
  std::vector<Shape> shapes;
  for (const long long nt : {1, 2, 9}) {
    for (const auto& [od, id] : {std::pair<long long, long long>{1, 32},
                                 {7, 96},
                                 {8, 256},
                                 {9, 512},
                                 {5, 544},
                                 {13, 1280},
                                 {3, 1056},
                                 {17, 768}}) {
      shapes.push_back({nt, od, id});
    }
  }
  shapes.push_back({1, 11, 4864});
  shapes.push_back({3, 10, 896});
  shapes.push_back({65, 2, 256});
  return shapes;
}

/// Checks every rung of the chapter that runs on ctx's executor at every shape it supports.
/// @return one line for each failure; empty when all is well. `*checked` counts rung-and-shape pairs.
inline std::vector<std::string> check_chapter(const Chapter& chapter, const std::vector<Shape>& shapes,
                                              Context& ctx, int* checked) {
  std::vector<std::string> failures;
  for (const Shape& shape : shapes) {
    std::vector<const Rung*> able;
    for (const Rung& r : chapter.rungs) {
      if (r.runs_on(ctx.executor) && r.supported(shape, ctx.device).ok()) able.push_back(&r);
    }
    for (const std::vector<const Rung*>& group : group_by_form(able)) {
      Operands ops(shape, 1, group.front()->form());
      Reference reference;
      const std::vector<RungCheck> results = check_rungs(group, ops, ctx, reference);
      for (std::size_t i = 0; i < group.size(); ++i) {
        ++*checked;
        if (results[i].ok()) continue;
        failures.push_back(group[i]->id + " at nt " + std::to_string(shape.nt) + " od " +
                           std::to_string(shape.od) + " id " + std::to_string(shape.id) + ": " +
                           results[i].message());
      }
    }
  }
  return failures;
}

/// Are the results of `nt` tokens together the same bits as those of each token alone?
inline bool same_bits_alone_and_together(const Rung& rung, long long nt, long long od, long long id,
                                         Context& ctx) {
  const auto run = [&](Operands& ops) {
    require(run_once(rung, ops, 0, ctx, ctx.stream));
    ctx.stream.synchronize();
    std::vector<float> out(ops.out_buffer(0).size());
    if (!ops.out_buffer(0).download(out)) throw DeviceError("guard band changed");
    return out;
  };
  Operands together({nt, od, id}, 1, rung.form());
  together.fill_inputs(FillKind::uniform, 7, ctx.stream);
  const std::vector<float> all = run(together);
  std::vector<float> acts(static_cast<std::size_t>(nt * id));
  for (std::size_t i = 0; i < acts.size(); ++i) acts[i] = fill_value(FillKind::uniform, 8, i);
  for (long long t = 0; t < nt; ++t) {
    Operands alone({1, od, id}, 1, rung.form());
    alone.fill_inputs(FillKind::uniform, 7, ctx.stream);
    alone.upload_acts(std::span(acts).subspan(static_cast<std::size_t>(t * id), static_cast<std::size_t>(id)),
                      ctx.stream);
    const std::vector<float> one = run(alone);
    if (std::memcmp(one.data(), all.data() + t * od, one.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace ladder::testing
