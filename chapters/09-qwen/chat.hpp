// Qwen2.5's chat format (ChatML).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/tokenizer.hpp"

namespace ladder::qwen {

struct Message {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// Qwen2.5's, used when the first message is not a system message.
inline constexpr std::string_view kDefaultSystemPrompt =
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";

class ChatFormat {
 public:
  /// @param template_name "" honours the file: its tokenizer.chat_template must be absent or recognisably ChatML, and
  ///        its default system prompt is read from it; "chatml" uses ChatML whatever the file says
  /// Throws gguf::FileError, naming what the file's template seems to be, or what it lacks (<|im_start|>, <|im_end|>).
  ChatFormat(const gguf::File& file, const Tokenizer& tokenizer, std::string_view template_name);

  /// The tokens of a conversation up to where the assistant's answer begins. Contents are encoded with special parsing
  /// off. Throws std::invalid_argument for an unknown role.
  [[nodiscard]] std::vector<Token> prompt(std::span<const Message> messages) const;
  /// The tokens that follow the assistant's answer (whose own tokens are in the cache already, up to but without its
  /// <|im_end|>) up to the next answer: "<|im_end|>\n<|im_start|>user\n" text "<|im_end|>\n<|im_start|>assistant\n".
  [[nodiscard]] std::vector<Token> next_turn(std::string_view user) const;
  [[nodiscard]] const std::string& default_system_prompt() const { return default_system_; }

 private:
  void append(std::vector<Token>& to, const Message& message) const;
  const Tokenizer* tokenizer_;
  Token start_, end_;
  std::vector<Token> newline_;
  std::string default_system_;
};

}  // namespace ladder::qwen
