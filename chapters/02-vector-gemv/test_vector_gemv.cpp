// Chapter 02's kernels against float64, and the broken ones against the checker.

#define LADDER_NO_MAIN
#include "chapters/02-vector-gemv/vector_gemv.cu"
#include "chapters/02-vector-gemv/wrong/wrong_kernels.cuh"
#include "harness/device/doctest_main.hpp"
#include "harness/experiment/testing.hpp"

using namespace ladder;

TEST_CASE("every rung is right at every shape") {
  for (const Executor e : testing::executors()) {
    Context ctx = testing::context_on(e);
    int checked = 0;
    for (const std::string& line :
         testing::check_chapter(chapter_02(), sampled(testing::ragged_shapes(), 9), ctx, &checked)) {
      FAIL_CHECK(to_string(e) << ": " << line);
    }
    CHECK(checked >= (under_sanitizer() ? 5 : 50));
  }
}

TEST_CASE("a token's result is the same bits alone and in company") {
  for (const Executor e : testing::executors()) {
    Context ctx = testing::context_on(e);
    for (const Rung& r : chapter_02().rungs) {
      if (!r.runs_on(e) || !r.peer_name.empty()) continue;
      CAPTURE(r.id);
      for (const long long nt : sampled<long long>({2, 3, 8, 13}, 4))
        CHECK(testing::same_bits_alone_and_together(r, nt, 21, 1096, ctx));
    }
  }
}

TEST_CASE("shapes that 16-byte loads cannot take are refused with the reason") {
  Stream stream;
  Buffer<float> w(64, "weights"), a(64, "acts"), out(64, "out");
  const auto refused = [&](const Rung& r, long long id, const char* why) {
    CAPTURE(r.id);
    const Shape shape{1, 2, id};
    CHECK(r.supported(shape, {}).message().find(why) != std::string::npos);
    CHECK(r.device(w.data(), a.data(), out.data(), shape, stream).message().find(why) != std::string::npos);
  };
  for (const Rung& r : chapter_02().rungs) {
    if (!r.peer_name.empty()) continue;
    const bool chunk = r.id == "gemv_vec_chunk";
    refused(r, 9, chunk ? "multiple of 8" : "multiple of 4");
    if (chunk)
      refused(r, 12, "multiple of 8");
    else
      CHECK(r.supported({1, 2, 12}, {}).ok());
  }
}

TEST_CASE("the checker rejects every broken kernel") {
  using Kernel = void (*)(const float*, const float*, float*, int);
  const std::pair<std::string, Kernel> kernels[] = {
      {"missing_barrier", wrong::missing_barrier},
      {"short_butterfly", wrong::short_butterfly},
      {"rounds_the_tail_up", wrong::rounds_the_tail_up},
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
      return launch(k, dim3(static_cast<unsigned>(s.od)), dim3(64), 0, stream, w, a, out,
                    static_cast<int>(s.id));
    };
    Operands ops({1, 67, 4866}, 1);
    Reference reference;
    const std::vector<RungCheck> result = check_rungs({&r}, ops, ctx, reference);
    CHECK_FALSE(result[0].ok());
  }
}
