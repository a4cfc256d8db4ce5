#include "chapters/09-qwen/plan.hpp"

#include <algorithm>
#include <ostream>
#include <stdexcept>

#include "harness/experiment/json.hpp"
#include "kernels/gemv/gemv_fused_shape.hpp"

namespace ladder::qwen {
namespace {

/// "blk.7.attn_q.weight" -> "attn_q"; "output.weight" -> "output".
std::string role_of(const std::string& name) {
  std::string role = name;
  if (role.starts_with("blk.")) role = role.substr(role.find('.', 4) + 1);
  return role.substr(0, role.rfind(".weight"));
}

bool same_decisions(const PlannedMatrix& a, const PlannedMatrix& b) {
  return std::equal(a.at.begin(), a.at.end(), b.at.begin(), b.at.end(),
                    [](const PlannedMatrix::At& x, const PlannedMatrix::At& y) {
                      return x.nt == y.nt && x.kernel == y.kernel && x.gate == y.gate && x.margin == y.margin;
                    });
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(text.size() + 1, width), ' ');
  return text;
}

}  // namespace

bool fuses(dispatch::Kernel kernel, const gguf::Tensor& t, const DeviceInfo& device) {
  return kernel == dispatch::Kernel::f32_matmul &&
         gemv_fused_supported(t.type, t.row_length(), device.shared_per_block_optin).ok();
}

std::vector<PlannedMatrix> plan(const Model& model, const DispatchSetting& setting,
                                std::span<const int> rows) {
  std::vector<const gguf::Tensor*> matrices;
  for (const Layer& l : model.layers) {
    for (const gguf::Tensor* t :
         {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down}) {
      matrices.push_back(t);
    }
  }
  matrices.push_back(model.output);
  std::vector<PlannedMatrix> planned;
  for (const gguf::Tensor* t : matrices) {
    PlannedMatrix m;
    m.tensor = t;
    for (const int nt : rows) {
      const dispatch::Request request{t->type, {nt, t->rows(), t->row_length()}, setting.exact};
      dispatch::Decision decision;
      if (Status ok = dispatch::decide(setting.table, request, setting.device, setting.switches, &decision);
          !ok.ok()) {
        throw std::runtime_error(std::string(t->name) + ": " + ok.message());
      }
      PlannedMatrix::At at;
      at.nt = nt;
      at.kernel = nt == 1 && fuses(decision.kernel(), *t, setting.device)
                      ? kFusedName
                      : dispatch::kernel_name(decision.kernel(), t->type, t->row_length());
      at.gate = decision.gate->name;
      at.margin = dispatch::to_text(decision.margin);
      at.factor = decision.margin.factor;
      at.tier = dispatch::info(decision.kernel()).tier;
      for (const dispatch::Verdict& v : decision.refused) {
        at.refused.push_back(v.gate->name + ": " + dispatch::to_text(v, request, setting.device));
      }
      m.at.push_back(std::move(at));
    }
    planned.push_back(std::move(m));
  }
  return planned;
}

void print_text(std::ostream& out, const std::vector<PlannedMatrix>& planned, bool reasons) {
  struct Line {
    const PlannedMatrix* first;
    int count;
  };
  std::vector<Line> lines;
  for (const PlannedMatrix& m : planned) {
    const auto same = std::find_if(lines.begin(), lines.end(), [&m](const Line& l) {
      const gguf::Tensor &a = *l.first->tensor, &b = *m.tensor;
      return role_of(std::string(a.name)) == role_of(std::string(b.name)) && a.type == b.type &&
             a.rows() == b.rows() && a.row_length() == b.row_length() && same_decisions(*l.first, m);
    });
    if (same != lines.end()) {
      ++same->count;
    } else {
      lines.push_back({&m, 1});
    }
  }
  out << padded("matrix", 14) << padded("type", 8) << padded("[od, id]", 18) << padded("nt", 5)
      << padded("kernel", 26) << padded("gate", 27) << "margin\n";
  for (const Line& l : lines) {
    const gguf::Tensor& t = *l.first->tensor;
    std::string name = role_of(std::string(t.name));
    if (l.count > 1) name += " x" + std::to_string(l.count);
    std::string type = gguf::type_name(t.type);
    std::string shape = "[" + std::to_string(t.rows()) + ", " + std::to_string(t.row_length()) + "]";
    for (const PlannedMatrix::At& at : l.first->at) {
      std::string line = padded(name, 14) + padded(type, 8) + padded(shape, 18) +
                         padded(std::to_string(at.nt), 5) + padded(at.kernel, 26) + padded(at.gate, 27) +
                         at.margin;
      out << line << "\n";
      for (const std::string& reason : at.refused) {
        if (reasons) out << padded("", 45) << "not " << reason << "\n";
      }
      name.clear();
      type.clear();
      shape.clear();
    }
  }
}

std::string to_json(const std::vector<PlannedMatrix>& planned) {
  std::string list;
  for (const PlannedMatrix& m : planned) {
    std::string each;
    for (const PlannedMatrix::At& at : m.at) {
      std::string refused;
      for (const std::string& reason : at.refused)
        refused += (refused.empty() ? "" : ", ") + json_quote(reason);
      JsonObject o;
      o.add("nt", at.nt).add("kernel", at.kernel).add("tier", at.tier).add("gate", at.gate);
      o.add("margin", at.factor).add("margin_text", at.margin).raw("refused", "[" + refused + "]");
      each += (each.empty() ? "" : ", ") + o.str();
    }
    JsonObject o;
    o.add("tensor", std::string(m.tensor->name)).add("type", gguf::type_name(m.tensor->type));
    o.add("od", m.tensor->rows()).add("id", m.tensor->row_length()).raw("at", "[" + each + "]");
    list += (list.empty() ? "" : ",\n ") + o.str();
  }
  return "[" + list + "]";
}

}  // namespace ladder::qwen
