// The container and the model: what is read is what was written, and what is wrong is named.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "chapters/09-qwen/census.hpp"
#include "chapters/09-qwen/crafted_files.hpp"
#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/model.hpp"
#include "chapters/09-qwen/quantize_model.hpp"
#include "chapters/09-qwen/synthetic.hpp"
#include "kernels/quant/dequantize.hpp"
#include "kernels/quant/quantize.hpp"

using namespace ladder;
using crafted::raw;
using crafted::RawFile;
using crafted::TinyModel;
using gguf::Array;
using gguf::File;
using gguf::FileError;
using gguf::Writer;

namespace {

/// A folder that goes when the test ends.
class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "test_gguf-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] std::filesystem::path operator/(const char* name) const { return path_ / name; }
  [[nodiscard]] std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  REQUIRE(out.flush());
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// The message of the FileError (or std::invalid_argument) that `action` throws; empty if it throws nothing.
template <class Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const FileError& error) {
    return error.what();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

#define CHECK_CONTAINS(text, part)                      \
  do {                                                  \
    const std::string text_ = (text), part_ = (part);   \
    INFO("'", text_, "' should contain '", part_, "'"); \
    CHECK(text_.find(part_) != std::string::npos);      \
  } while (false)

/// The message with which a model's header is refused.
std::string refusal(const TinyModel& tiny) {
  const crafted::Bytes header = tiny.header();
  return message_of([&] {
    const File file(header, "tiny.gguf", true);
    const qwen::Model model(file);
  });
}

void check_good(const File& f) {
  CHECK(f.get<std::string_view>("general.architecture") == "qwen2");
  CHECK(f.get<std::uint32_t>("test.u8") == 200);
  CHECK(f.get<std::int32_t>("test.i8") == -100);
  CHECK(f.get<std::int64_t>("test.u16") == 60000);
  CHECK(f.get<std::int64_t>("test.i16") == -30000);
  CHECK(f.get<std::uint32_t>("test.u32") == 4000000000u);
  CHECK(f.get<std::int32_t>("test.i32") == -2000000000);
  CHECK(f.get<float>("test.f32") == 0.5f);
  CHECK(f.get<double>("test.f32") == 0.5);
  CHECK(f.get<bool>("test.bool"));
  CHECK(f.get<std::string_view>("test.string") == "text");
  CHECK(f.get<std::uint64_t>("test.u64") == 18000000000000000000u);
  CHECK(f.get<std::int64_t>("test.i64") == std::numeric_limits<std::int64_t>::min());
  CHECK(f.get<double>("test.f64") == -0.25);
  const Array* numbers = f.get<const Array*>("test.numbers");
  REQUIRE(numbers->count == 3);
  std::int32_t values[3];
  REQUIRE(numbers->bytes.size() == sizeof values);
  std::memcpy(values, numbers->bytes.data(), sizeof values);
  CHECK(values[1] == -2);
  const Array* strings = f.get<const Array*>("test.strings");
  REQUIRE(strings->strings.size() == 3);
  CHECK(strings->strings[1].empty());
  CHECK(strings->strings[2] == "three");
}

}  // namespace

TEST_CASE("versions 2 and 3 are read, every kind of value and the tensors' bytes") {
  for (const std::uint32_t version : {2u, 3u}) {
    RawFile made = crafted::good_file();
    made.version = version;
    const crafted::Bytes bytes = crafted::to_bytes(made.str());
    const File f(bytes, "good.gguf");
    CHECK(f.version() == version);
    CHECK(f.parts() == 1);
    CHECK(f.alignment() == 32);
    CHECK(f.bytes() == bytes.size());
    CHECK(f.name() == "good.gguf");
    CHECK(f.metadata().size() == 15);
    CHECK(f.metadata()[1].first == "test.u8");
    check_good(f);
    REQUIRE(f.tensors().size() == 2);
    const gguf::Tensor* b = f.tensor("b");
    REQUIRE(b != nullptr);
    CHECK(b == &f.tensors()[1]);
    CHECK(b->type == WeightType::q8_0);
    CHECK(b->dimensions == 2);
    CHECK(b->row_length() == 32);
    CHECK(b->rows() == 2);
    CHECK(b->elements() == 64);
    CHECK(b->bytes == 68);
    REQUIRE(b->data.size() == 68);
    CHECK(std::to_integer<int>(b->data[0]) == 32);  // the data count up from 0, and b begins at 32
    CHECK(f.tensor("c") == nullptr);
    CHECK(f.find("test.none") == nullptr);
  }
}

TEST_CASE("a value of another kind, out of range or missing is named") {
  const crafted::Bytes bytes = crafted::to_bytes(crafted::good_file().str());
  const File f(bytes, "good.gguf");
  CHECK(message_of([&] { (void)f.get<bool>("none\n"); }) == "good.gguf: key 'none\\x0a' is missing");
  CHECK(f.get_or<std::int32_t>("none", 7) == 7);
  CHECK_CONTAINS(message_of([&] { (void)f.get_or<std::int32_t>("test.string", 7); }),
                 "key 'test.string' has type string; allowed is an integer");
  CHECK_CONTAINS(message_of([&] { (void)f.get<std::int32_t>("test.u32"); }),
                 "key 'test.u32' is 4000000000; allowed are -2147483648 to 2147483647");
  CHECK_CONTAINS(message_of([&] { (void)f.get<std::uint32_t>("test.i8"); }),
                 "is -100; allowed are 0 to 4294967295");
  CHECK_CONTAINS(message_of([&] { (void)f.get<std::int64_t>("test.u64"); }),
                 "is 18000000000000000000; allowed are");
  CHECK_CONTAINS(message_of([&] { (void)f.get<std::uint64_t>("test.i64"); }),
                 "is -9223372036854775808; allowed are");
  CHECK_CONTAINS(message_of([&] { (void)f.get<std::int32_t>("test.bool"); }),
                 "has type bool; allowed is an integer");
  CHECK_CONTAINS(message_of([&] { (void)f.get<bool>("test.u8"); }), "has type u8; allowed is bool");
  CHECK_CONTAINS(message_of([&] { (void)f.get<float>("test.u8"); }), "has type u8; allowed are f32 and f64");
  CHECK_CONTAINS(message_of([&] { (void)f.get<std::string_view>("test.f32"); }),
                 "has type f32; allowed is string");
  CHECK_CONTAINS(message_of([&] { (void)f.get<const Array*>("test.f32"); }),
                 "has type f32; allowed is array");
}

TEST_CASE("each bad file is refused with its own message, on one line") {
  const std::vector<crafted::BadFile> bad = crafted::bad_files();
  CHECK(bad.size() >= 60);
  for (const crafted::BadFile& b : bad) {
    INFO(b.name);
    const std::string message = message_of([&] { const File f(b.bytes, "bad.gguf"); });
    CHECK_CONTAINS(message, b.message);
    CHECK(message.starts_with("bad.gguf: "));
    CHECK(message.find_first_of("\n\r\x1b\x07") == std::string::npos);
    CHECK(message.size() < 600);
  }
}

TEST_CASE("every shorter beginning of a file is refused") {
  const std::string whole = crafted::good_file().str();
  const std::size_t needed = whole.size() - 28;  // the last tensor's padding may be missing
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const crafted::Bytes bytes = crafted::to_bytes(whole.substr(0, size));
    const std::string message = message_of([&] { const File f(bytes, "cut.gguf"); });
    INFO(size);
    CHECK(message.empty() == (size >= needed));
  }
}

TEST_CASE("headers_only reads a file whose tensors are not there yet") {
  const std::string whole = crafted::good_file().str();
  const crafted::Bytes bytes = crafted::to_bytes(whole.substr(0, whole.size() - 96));
  const File f(bytes, "cut.gguf", true);
  REQUIRE(f.tensors().size() == 2);
  CHECK(f.tensors()[0].data.size() == 32);
  CHECK(f.tensors()[1].data.empty());
  CHECK(f.tensors()[1].bytes == 68);
}

TEST_CASE("general.alignment moves the tensors") {
  RawFile made = crafted::good_file();
  made.keys.push_back({"general.alignment", 4, raw(std::uint32_t{128})});
  made.alignment = 128;
  made.tensors[1].offset = 128;
  made.data_bytes = 128 + 68;
  const crafted::Bytes bytes = crafted::to_bytes(made.str());
  const File f(bytes, "aligned.gguf");
  CHECK(f.alignment() == 128);
  CHECK(std::to_integer<int>(f.tensor("b")->data[1]) == 129);
}

TEST_CASE("a path that is no file says so") {
  const Folder folder;
  CHECK_CONTAINS(message_of([&] { const File f(folder / "none.gguf"); }), "No such file");
  CHECK_CONTAINS(message_of([&] { const File f(folder / "."); }), "is a directory");
  CHECK_CONTAINS(message_of([&] { const File f("/dev/null"); }), "is not a regular file");
  write_text(folder / "empty.gguf", "");
  CHECK_CONTAINS(message_of([&] { const File f(folder / "empty.gguf"); }), "is empty");
}

TEST_CASE("what the writer wrote is what the reader reads") {
  const Folder folder;
  const crafted::Bytes good = crafted::to_bytes(crafted::good_file().str());
  const File from(good, "good.gguf");
  for (const std::uint64_t alignment : {8u, 32u, 4096u}) {
    Writer w(alignment);
    w.copy_metadata(from);
    w.set("test.u8", std::int64_t{-1});  // replaced in place, by another kind
    w.set_strings("more", {"x", std::string(1000, 'y')});
    for (const gguf::Tensor& t : from.tensors()) {
      w.add(std::string(t.name), t.type, {t.ne.begin(), t.ne.begin() + t.dimensions},
            [&t](std::span<std::byte> out) { std::memcpy(out.data(), t.data.data(), out.size()); });
    }
    std::vector<std::uint64_t> progress;
    w.write(folder / "written.gguf", [&](std::uint64_t done, std::uint64_t all) {
      progress.push_back(done);
      progress.push_back(all);
    });
    CHECK(folder.files() == 1);
    const File f(folder / "written.gguf");
    CHECK(f.version() == 3);
    CHECK(f.alignment() == alignment);
    CHECK(f.bytes() % alignment == 0);
    REQUIRE(progress.size() == 4);
    CHECK(progress[2] == f.bytes());
    CHECK(progress[3] == f.bytes());
    const std::size_t first = alignment == 32 ? 0 : 1;  // behind general.alignment
    CHECK(f.metadata()[first + 1].first == "test.u8");
    CHECK(f.get<std::int64_t>("test.u8") == -1);
    CHECK(f.get<const Array*>("more")->strings[1].size() == 1000);
    CHECK(f.get<std::uint64_t>("test.u64") == 18000000000000000000u);
    std::uint64_t next = 0;  // ggml refuses a gap of more than the padding
    for (const gguf::Tensor& t : from.tensors()) {
      const gguf::Tensor* copy = f.tensor(t.name);
      REQUIRE(copy != nullptr);
      CHECK(copy->offset == next);
      next += (static_cast<std::uint64_t>(copy->bytes) + alignment - 1) / alignment * alignment;
      CHECK(copy->ne == t.ne);
      REQUIRE(copy->data.size() == t.data.size());
      CHECK(std::memcmp(copy->data.data(), t.data.data(), t.data.size()) == 0);
    }
    const std::string text = read_text(folder / "written.gguf");
    const crafted::Bytes header = w.header();
    REQUIRE(header.size() < text.size());
    CHECK(std::memcmp(header.data(), text.data(), header.size()) == 0);
  }
}

TEST_CASE("the writer refuses what a reader would, and leaves nothing behind when it fails") {
  const Folder folder;
  Writer w;
  const auto nothing = [](std::span<std::byte>) {};
  CHECK_CONTAINS(message_of([&] { w.add("", WeightType::f32, {1}, nothing); }), "allowed are 1 to 63");
  CHECK_CONTAINS(message_of([&] { w.add(std::string(64, 'x'), WeightType::f32, {1}, nothing); }), "64 bytes");
  CHECK_CONTAINS(message_of([&] { w.add("x", WeightType::f32, {}, nothing); }), "0 dimensions");
  CHECK_CONTAINS(message_of([&] { w.add("x", WeightType::f32, {1, 0}, nothing); }), "impossible shape");
  CHECK_CONTAINS(message_of([&] { w.add("x", WeightType::q4_k, {128}, nothing); }),
                 "a multiple of 256 for type Q4_K");
  CHECK_CONTAINS(message_of([&] { w.set("", true); }), "allowed are 1 to 65535");
  CHECK_CONTAINS(message_of([&] { w.set("general.alignment", std::uint32_t{64}); }), "constructor");
  CHECK_CONTAINS(message_of([&] { const Writer odd(24); }), "allowed are powers of two");
  CHECK_CONTAINS(message_of([&] { w.write("/dev/null"); }), "is not a regular file");
  CHECK_CONTAINS(message_of([&] { w.write(folder / "none/x.gguf"); }), "No such file");
  w.add("x", WeightType::f32, {4}, [](std::span<std::byte>) { throw std::invalid_argument("stop here"); });
  CHECK_CONTAINS(message_of([&] { w.add("x", WeightType::f32, {4}, nothing); }), "added twice");
  write_text(folder / "old.gguf", "old");
  CHECK(message_of([&] { w.write(folder / "old.gguf"); }) == "stop here");
  CHECK(read_text(folder / "old.gguf") == "old");
  CHECK(folder.files() == 1);

  // A limit of this process on the size of files stands for the full disk.
  Writer large;
  large.add("x", WeightType::f32, {1 << 20},
            [](std::span<std::byte> out) { std::fill(out.begin(), out.end(), std::byte{1}); });
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 1 << 16;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  const std::string message = message_of([&] { large.write(folder / "large.gguf"); });
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  std::signal(SIGXFSZ, handler);
  CHECK_CONTAINS(message, "large.gguf: cannot be written beyond byte 65536: File too large");
  CHECK(folder.files() == 1);
}

TEST_CASE("split files: all parts, in order, as many as they say") {
  const Folder folder;
  const auto part = [&](int number, int says, int count, int total, const char* name) {
    Writer w;
    if (number == 0) w.set("general.architecture", std::string_view("qwen2"));
    w.set("split.no", static_cast<std::uint16_t>(says));
    w.set("split.count", static_cast<std::uint16_t>(count));
    w.set("split.tensors.count", static_cast<std::int32_t>(total));
    w.add("t" + std::to_string(number), WeightType::f32, {4}, [number](std::span<std::byte> out) {
      std::fill(out.begin(), out.end(), static_cast<std::byte>(number));
    });
    w.write(folder / name);
  };
  const auto first = folder / "m-00001-of-00003.gguf";
  const auto error = [&] { return message_of([&] { const File f(first); }); };
  part(0, 0, 3, 3, "m-00001-of-00003.gguf");
  part(1, 1, 3, 3, "m-00002-of-00003.gguf");
  CHECK_CONTAINS(error(), "m-00003-of-00003.gguf: cannot be opened: No such file");
  part(2, 2, 3, 3, "m-00003-of-00003.gguf");
  {
    const File f(first);
    CHECK(f.parts() == 3);
    CHECK(f.get<std::string_view>("general.architecture") == "qwen2");
    REQUIRE(f.tensors().size() == 3);
    for (int i = 0; i < 3; ++i) {
      const gguf::Tensor* t = f.tensor("t" + std::to_string(i));
      REQUIRE(t != nullptr);
      CHECK(std::to_integer<int>(t->data[15]) == i);
    }
    CHECK(f.bytes() == read_text(first).size() + read_text(folder / "m-00002-of-00003.gguf").size() +
                           read_text(folder / "m-00003-of-00003.gguf").size());
    // A copy in one file is no longer split.
    Writer w;
    w.copy_metadata(f);
    w.write(folder / "one.gguf");
    CHECK(File(folder / "one.gguf").find("split.count") == nullptr);
  }
  CHECK_CONTAINS(message_of([&] { const File f(folder / "m-00002-of-00003.gguf"); }),
                 "is part 2 of a split model; open its first part, '" + first.string() + "'");
  part(2, 1, 3, 3, "m-00003-of-00003.gguf");
  CHECK_CONTAINS(error(),
                 "m-00003-of-00003.gguf: says that it is part 2 of 3; allowed is, by its name, part 3 of 3");
  part(2, 2, 4, 3, "m-00003-of-00003.gguf");
  CHECK_CONTAINS(error(), "says that it is part 3 of 4");
  part(1, 2, 3, 3, "m-00003-of-00003.gguf");
  CHECK_CONTAINS(error(), "m-00003-of-00003.gguf: tensor 't1' is there twice");
  part(2, 2, 3, 3, "m-00003-of-00003.gguf");
  part(0, 0, 3, 5, "m-00001-of-00003.gguf");
  CHECK_CONTAINS(error(), "its parts hold 3 tensors; split.tensors.count says 5");
  part(0, 0, 3, 3, "other.gguf");
  CHECK_CONTAINS(message_of([&] { const File f(folder / "other.gguf"); }),
                 "is part 1 of 3 of a split model; allowed is a name that ends in '-00001-of-00003.gguf'");
  // One part of one is an ordinary file, whatever its name.
  part(0, 0, 1, 1, "single.gguf");
  CHECK(File(folder / "single.gguf").parts() == 1);
  write_text(folder / "m-00003-of-00003.gguf", "GGUF");
  part(0, 0, 3, 3, "m-00001-of-00003.gguf");
  CHECK_CONTAINS(error(), "m-00003-of-00003.gguf: truncated");
}

TEST_CASE("a model's hyperparameters and tensors are found") {
  TinyModel tiny;
  const auto header = tiny.set("general.name", std::string_view("Tiny\n1")).header();
  const File f(header, "dir/tiny.gguf", true);
  const qwen::Model m(f);
  CHECK(m.name == "Tiny\\x0a1");
  CHECK(m.hp.block_count == 1);
  CHECK(m.hp.head_dim() == 8);
  CHECK(m.hp.kv_length() == 16);
  CHECK(m.hp.vocabulary == 10);
  CHECK(m.hp.rms_epsilon == 1e-6f);
  CHECK(m.hp.rope_base == 1e6f);
  CHECK_FALSE(m.hp.yarn.has_value());
  CHECK(m.tied);
  CHECK(m.output == m.token_embd);
  CHECK(m.layers[0].ffn_down->ne[0] == 64);
  CHECK(m.file_type == "Q8_0");  // the commonest; there is no general.file_type
  CHECK(m.parameters() == 10 * 32 + 32 + 2 * 32 + 32 * (32 + 16 + 16 + 32) + 32 + 16 + 16 + 3 * 32 * 64);
  CHECK(m.size_label == "0.0M");
  CHECK(m.bytes_per_token() == m.tensor_bytes());

  const auto untied = TinyModel()
                          .with_tensor("output.weight", WeightType::f16, {32, 10})
                          .set("general.file_type", std::uint32_t{15})
                          .set("general.size_label", std::string_view("13B"))
                          .set("qwen2.rope.scaling.type", std::string_view("yarn"))
                          .set("qwen2.rope.scaling.factor", 4.0f)
                          .set("qwen2.rope.scaling.original_context_length", std::uint32_t{32})
                          .header();
  const File g(untied, "dir/untied.gguf", true);
  const qwen::Model u(g);
  CHECK(u.name == "untied.gguf");
  CHECK_FALSE(u.tied);
  CHECK(u.output->type == WeightType::f16);
  CHECK(u.file_type == "Q4_K - Medium");
  CHECK(u.size_label == "13B");
  REQUIRE(u.hp.yarn.has_value());
  CHECK(u.hp.yarn->factor == 4.0f);
  CHECK(u.hp.yarn->original_context == 32);
  CHECK(u.bytes_per_token() == u.tensor_bytes() - 340 + 34);  // one row of ten
}

TEST_CASE("what a model lacks or has wrong is named with what is allowed") {
  CHECK(refusal(TinyModel()).empty());
  CHECK(refusal(TinyModel().set("qwen2.rope.scaling.type", std::string_view("none"))).empty());
  CHECK_CONTAINS(refusal(TinyModel().set("general.architecture", std::string_view("llama"))),
                 "tiny.gguf: key 'general.architecture' is 'llama'; allowed is 'qwen2'");
  CHECK_CONTAINS(refusal(TinyModel().without_key("general.architecture")),
                 "key 'general.architecture' is missing");
  for (const char* key :
       {"qwen2.block_count", "qwen2.context_length", "qwen2.embedding_length", "qwen2.feed_forward_length",
        "qwen2.attention.head_count", "qwen2.rope.freq_base", "qwen2.attention.layer_norm_rms_epsilon"}) {
    CHECK(refusal(TinyModel().without_key(key)) == "tiny.gguf: key '" + std::string(key) + "' is missing");
  }
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.block_count", std::uint32_t{0})),
                 "is 0; allowed are 1 to 4096");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.block_count", std::int32_t{-1})),
                 "is -1; allowed are 1 to 4096");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.block_count", std::uint32_t{4000})),
                 "has 14 tensors; allowed for 4000 layers are 48002 or 48003");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.context_length", std::uint64_t{1} << 40)),
                 "allowed are 1 to 16777216");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.attention.head_count", std::uint32_t{5})),
                 "key 'qwen2.attention.head_count' is 5; allowed are divisors of embedding_length, 32");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.attention.head_count", std::uint32_t{32})),
                 "heads of an even length");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.attention.head_count_kv", std::uint32_t{3})),
                 "key 'qwen2.attention.head_count_kv' is 3; allowed are divisors of head_count, 4");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.attention.key_length", std::uint32_t{16})),
                 "is 16; allowed is the head's length, 8");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.attention.layer_norm_rms_epsilon", 0.0f)),
                 "is 0; allowed is above 0, up to 1");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.attention.layer_norm_rms_epsilon", std::nanf(""))),
                 "is nan; allowed");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.rope.freq_base", -1.0f)), "is -1; allowed is above 1");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.rope.scaling.type", std::string_view("linear"))),
                 "key 'qwen2.rope.scaling.type' is 'linear'; allowed are 'none' and 'yarn'");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.rope.scaling.type", std::string_view("yarn"))),
                 "key 'qwen2.rope.scaling.factor' is missing");
  CHECK_CONTAINS(refusal(TinyModel().set("qwen2.rope.scaling.attn_factor", 1.0f)), "is not understood");
  CHECK(refusal(TinyModel().without_tensor("blk.0.attn_q.bias").with_tensor("extra", WeightType::f32, {1})) ==
        "tiny.gguf: tensor 'blk.0.attn_q.bias' is missing");
  CHECK_CONTAINS(
      refusal(TinyModel().without_tensor("token_embd.weight").with_tensor("extra", WeightType::f32, {1})),
      "tensor 'token_embd.weight' is missing");
  CHECK_CONTAINS(refusal(TinyModel().with_tensor("blk.0.attn_output.bias", WeightType::f32, {32})),
                 "tensor 'blk.0.attn_output.bias' is not one that a qwen2 model of 1 layers has");
  CHECK(refusal(TinyModel().with_tensor("blk.0.attn_k.weight", WeightType::q8_0, {32, 32})) ==
        "tiny.gguf: tensor 'blk.0.attn_k.weight' has shape [32, 32]; allowed is [32, 16]");
  CHECK(refusal(TinyModel().with_tensor("blk.0.attn_k.bias", WeightType::f32, {16, 1})) ==
        "tiny.gguf: tensor 'blk.0.attn_k.bias' has shape [16, 1]; allowed is [16]");
  CHECK_CONTAINS(refusal(TinyModel().with_tensor("output_norm.weight", WeightType::f16, {32})),
                 "tensor 'output_norm.weight' has type F16; allowed is F32");
  CHECK_CONTAINS(refusal(TinyModel().with_tensor("output.weight", WeightType::f16, {32, 11})),
                 "tensor 'output.weight' has shape [32, 11]; allowed is [32, 10]");
  CHECK_CONTAINS(refusal(TinyModel().with_tensor("token_embd.weight", WeightType::f16, {16, 10})),
                 "tensor 'token_embd.weight' has shape [16, 10]; allowed is [32, V]");
  const std::vector<std::string_view> tokens(11, "x");
  Array array;
  array.element = gguf::ValueType::string;
  array.count = tokens.size();
  array.strings = tokens;
  CHECK_CONTAINS(
      refusal(TinyModel().set("tokenizer.ggml.tokens", array)),
      "key 'tokenizer.ggml.tokens' has 11 tokens; allowed are up to the rows of token_embd.weight, 10");
}

TEST_CASE("quantizer rules reproduce the tensor types and bytes of published Qwen2.5 files") {
  struct Published {
    const char* size;
    const char* type;
    bool tied;
    std::map<WeightType, int> tensors;  // besides F32
    std::int64_t bytes;
    int f32;
  };
  using enum WeightType;
  const std::vector<Published> published = {
      {"0.5b", "Q4_0", false, {{q4_0, 169}, {q8_0, 1}}, 422782464, 121},
      {"0.5b", "Q4_0", true, {{q4_0, 168}, {q8_0, 1}}, 346206720, 121},
      {"0.5b", "Q4_K_M", false, {{q5_0, 133}, {q8_0, 13}, {q4_k, 12}, {q6_k, 12}}, 485452288, 121},
      {"0.5b", "Q4_K_M", true, {{q5_0, 132}, {q8_0, 13}, {q4_k, 12}, {q6_k, 12}}, 391859712, 121},
      {"0.5b", "Q8_0", false, {{q8_0, 170}}, 669763072, 121},
      {"0.5b", "Q8_0", true, {{q8_0, 169}}, 525120000, 121},
      {"0.5b", "F16", false, {{f16, 170}}, 1260477952, 121},
      {"0.5b", "F16", true, {{f16, 169}}, 988208640, 121},
      {"1.5b", "Q4_0", false, {{q4_0, 197}, {q6_k, 1}}, 1060276736, 141},
      {"1.5b", "Q4_0", true, {{q4_0, 196}, {q6_k, 1}}, 929004032, 141},
      {"1.5b", "Q4_K_M", false, {{q4_k, 169}, {q6_k, 29}}, 1111370240, 141},
      {"1.5b", "Q4_K_M", true, {{q4_k, 168}, {q6_k, 29}}, 980097536, 141},
      {"1.5b", "Q8_0", false, {{q8_0, 198}}, 1888581632, 141},
      {"1.5b", "Q8_0", true, {{q8_0, 197}}, 1640622080, 141},
      {"3b", "Q4_0", false, {{q4_0, 253}, {q6_k, 1}}, 1991923712, 181},
      {"3b", "Q4_0", true, {{q4_0, 252}, {q6_k, 1}}, 1816893440, 181},
      {"3b", "Q4_K_M", false, {{q4_k, 217}, {q6_k, 37}}, 2098976768, 181},
      {"3b", "Q4_K_M", true, {{q4_k, 216}, {q6_k, 37}}, 1923946496, 181},
      {"7b", "Q4_0", false, {{q4_0, 197}, {q6_k, 1}}, 4425437184, 141},
      {"7b", "Q4_K_M", false, {{q4_k, 169}, {q6_k, 29}}, 4677120000, 141},
      {"7b", "Q8_0", false, {{q8_0, 198}}, 8092571648, 141},
      {"7b", "F16", false, {{f16, 198}}, 15231899648, 141},
      {"14b", "Q4_K_M", false, {{q4_k, 289}, {q6_k, 49}}, 8982142976, 241},
      {"32b", "Q4_K_M", false, {{q4_k, 385}, {q6_k, 65}}, 19845357568, 321},
      {"72b",
       "Q4_K_M",
       false,
       {{q4_k, 401}, {q6_k, 41}, {q5_k, 40}, {q5_0, 40}, {q8_0, 40}},
       47409725440,
       401},
  };
  const std::map<std::string, std::int64_t> parameters = {
      {"0.5b tied", 494032768}, {"0.5b", 630167424}, {"1.5b tied", 1543714304}, {"1.5b", 1777088000},
      {"3b tied", 3085938688},  {"3b", 3397103616},  {"7b", 7615616512},        {"14b", 14770033664},
      {"32b", 32763876352},     {"72b", 72706203648}};
  for (const Published& p : published) {
    INFO(p.size, " ", p.type, p.tied ? " tied" : "");
    const qwen::FileType* type = qwen::find_file_type(p.type);
    REQUIRE(type != nullptr);
    const crafted::Bytes header = qwen::planned_header(qwen::size_by_name(p.size), *type, p.tied, p.size);
    const File f(header, "planned.gguf", true);
    const qwen::Model m(f);
    CHECK(m.tensor_bytes() == p.bytes);
    CHECK(m.parameters() == parameters.at(p.size + std::string(p.tied ? " tied" : "")));
    CHECK(m.file_type == type->description);
    const qwen::Census census = qwen::census(m, {});
    std::map<WeightType, int> counts;
    for (const auto& t : census.types) counts[t.type] = static_cast<int>(t.tensors);
    std::map<WeightType, int> expected = p.tensors;
    expected[f32] = p.f32;
    CHECK(counts == expected);
  }
}

TEST_CASE("mixtures: names, fallbacks, and the tensors that get more bits") {
  CHECK(qwen::file_types().size() == 19);
  CHECK(qwen::find_file_type("q4_k_m") == qwen::find_file_type("Q4_K_M"));
  CHECK(qwen::find_file_type("q4_k") == nullptr);
  CHECK(qwen::find_file_type("") == nullptr);
  using enum WeightType;
  const qwen::MixtureModel m{.layers = 32, .gqa = 4, .tied = false};
  const auto type = [&](const char* mixture, const char* tensor, const qwen::MixtureModel& of,
                        std::int64_t ne0 = 4096) {
    const qwen::FileType* to = qwen::find_file_type(mixture);
    REQUIRE(to != nullptr);
    return qwen::tensor_type(*to, tensor, ne0, 2, of);
  };
  const qwen::MixtureModel few{.layers = 32, .gqa = 2, .tied = true},
      eighty{.layers = 80, .gqa = 8, .tied = false};
  // Norms and biases stay, whatever the mixture.
  for (const qwen::FileType& to : qwen::file_types()) {
    CHECK(qwen::tensor_type(to, "blk.0.attn_norm.weight", 4096, 1, m) == f32);
    const bool plain = info(to.base).block_elems == 1;
    CHECK(qwen::tensor_type(to, "output.weight", 4096, 2, m) == (plain || to.base == q8_0 ? to.base : q6_k));
    CHECK(qwen::tensor_type(to, "blk.9.attn_q.weight", 4096, 2, m) == to.base);
  }
  CHECK(type("Q4_0", "token_embd.weight", m) == q4_0);
  CHECK(type("Q4_0", "token_embd.weight", few) == q6_k);  // tied
  CHECK(type("Q2_K", "blk.9.attn_v.weight", m) == q4_k);
  CHECK(type("Q2_K", "blk.9.attn_v.weight", few) == q3_k);
  CHECK(type("Q2_K", "blk.9.ffn_down.weight", m) == q3_k);
  CHECK(type("Q2_K", "blk.9.attn_output.weight", m) == q3_k);
  CHECK(type("Q3_K_S", "blk.0.ffn_down.weight", m) == q3_k);
  CHECK(type("Q3_K_M", "blk.1.attn_v.weight", m) == q5_k);
  CHECK(type("Q3_K_M", "blk.2.attn_v.weight", m) == q4_k);
  CHECK(type("Q3_K_M", "blk.1.ffn_down.weight", m) == q5_k);
  CHECK(type("Q3_K_M", "blk.2.ffn_down.weight", m) == q4_k);
  CHECK(type("Q3_K_M", "blk.9.attn_output.weight", m) == q4_k);
  CHECK(type("Q3_K_L", "blk.9.attn_v.weight", m) == q5_k);
  CHECK(type("Q3_K_L", "blk.9.ffn_down.weight", m) == q5_k);
  CHECK(type("Q3_K_L", "blk.9.attn_output.weight", m) == q5_k);
  CHECK(type("Q4_K_S", "blk.3.attn_v.weight", m) == q5_k);
  CHECK(type("Q4_K_S", "blk.4.attn_v.weight", m) == q4_k);
  CHECK(type("Q4_K_S", "blk.3.ffn_down.weight", m) == q5_k);
  CHECK(type("Q4_K_S", "blk.4.ffn_down.weight", m) == q4_k);
  CHECK(type("Q5_K_S", "blk.0.attn_v.weight", m) == q5_k);
  CHECK(type("Q5_K_M", "blk.6.attn_v.weight", m) == q6_k);
  CHECK(type("Q5_K_M", "blk.7.attn_v.weight", m) == q5_k);
  CHECK(type("Q5_K_M", "blk.28.ffn_down.weight", m) == q6_k);
  CHECK(type("IQ4_XS", "blk.9.attn_v.weight", m) == q5_k);
  CHECK(type("IQ4_XS", "blk.9.attn_v.weight", few) == iq4_xs);
  CHECK(type("IQ4_NL", "blk.3.ffn_down.weight", m) == q5_k);
  CHECK(type("IQ4_NL", "blk.4.ffn_down.weight", m) == iq4_nl);
  CHECK(type("Q4_K_M", "blk.31.attn_v.weight", eighty) == q5_k);
  CHECK(type("Q4_K_M", "blk.9.attn_v.weight", eighty) == q6_k);
  CHECK(type("Q3_K_S", "blk.31.attn_v.weight", eighty) == q5_k);
  // Rows that are not whole blocks.
  CHECK(type("Q2_K", "blk.9.attn_q.weight", m, 896) == q4_0);
  CHECK(type("Q3_K_S", "blk.9.attn_q.weight", m, 896) == q4_0);
  CHECK(type("Q4_K_S", "blk.9.attn_q.weight", m, 896) == q5_0);
  CHECK(type("Q5_K_S", "blk.9.attn_q.weight", m, 896) == q5_1);
  CHECK(type("Q6_K", "blk.9.attn_q.weight", m, 896) == q8_0);
  CHECK(type("IQ4_XS", "blk.9.attn_q.weight", m, 896) == iq4_nl);
  CHECK(type("Q4_K_M", "output.weight", m, 896) == q8_0);
  CHECK(type("Q4_K_M", "blk.9.attn_q.weight", m, 40) == f16);
  CHECK(type("Q8_0", "blk.9.attn_q.weight", m, 40) == f16);
}

namespace {

/// A tiny model in a file, its matrices F32 with weights that differ.
void write_tiny(const std::filesystem::path& path, float poison = 0.25f) {
  const TinyModel tiny;
  Writer w;
  for (const auto& [k, v] : tiny.keys) w.set(k, v);
  for (const TinyModel::Planned& t : tiny.tensors) {
    w.add(t.name, WeightType::f32, t.ne, [&t, poison](std::span<std::byte> out) {
      for (std::size_t i = 0; i < out.size() / 4; ++i) {
        const float x = i == 100 && t.name == "blk.0.ffn_up.weight"
                            ? poison
                            : std::sin(static_cast<float>(i) * 0.7f + 1.0f);
        std::memcpy(out.data() + 4 * i, &x, 4);
      }
    });
  }
  w.write(path);
}

}  // namespace

TEST_CASE("quantizing a file: types, bytes, metadata, and a report") {
  const Folder folder;
  write_tiny(folder / "f32.gguf");
  const File from(folder / "f32.gguf");
  for (const qwen::FileType& type : qwen::file_types()) {
    INFO(type.name);
    const auto one = folder / "one.gguf", many = folder / "many.gguf";
    const qwen::QuantizeReport report = qwen::quantize_model(from, one, type, 1, false);
    qwen::quantize_model(from, many, type, 3, false);
    CHECK(read_text(one) == read_text(many));
    const File f(one);
    const qwen::Model m(f);
    CHECK(m.file_type == type.description);
    CHECK(f.get<std::uint32_t>("general.quantization_version") == 2);
    CHECK(report.bytes_before == static_cast<std::uint64_t>(qwen::Model(from).tensor_bytes()));
    CHECK(report.bytes_after == static_cast<std::uint64_t>(m.tensor_bytes()));
    CHECK(report.requantized.empty());
    // Rows of 32 and 64: every matrix of a 256-block type falls back, and so does the token embedding, which
    // is the output too and is wanted as Q6_K, of a 32-block type. Q8_0 and the plain types fit.
    const bool falls_back = info(type.base).block_elems > 1 && type.base != WeightType::q8_0;
    CHECK(report.fallbacks.empty() == !falls_back);
    for (const gguf::Tensor& t : f.tensors()) {
      const gguf::Tensor* source = from.tensor(t.name);
      REQUIRE(source != nullptr);
      if (t.dimensions == 1) CHECK(t.type == WeightType::f32);
      for (std::int64_t r = 0; r < t.rows(); ++r) {
        const auto row_bytes = static_cast<std::size_t>(t.bytes / t.rows());
        std::vector<float> x(static_cast<std::size_t>(t.row_length()));
        std::memcpy(x.data(), source->data.data() + static_cast<std::size_t>(r) * x.size() * 4, x.size() * 4);
        crafted::Bytes expected(row_bytes);
        quantize_row(t.type, x.data(), expected.data(), t.row_length());
        CHECK(std::memcmp(expected.data(), t.data.data() + static_cast<std::size_t>(r) * row_bytes,
                          row_bytes) == 0);
      }
    }
  }
  const qwen::FileType& q8 = *qwen::find_file_type("Q8_0");
  const qwen::QuantizeReport first = qwen::quantize_model(from, folder / "q8.gguf", q8, 2, false);
  CHECK(first.requantized.empty());
  const qwen::QuantizeReport second = qwen::quantize_model(File(folder / "q8.gguf"), folder / "q4.gguf",
                                                           *qwen::find_file_type("Q4_0"), 2, false);
  REQUIRE(second.requantized.size() == 7);  // all matrices but the embedding, which is Q8_0 again
  CHECK_CONTAINS(second.requantized[0], "was quantized already, Q8_0 to Q4_0");
  // The same type again copies the bytes.
  qwen::quantize_model(File(folder / "q8.gguf"), folder / "again.gguf", q8, 2, false);
  CHECK(read_text(folder / "q8.gguf") == read_text(folder / "again.gguf"));

  CHECK_CONTAINS(message_of([&] { qwen::quantize_model(from, folder / "x.gguf", q8, -1, false); }),
                 "threads is -1");
  write_tiny(folder / "nan.gguf", std::nanf(""));
  CHECK_CONTAINS(
      message_of([&] { qwen::quantize_model(File(folder / "nan.gguf"), folder / "x.gguf", q8, 2, false); }),
      "nan.gguf: tensor 'blk.0.ffn_up.weight', row 3: ");
  CHECK_FALSE(std::filesystem::exists(folder / "x.gguf"));
}

TEST_CASE("census: bytes of a token, of the cache, and ceilings") {
  const crafted::Bytes header =
      qwen::planned_header(qwen::size_by_name("7B"), *qwen::find_file_type("Q4_K_M"), false, "7B");
  const File f(header, "7b.gguf", true);
  const qwen::Model m(f);
  const std::vector<qwen::Bandwidth> devices = {{"slow", 100.0}, {"fast", 1000.0}};
  const qwen::Census c = qwen::census(m, devices);
  CHECK(c.kv_bytes_f32 == 114688);
  CHECK(c.kv_bytes_f16 == 57344);
  // All but the embedding table (152064 rows of 14 blocks of Q4_K), of which one row is read.
  CHECK(c.bytes_per_token == 4677120000 - 152064LL * 14 * 144 + 14 * 144);
  REQUIRE(c.ceilings.size() == 2);
  CHECK(c.ceilings[1].tokens_per_second == doctest::Approx(1e12 / 4370560992.0));
  const qwen::Census deep = qwen::census(m, devices, 10000);
  CHECK(deep.ceilings[0].tokens_per_second == doctest::Approx(1e11 / (4370560992.0 + 573440000.0)));
  std::ostringstream text;
  qwen::print_text(text, c);
  CHECK_CONTAINS(text.str(), "Q4_K          169");
  CHECK_CONTAINS(text.str(), "4370560992 bytes (4370.6 MB)");
  CHECK_CONTAINS(qwen::to_json(c), "\"bytes_per_token\": 4370560992");
  CHECK_CONTAINS(qwen::to_json(c), "{\"type\": \"Q6_K\", \"tensors\": 29");
  CHECK_CONTAINS(message_of([&] { (void)qwen::census(m, devices, 32769); }), "allowed are 0 to 32768");
  const qwen::Bandwidth broken{"broken", -1.0};
  CHECK_CONTAINS(message_of([&] {
                   (void)qwen::census(m, {&broken, 1});
                 }),
                 "the bandwidth of broken is -1 GB/s");
}

TEST_CASE("synthetic models: exact shapes, plausible weights, the same bytes for any number of threads") {
  const Folder folder;
  qwen::SyntheticModel what{
      .size = "tales", .type = qwen::find_file_type("Q4_K_M"), .tied = true, .seed = 7, .threads = 1};
  const std::uint64_t bytes = qwen::write_synthetic(folder / "one.gguf", what);
  what.threads = 3;
  qwen::write_synthetic(folder / "three.gguf", what);
  CHECK(read_text(folder / "one.gguf") == read_text(folder / "three.gguf"));
  what.seed = 8;
  qwen::write_synthetic(folder / "other.gguf", what);
  CHECK(read_text(folder / "one.gguf") != read_text(folder / "other.gguf"));

  const File f(folder / "one.gguf");
  CHECK(f.bytes() == bytes);
  const qwen::Model m(f);
  CHECK(m.hp.vocabulary == 4096);
  CHECK(m.size_label == "tales");
  CHECK(m.tied);
  CHECK(f.get<const Array*>("tokenizer.ggml.tokens")->strings.size() == 4096);
  for (const gguf::Tensor& t : f.tensors()) {
    INFO(std::string(t.name));
    std::vector<float> row(static_cast<std::size_t>(t.row_length()));
    double sum = 0, squares = 0;
    const auto row_bytes = static_cast<std::size_t>(t.bytes / t.rows());
    for (std::int64_t r = 0; r < t.rows(); ++r) {
      dequantize_row(t.type, t.data.data() + static_cast<std::size_t>(r) * row_bytes, row.data(),
                     t.row_length());
      for (const float x : row) {
        sum += x;
        squares += static_cast<double>(x) * x;
      }
    }
    const auto n = static_cast<double>(t.elements());
    if (t.dimensions == 2) {
      const double deviation = 1.0 / std::sqrt(static_cast<double>(t.row_length()));
      CHECK(std::abs(sum / n) < 0.02 * deviation);
      CHECK(std::abs(std::sqrt(squares / n) / deviation - 1) < 0.03);
    } else if (t.name.ends_with("_norm.weight")) {
      CHECK(sum == n);
    } else {
      CHECK(std::sqrt(squares / n) < 0.1);
      CHECK(squares > 0);
    }
  }
  // Another file's vocabulary.
  what.type = qwen::find_file_type("Q8_0");
  what.vocabulary = &f;
  what.tied = false;
  qwen::write_synthetic(folder / "copied.gguf", what);
  const File g(folder / "copied.gguf");
  CHECK_FALSE(qwen::Model(g).tied);
  CHECK(g.get<const Array*>("tokenizer.ggml.tokens")->strings ==
        f.get<const Array*>("tokenizer.ggml.tokens")->strings);
  what.size = "8b";
  CHECK_CONTAINS(message_of([&] { qwen::write_synthetic(folder / "x.gguf", what); }),
                 "size '8b' is not known; allowed are 0.5b, 1.5b, 3b, 7b, 14b, 32b, 72b, tales");
}
