// Chapter 08's operations against float64, the broken ones against the checks, and what the records say of them.

#define LADDER_NO_MAIN
#include "chapters/08-around-the-matmul/around_the_matmul.cu"
#include "chapters/08-around-the-matmul/wrong/wrong_kernels.cuh"
#include "harness/device/doctest_main.hpp"
#include "harness/device/under_sanitizer.hpp"

using namespace ladder;
using namespace ladder::chapter08;

namespace {

const QwenSize& model(const std::string& name) {
  return *std::find_if(kQwenSizes.begin(), kQwenSizes.end(),
                       [&](const QwenSize& s) { return s.name == name; });
}

/// The operation `id` with another kernel in the place of its own.
template <class Run>
std::string check_with(const std::string& id, Run run, const Point& p, Stream& stream) {
  const std::vector<Operation> all = operations();
  Operation o = find(all, id);
  o.run = run;
  return check(o, p, stream);
}

}  // namespace

TEST_CASE("every operation is right for some models, tokens and depths") {
  Stream stream;
  int checked = 0;
  for (const Operation& o : operations()) {
    for (const char* name : sampled<const char*>({"0.5b", "7b"}, 2)) {
      for (const Point& p : {Point{&model(name), 1, 1},
                             {&model(name), 1, 70},
                             {&model(name), 3, 3},
                             {&model(name), 3, 40},
                             {&model(name), 9, 20}}) {
        if (!o.takes(p) || (o.sizes(p).ids > 0 && p.depth > 3)) continue;
        const std::string wrong = check(o, p, stream);
        CHECK_MESSAGE(wrong.empty(),
                      o.id << " " << name << " nt " << p.nt << " depth " << p.depth << ": " << wrong);
        ++checked;
      }
    }
  }
  CHECK(checked > (under_sanitizer() ? 30 : 60));
}

TEST_CASE("attention over several pieces") {
  Stream stream;
  for (const char* id :
       {"attention_decode", "attention_decode_blocks", "attention_two_launches", "attention_prefill"}) {
    const std::vector<Operation> all = operations();
    const std::string wrong = check(find(all, id), {&model("0.5b"), 1, 600}, stream);
    CHECK_MESSAGE(wrong.empty(), id << ": " << wrong);
  }
}

TEST_CASE("wrong kernels are rejected, and the same kernels without the bug are not") {
  Stream stream;
  const Point p{&model("0.5b"), 3, 12};
  CHECK(check_with("attention_f32", wrong::run_attention<wrong::RightAttention>, p, stream) == "");
  CHECK(check_with("attention_f32", wrong::run_attention<wrong::FutureSeen>, p, stream) != "");
  CHECK(check_with("attention_f32", wrong::run_attention<wrong::NewestForgotten>, p, stream) != "");
  CHECK(check_with("attention_f32", wrong::run_attention<wrong::ScaleForgotten>, p, stream) != "");
  CHECK(check_with("attention_f32", wrong::run_attention<wrong::HeadsInterleaved>, p, stream) != "");
  CHECK(check_with("attention_f32", wrong::run_attention<wrong::SumsInHalf>, p, stream) != "");
  CHECK(check_with("attention_f32", wrong::run_nothing, p, stream) != "");
  // The bound of tensor cores is wider, but not that wide. (What they round in the query is the reference's, too.)
  for (const auto run :
       {wrong::run_attention<wrong::FutureSeen>, wrong::run_attention<wrong::NewestForgotten>,
        wrong::run_attention<wrong::ScaleForgotten>, wrong::run_attention<wrong::HeadsInterleaved>}) {
    CHECK(check_with("attention_prefill", run, p, stream) != "");
  }

  CHECK(check_with("rope_store", wrong::run_rotation<wrong::RightRotation>, p, stream) == "");
  CHECK(check_with("rope_store", wrong::run_rotation<wrong::PositionOffByOne>, p, stream) != "");
  CHECK(check_with("rope_store", wrong::run_rotation<wrong::NeighboursPaired>, p, stream) != "");
  CHECK(check_with("rope_store", wrong::run_rotation<wrong::ValuesRotated>, p, stream) != "");
  CHECK(check_with("rope_store", wrong::run_nothing, p, stream) != "");

  CHECK(check_with("rms_norm", wrong::run_rms_norm<wrong::RightNorm>, p, stream) == "");
  CHECK(check_with("rms_norm", wrong::run_rms_norm<wrong::MeanForgotten>, p, stream) != "");
  CHECK(check_with("rms_norm", wrong::run_rms_norm<wrong::TailDropped>, p, stream) != "");

  CHECK(check_with("swiglu", wrong::run_sigmoid_gate, p, stream) != "");
  for (const char* id : {"swiglu", "add_bias", "add_residual", "argmax", "sample_token"})
    CHECK(check_with(id, wrong::run_nothing, p, stream) != "");
  for (const char* id : {"attention_decode", "attention_two_launches"})
    CHECK(check_with(id, wrong::run_nothing, Point{p.size, 1, 12}, stream) != "");
}

TEST_CASE("bytes are those of every operand once") {
  const std::vector<Operation> all = operations();
  const Point p{&model("7b"), 1, 4096};
  const double row = 3584, kv = 512;
  // Query, output; new key and value; a row of each table; both caches, of two bytes; planes of 40 bytes for 32.
  const double rotates = 4 * (2 * row + 2 * kv + 128), cache = 2 * 2 * 4096 * kv;
  CHECK(moved_bytes(find(all, "attention_f32"), p) == 4 * 2 * row + cache);
  CHECK(moved_bytes(find(all, "attention_two_launches"), p) == rotates + cache);
  CHECK(moved_bytes(find(all, "attention_decode"), p) == rotates + cache + row / 32 * 40);
  CHECK(moved_bytes(find(all, "rope_store"), p) == rotates + 2 * 2 * kv);
  CHECK(moved_bytes(find(all, "rms_norm"), p) == 4 * 3 * row);
  CHECK(moved_bytes(find(all, "add_residual"), p) == 4 * 3 * row);
  CHECK(find(all, "attention_prefill").flop({&model("7b"), 2, 2}) == 4 * row * 3);
}

TEST_CASE("the command line") {
  const auto refusal = [](std::vector<std::string> args) -> std::string {
    try {
      parse(std::move(args));
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  };
  CHECK(refusal({"--model", "8b"}).find("'8b' is not one of 0.5b, 1.5b") != std::string::npos);
  CHECK(refusal({"--depth"}) == "--depth needs a value");
  CHECK(refusal({"--depth", "0"}).find("not a whole number from 1") != std::string::npos);
  CHECK(refusal({"--od", "3", "--id", "4"}).find("--model and --depth instead") != std::string::npos);
  CHECK(refusal({"--layer", "7b.nothing"}).find("unknown layer") != std::string::npos);
  const Asked asked = parse({"--layer", "7b.attn_q,7b.ffn_down", "--depth", "5,9", "--nt", "2"});
  CHECK(asked.sizes.size() == 1);
  CHECK(asked.depths == std::vector<int>{5, 9});
  const std::vector<Operation> all = operations();
  CHECK(points(find(all, "attention_prefill"), asked, Executor::gpu).size() == 2);
  CHECK(points(find(all, "attention_decode"), asked, Executor::gpu).empty());  // takes one token
  CHECK(points(find(all, "swiglu"), asked, Executor::gpu).size() == 1);        // has no depth
  CHECK_THROWS_AS(find(all, "nothing"), UsageError);
}
