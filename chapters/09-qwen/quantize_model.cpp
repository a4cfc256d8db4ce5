// `qwen quantize`: reads rows, writes rows.
#include "chapters/09-qwen/quantize_model.hpp"

#include <cstring>
#include <stdexcept>
#include <thread>

#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/model.hpp"
#include "chapters/09-qwen/parallel.hpp"
#include "chapters/09-qwen/progress.hpp"
#include "kernels/quant/dequantize.hpp"
#include "kernels/quant/quantize.hpp"

namespace ladder::qwen {

namespace {

constexpr std::uint32_t kQuantizationVersion = 2;               // GGML_QNT_VERSION
constexpr std::int64_t kPieceElements = std::int64_t{1} << 18;  // elements that a thread takes at once

bool quantized(WeightType type) { return info(type).block_elems > 1; }

/// out = the tensor's rows in another type.
void convert(const gguf::Tensor& t, WeightType to, std::span<std::byte> out, int threads,
             const std::string& file) {
  if (t.type == to) {
    std::memcpy(out.data(), t.data.data(), out.size());
    return;
  }
  const std::int64_t id = t.row_length(), rows = t.rows();
  const auto from_row = static_cast<std::size_t>(t.bytes / rows);
  const auto to_row = static_cast<std::size_t>(gguf::tensor_bytes(to, id, 1).value());
  parallel_rows(threads, rows, std::max<std::int64_t>(1, kPieceElements / id),
                [&](std::int64_t first, std::int64_t last) {
                  Interrupt::check();
                  std::vector<float> row(static_cast<std::size_t>(id));
                  for (std::int64_t r = first; r < last; ++r) {
                    const auto i = static_cast<std::size_t>(r);
                    dequantize_row(t.type, t.data.data() + i * from_row, row.data(), id);
                    try {
                      quantize_row(to, row.data(), out.data() + i * to_row, id);
                    } catch (const std::invalid_argument& error) {  // a weight that the type cannot hold
                      throw gguf::FileError(file + ": tensor '" + gguf::shown(t.name) + "', row " +
                                            std::to_string(r) + ": " + error.what());
                    }
                  }
                });
}

}  // namespace

QuantizeReport quantize_model(const gguf::File& from, const std::filesystem::path& to, const FileType& type,
                              int threads, bool progress) {
  if (threads < 0) {
    throw std::invalid_argument("threads is " + std::to_string(threads) +
                                "; allowed are 0 (one for each CPU) and more");
  }
  if (threads == 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const Model model(from);
  const MixtureModel mixture{.layers = model.hp.block_count,
                             .gqa = model.hp.head_count / model.hp.head_count_kv,
                             .tied = model.tied};
  QuantizeReport report;
  gguf::Writer writer(from.alignment());
  writer.copy_metadata(from);
  writer.set("general.file_type", type.code);
  writer.set("general.quantization_version", kQuantizationVersion);
  for (const gguf::Tensor& t : from.tensors()) {
    if (t.data.empty()) {
      throw gguf::FileError(from.name() + ": tensor '" + gguf::shown(t.name) +
                            "' has no bytes: the file was opened for its header only");
    }
    const std::string name(t.name);
    const WeightType wanted = wanted_type(type, name, t.row_length(), t.dimensions, mixture);
    const WeightType target = fitting_type(wanted, t.row_length());
    if (target != wanted) {
      report.fallbacks.push_back(name + ": rows of " + std::to_string(t.row_length()) +
                                 " elements are not whole blocks of " + gguf::type_name(wanted) + " (" +
                                 std::to_string(info(wanted).block_elems) + "): " + gguf::type_name(target));
    }
    if (target != t.type && quantized(t.type)) {
      report.requantized.push_back(name + ": was quantized already, " + gguf::type_name(t.type) + " to " +
                                   gguf::type_name(target));
    }
    report.bytes_before += static_cast<std::uint64_t>(t.bytes);
    report.bytes_after +=
        static_cast<std::uint64_t>(gguf::tensor_bytes(target, t.row_length(), t.rows()).value());
    writer.add(name, target, {t.ne.begin(), t.ne.begin() + t.dimensions},
               [&t, target, threads, &from](std::span<std::byte> out) {
                 convert(t, target, out, threads, from.name());
               });
  }
  std::optional<ProgressBar> bar;
  if (progress) bar.emplace("quantizing");
  writer.write(to, [&bar](std::uint64_t done, std::uint64_t all) {
    if (bar) bar->update(done, all);
  });
  return report;
}

}  // namespace ladder::qwen
