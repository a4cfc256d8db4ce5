#include "chapters/09-qwen/chat.hpp"

#include <array>
#include <stdexcept>

namespace ladder::qwen {
namespace {

constexpr std::string_view kStart = "<|im_start|>", kEnd = "<|im_end|>";
constexpr std::string_view kNotRecognised = "not recognised";
constexpr std::string_view kQwen2SystemPrompt = "You are a helpful assistant.";

bool holds(std::string_view text, std::string_view what) { return text.find(what) != std::string_view::npos; }

/// Jinja's \n in a literal is a line end.
std::string unescaped(std::string_view literal) {
  std::string text;
  for (std::size_t i = 0; i < literal.size(); ++i) {
    const bool line_end = literal.substr(i, 2) == "\\n";
    text += line_end ? '\n' : literal[i];
    i += static_cast<std::size_t>(line_end);
  }
  return text;
}

}  // namespace

std::string template_kind(std::string_view chat_template) {
  // A format is known by markers that no other has; the first that fits is named, so the narrower stand
  // first.
  struct Marker {
    std::string_view text, format;
  };
  constexpr std::array<Marker, 20> kForeign{{{"<<SYS>>", "Llama 2"},
                                             {"[INST]", "Mistral"},  // Llama 2 has it too, with <<SYS>>
                                             {"<|start_header_id|>", "Llama 3"},
                                             {"<|header_start|>", "Llama 4"},
                                             {"<start_of_turn>", "Gemma"},
                                             {"<｜User｜>", "DeepSeek"},
                                             {"<|START_OF_TURN_TOKEN|>", "Command R"},
                                             {"<|start_of_role|>", "Granite"},
                                             {"<|im_middle|>", "Kimi"},
                                             {"<|channel|>", "Harmony"},
                                             {"[gMASK]", "ChatGLM"},
                                             {"<reserved_106>", "Baichuan"},
                                             {"<|startoftext|>", "Hunyuan"},
                                             {"<|bom|>", "Jamba"},
                                             {"GPT4 Correct", "OpenChat"},
                                             {"### Instruction", "Alpaca"},
                                             {"USER:", "Vicuna"},
                                             {"<|user|>", "Phi or Zephyr"},
                                             {"<|assistant|>", "Phi or Zephyr"},
                                             {"[|Human|]", "EXAONE"}}};
  for (const Marker& marker : kForeign) {
    if (holds(chat_template, marker.text)) return std::string(marker.format);
  }
  return std::string(holds(chat_template, kStart) && holds(chat_template, kEnd) ? "ChatML" : kNotRecognised);
}

std::string default_system_prompt_of(std::string_view chat_template) {
  // 1. A literal with the whole message. What stands there instead of plain words, if the message is put
  //    together from parts, begins with a quote that ends the literal or with a brace.
  const std::string opening = std::string(kStart) + "system";
  for (std::size_t at = chat_template.find(opening); at != std::string_view::npos;
       at = chat_template.find(opening, at + 1)) {
    std::string_view rest = chat_template.substr(at + opening.size());
    if (rest.starts_with("\\n")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with('\n')) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    const std::size_t end = rest.find(kEnd);
    if (end == std::string_view::npos) break;
    const std::string_view message = rest.substr(0, end);
    if (message.empty() || message.find_first_of("'\"{}") != std::string_view::npos) continue;
    return unescaped(message);
  }
  // 2. The message in a literal of its own.
  for (const std::string_view sentence : {kDefaultSystemPrompt, kQwen2SystemPrompt}) {
    if (holds(chat_template, sentence)) return std::string(sentence);
  }
  return {};
}

ChatFormat::ChatFormat(const gguf::File& file, const Tokenizer& tokenizer, std::string_view template_name)
    : tokenizer_(&tokenizer),
      start_(tokenizer.find(kStart)),
      end_(tokenizer.find(kEnd)),
      default_system_(kDefaultSystemPrompt) {
  const auto fail = [&file](const std::string& what) { throw gguf::FileError(file.name() + ": " + what); };
  constexpr const char* kKey = "tokenizer.chat_template";
  if (template_name.empty()) {
    if (file.find(kKey) != nullptr) {
      const auto text = file.get<std::string_view>(kKey);
      const std::string kind = template_kind(text);
      if (kind != "ChatML") {
        fail(std::string("its chat template is ") +
             (kind == kNotRecognised ? kind : "for another format (" + kind + ")") +
             "; only ChatML is supported, which the template name 'chatml' uses whatever the file says");
      }
      default_system_ = default_system_prompt_of(text);
    }
  } else if (template_name != "chatml") {
    throw std::invalid_argument("no chat template is called '" + std::string(template_name) +
                                "'; 'chatml' is, and none given means the file's own");
  }
  for (const auto& [name, token] : {std::pair{kStart, start_}, std::pair{kEnd, end_}}) {
    const bool there = token >= 0 && (tokenizer.type(token) == TokenType::control ||
                                      tokenizer.type(token) == TokenType::user_defined);
    if (!there) fail("its vocabulary has no special token " + std::string(name) + ", which ChatML needs");
  }
  newline_ = tokenizer.encode("\n");
}

void ChatFormat::append(std::vector<Token>& to, const Message& message) const {
  if (message.role != "system" && message.role != "user" && message.role != "assistant") {
    throw std::invalid_argument("unknown role '" + message.role +
                                "'; 'system', 'user' and 'assistant' are allowed");
  }
  to.push_back(start_);
  const std::vector<Token> text = tokenizer_->encode(message.role + "\n" + message.content);
  to.insert(to.end(), text.begin(), text.end());
  to.push_back(end_);
  to.insert(to.end(), newline_.begin(), newline_.end());
}

std::vector<Token> ChatFormat::prompt(std::span<const Message> messages) const {
  std::vector<Token> tokens;
  if (!default_system_.empty() && (messages.empty() || messages.front().role != "system")) {
    append(tokens, {"system", default_system_});
  }
  for (const Message& message : messages) append(tokens, message);
  tokens.push_back(start_);
  const std::vector<Token> answer = tokenizer_->encode("assistant\n");
  tokens.insert(tokens.end(), answer.begin(), answer.end());
  return tokens;
}

std::vector<Token> ChatFormat::next_turn(std::string_view user) const {
  std::vector<Token> tokens{end_};
  tokens.insert(tokens.end(), newline_.begin(), newline_.end());
  append(tokens, {"user", std::string(user)});
  tokens.push_back(start_);
  const std::vector<Token> answer = tokenizer_->encode("assistant\n");
  tokens.insert(tokens.end(), answer.begin(), answer.end());
  return tokens;
}

}  // namespace ladder::qwen
