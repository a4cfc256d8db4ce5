// quant_tool quantize|dequantize TYPE < input > output
//
// Raw little-endian data on both sides: f32 numbers and packed blocks, whole blocks only. How scripts/tests
// compares the quantizers with another implementation.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/quant/dequantize.hpp"
#include "kernels/quant/quantize.hpp"

namespace {

using namespace ladder;

std::vector<unsigned char> read_all(std::FILE* file) {
  std::vector<unsigned char> bytes;
  unsigned char chunk[1 << 16];
  for (std::size_t n; (n = std::fread(chunk, 1, sizeof chunk, file)) > 0;)
    bytes.insert(bytes.end(), chunk, chunk + n);
  if (std::ferror(file)) throw std::runtime_error("cannot read standard input");
  return bytes;
}

void write_all(std::FILE* file, const void* data, std::size_t bytes) {
  if (std::fwrite(data, 1, bytes, file) != bytes || std::fflush(file) != 0) {
    throw std::runtime_error("cannot write standard output");
  }
}

WeightType parse_type(std::string_view name) {
  std::string known;
  for (const WeightTypeInfo& t : kWeightTypes) {
    if (name == t.name) return t.type;
    known += std::string(known.empty() ? "" : ", ") + t.name;
  }
  throw std::invalid_argument("unknown type '" + std::string(name) + "'; known are " + known);
}

void quantize(WeightType type) {
  const std::vector<unsigned char> in = read_all(stdin);
  if (in.size() % sizeof(float) != 0) throw std::invalid_argument("the input is not whole f32 numbers");
  std::vector<float> values(in.size() / sizeof(float));
  if (!in.empty()) std::memcpy(values.data(), in.data(), in.size());
  const auto n = static_cast<std::int64_t>(values.size());
  std::vector<unsigned char> out(row_bytes(type, n));
  quantize_row(type, values.data(), out.data(), n);
  write_all(stdout, out.data(), out.size());
}

void dequantize(WeightType type) {
  const std::vector<unsigned char> in = read_all(stdin);
  const auto block = static_cast<std::size_t>(info(type).block_bytes);
  if (in.size() % block != 0) {
    throw std::invalid_argument("the input is not whole blocks of " + std::to_string(block) + " bytes");
  }
  std::vector<float> values(in.size() / block * static_cast<std::size_t>(info(type).block_elems));
  dequantize_row(type, in.data(), values.data(), static_cast<std::int64_t>(values.size()));
  write_all(stdout, values.data(), values.size() * sizeof(float));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string_view what = argc == 3 ? argv[1] : "";
    if (what == "quantize") {
      quantize(parse_type(argv[2]));
    } else if (what == "dequantize") {
      dequantize(parse_type(argv[2]));
    } else {
      throw std::invalid_argument("usage: quant_tool quantize|dequantize TYPE < input > output");
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "quant_tool: %s\n", e.what());
    return 2;
  }
  return 0;
}
