// argmax against a plain loop: sizes around warps, parts and blocks, ties, signed zeros, infinities and NaNs, several rows,
// and the same workspace again.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/experiment/check.hpp"
#include "kernels/elementwise/argmax.cuh"

using namespace ladder;

namespace {

int plain(const float* row, long long n) {
  int best = 0;
  for (long long i = 0; i < n; ++i) {
    if (std::isnan(row[i])) return -1;
    if (row[i] > row[best]) best = static_cast<int>(i);
  }
  return best;
}

struct Rows {
  int nt;
  long long n;
  Stream stream;
  Buffer<unsigned char> workspace;

  Rows(int rows, long long length) : nt(rows), n(length), workspace(argmax_workspace(rows), "workspace") {
    workspace.fill_bytes(0);
  }
  std::vector<int> run(const std::vector<float>& logits) {
    GuardedBuffer<float> in(logits.size(), "logits");
    in.upload(logits);
    GuardedBuffer<int> ids(static_cast<std::size_t>(nt), "ids");
    const Status status = launch_argmax(in.data(), ids.data(), nt, n, workspace.data(), stream);
    REQUIRE_MESSAGE(status.ok(), status.message());
    stream.synchronize();
    std::vector<int> out(static_cast<std::size_t>(nt));
    CHECK(ids.download(out));
    std::vector<unsigned char> left(workspace.size());
    workspace.download(left);
    CHECK(left == std::vector<unsigned char>(left.size(), 0));
    return out;
  }
  void check(const std::vector<float>& logits) {
    const std::vector<int> got = run(logits);
    for (int t = 0; t < nt; ++t) {
      CAPTURE(n);
      CAPTURE(t);
      CHECK(got[static_cast<std::size_t>(t)] == plain(logits.data() + t * n, n));
    }
  }
};

}  // namespace

TEST_CASE("sizes around warps, parts and blocks; few values, so that many are equal") {
  std::mt19937 generator(1);
  for (const int n : {1, 2, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2049, 5000}) {
    for (const int nt : {1, 3}) {
      Rows rows(nt, n);
      for (const int values : {1, 3, 1000000}) {
        std::vector<float> logits;
        logits.reserve(static_cast<std::size_t>(nt * n));
        for (int i = 0; i < nt * n; ++i)
          logits.push_back(static_cast<float>(static_cast<int>(generator() % static_cast<unsigned>(values))) -
                           1.0f);
        rows.check(logits);
      }
    }
  }
}

TEST_CASE("every place can win, and the lowest of two") {
  Rows rows(1, 1500);
  for (const std::size_t at : {0u, 255u, 256u, 749u, 750u, 1023u, 1024u, 1499u}) {
    std::vector<float> logits(1500, -2.0f);
    logits[at] = -1.5f;
    rows.check(logits);
    logits[1499] = -1.5f;
    rows.check(logits);
  }
}

TEST_CASE("zeros, infinities, NaNs, and all of them the lowest") {
  Rows rows(1, 1100);
  std::vector<float> logits(1100, -0.0f);
  CHECK(rows.run(logits)[0] == 0);
  logits[700] = 0.0f;
  CHECK(rows.run(logits)[0] == 0);  // no larger than -0
  logits[1050] = 1e-45f;
  CHECK(rows.run(logits)[0] == 1050);
  logits[900] = INFINITY;
  CHECK(rows.run(logits)[0] == 900);
  logits[3] = std::nanf("");
  CHECK(rows.run(logits)[0] == -1);
  logits[3] = -std::nanf("");
  CHECK(rows.run(logits)[0] == -1);
  CHECK(rows.run(std::vector<float>(1100, -INFINITY))[0] == 0);
}

TEST_CASE("a bias, and the step of the next token") {
  Stream stream;
  std::mt19937 generator(4);
  for (const int n : {1, 40, 1025, 3000}) {
    std::vector<float> logits, bias;
    for (int i = 0; i < n; ++i) {
      logits.push_back(static_cast<float>(static_cast<int>(generator() % 1000)) / 8.0f);
      bias.push_back(generator() % 3 == 0 ? -INFINITY : static_cast<float>(generator() % 200) / 8.0f);
    }
    bias[static_cast<std::size_t>(n / 2)] = 2.0f;  // one at least can be drawn
    const auto drawn_of = [&](const std::vector<float>& row, const std::vector<float>& added) {
      GuardedBuffer<float> in(row.size(), "logits"), more(added.size(), "bias");
      in.upload(row);
      more.upload(added);
      GuardedBuffer<int> ids(1, "ids"), step(2, "step"), drawn(9, "drawn");
      Buffer<unsigned char> workspace(argmax_workspace(1), "workspace");
      workspace.fill_bytes(0);
      const std::vector<int> before = {4, -7}, none(9, -9);
      step.upload(before);
      drawn.upload(none);
      const Status status =
          launch_argmax(in.data(), ids.data(), 1, static_cast<long long>(row.size()), workspace.data(),
                        stream, false, more.data(), {step.data(), drawn.data()});
      REQUIRE_MESSAGE(status.ok(), status.message());
      stream.synchronize();
      std::vector<int> id(1), next(2), all(9);
      CHECK(ids.download(id));
      CHECK(step.download(next));
      CHECK(drawn.download(all));
      CHECK(next == std::vector<int>{5, id[0]});
      std::vector<int> expected = none;
      expected[5] = id[0];
      CHECK(all == expected);
      return id[0];
    };
    std::vector<float> sum;
    for (std::size_t i = 0; i < logits.size(); ++i) sum.push_back(logits[i] + bias[i]);
    CHECK(drawn_of(logits, bias) == plain(sum.data(), n));
    CHECK(drawn_of(logits, std::vector<float>(logits.size(), -INFINITY)) == -1);
    for (const float bad : {INFINITY, std::nanf("")}) {  // a ban hides neither
      std::vector<float> wrong = logits;
      wrong[static_cast<std::size_t>(n - 1)] = bad;
      CHECK(drawn_of(wrong, bias) == -1);
    }
  }
  int none = 0;
  CHECK(launch_argmax(nullptr, nullptr, 2, 5, nullptr, stream, false, nullptr, {&none, &none}).message() ==
        "argmax: only one row has a next step, with a place for what is drawn");
}

#if !defined(__CUDACC__)
TEST_CASE("blocks hand over in order") {
  Rows rows(2, 4100);
  const emu::counting on;
  rows.check(std::vector<float>(8200, 1.0f));
  CHECK(emu::last_launch().findings.empty());
}
#endif

TEST_CASE("what the kernel cannot take is refused with the reason") {
  Stream stream;
  CHECK(launch_argmax(nullptr, nullptr, 1, 0, nullptr, stream).message().find("n must be 1 to") !=
        std::string::npos);
  CHECK(
      launch_argmax(nullptr, nullptr, 0, 5, nullptr, stream).message().find("nt must be 1 to 65535, not 0") !=
      std::string::npos);
}
