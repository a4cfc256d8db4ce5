// Chapter 01's kernels against float64, and the broken ones against the checker.

#define LADDER_NO_MAIN
#include "chapters/01-scalar-gemv/scalar_gemv.cu"
#include "chapters/01-scalar-gemv/wrong/wrong_kernels.cuh"
#include "harness/device/doctest_main.hpp"
#include "harness/experiment/testing.hpp"

using namespace ladder;

TEST_CASE("every rung is right at every shape") {
  for (const Executor e : testing::executors()) {
    Context ctx = testing::context_on(e);
    int checked = 0;
    for (const std::string& line :
         testing::check_chapter(chapter_01(), sampled(testing::ragged_shapes(), 9), ctx, &checked)) {
      FAIL_CHECK(to_string(e) << ": " << line);
    }
    CHECK(checked >= (under_sanitizer() ? 9 : 80));
  }
}

TEST_CASE("tokens do not influence each other") {
  for (const Executor e : testing::executors()) {
    Context ctx = testing::context_on(e);
    for (const Rung& r : chapter_01().rungs) {
      if (!r.runs_on(e)) continue;
      CAPTURE(r.id);
      CHECK(testing::same_bits_alone_and_together(r, 9, 33, 100, ctx));
    }
  }
}

TEST_CASE("the two-dimensional grid refuses more tokens than grid.y can hold") {
  const Chapter c = chapter_01();
  const Rung& r = find_rung(c, "gemv_scalar_grid2d");
  CHECK(r.supported({65535, 1, 1}, {}).ok());
  const Status s = r.supported({65536, 1, 1}, {});
  REQUIRE_FALSE(s.ok());
  CHECK(s.message().find("65535") != std::string::npos);
}

TEST_CASE("the checker rejects every broken kernel") {
  using Kernel = void (*)(const float*, const float*, float*, int, int, int);
  const std::pair<std::string, Kernel> kernels[] = {
      {"dropped_tail", wrong::dropped_tail},
      {"stale_output", wrong::stale_output},
      {"makes_nan", wrong::makes_nan},
      {"half_of_k", wrong::half_of_k},
      {"reads_past_the_end", wrong::reads_past_the_end},
      {"writes_past_the_end", wrong::writes_past_the_end},
      {"accumulates_in_f16", wrong::accumulates_in_f16},
  };
  Context ctx = testing::context_on(kDeviceExecutor);
  for (const auto& entry :
       kernels) {  // not a structured binding: CAPTURE is a lambda, which older Clangs refuse one
    const std::string& name = entry.first;
    const Kernel kernel = entry.second;
    CAPTURE(name);
    Rung r;
    r.id = name;
    r.roundings = [](Shape s, Executor) { return static_cast<double>(s.id + 2); };
    r.device = [k = kernel](const float* w, const float* a, float* out, Shape s, Stream& stream) {
      const auto blocks = static_cast<unsigned>((s.nt * s.od + 255) / 256);
      return launch(k, dim3(blocks), dim3(256), 0, stream, w, a, out, static_cast<int>(s.nt),
                    static_cast<int>(s.od), static_cast<int>(s.id));
    };
    for (const Shape shape : {Shape{1, 33, 4865}, Shape{3, 7, 131}}) {
      Operands ops(shape, 1);
      Reference reference;
      const std::vector<RungCheck> result = check_rungs({&r}, ops, ctx, reference);
      CHECK_FALSE(result[0].ok());
      CHECK_FALSE(result[0].message().empty());
    }
  }
}
