// Qwen2.5's chat format (ChatML): a message is <|im_start|>role\ncontent<|im_end|>\n, and the model answers
// after <|im_start|>assistant\n. The markers are control tokens, and only this class puts them there: in a
// content they are ordinary text. A role, the line end and the content are encoded as one text, as Hugging
// Face does, for the pre-tokenizer may join the line end to white space that the content begins with.
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

/// Qwen2.5's, used when the first message is not a system message and the file has no template that says
/// otherwise.
inline constexpr std::string_view kDefaultSystemPrompt =
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";

/// What a chat template (Jinja) seems to be, by the markers in its text: "ChatML", "Llama 2", "Llama 3",
/// "Mistral", ..., or "not recognised".
[[nodiscard]] std::string template_kind(std::string_view chat_template);

/// The system message that a ChatML template puts in front of a conversation that has none, read from the
/// template's text: what stands between "<|im_start|>system\n" and "<|im_end|>" in one literal, else the
/// sentence of Qwen2.5 or Qwen2 ("You are a helpful assistant.") if it holds one, else empty: it has none.
[[nodiscard]] std::string default_system_prompt_of(std::string_view chat_template);

class ChatFormat {
 public:
  /// @param template_name "" honours the file: its tokenizer.chat_template must be absent or recognisably
  ///        ChatML, and its default system prompt is read from it; "chatml" uses ChatML whatever the file
  ///        says
  /// Throws gguf::FileError, naming what the file's template seems to be, or what the vocabulary lacks
  /// (<|im_start|>, <|im_end|>), and std::invalid_argument for another template_name. Keeps a pointer to
  /// `tokenizer`.
  ChatFormat(const gguf::File& file, const Tokenizer& tokenizer, std::string_view template_name);

  /// The tokens of a conversation up to where the assistant's answer begins. Contents are encoded with
  /// special parsing off. If the first message is not a system message, the default system prompt comes
  /// before it, if there is one; an empty system message is kept. Throws std::invalid_argument for an unknown
  /// role.
  [[nodiscard]] std::vector<Token> prompt(std::span<const Message> messages) const;
  /// The tokens that follow the assistant's answer (whose own tokens are in the cache already, up to but
  /// without its <|im_end|>) up to the next answer: "<|im_end|>\n<|im_start|>user\n" text
  /// "<|im_end|>\n<|im_start|>assistant\n".
  [[nodiscard]] std::vector<Token> next_turn(std::string_view user) const;
  /// What the template puts in front of a conversation without a system message; empty: nothing, as ChatML
  /// templates of other makers do.
  [[nodiscard]] const std::string& default_system_prompt() const { return default_system_; }

 private:
  void append(std::vector<Token>& to, const Message& message) const;
  const Tokenizer* tokenizer_;
  Token start_, end_;
  std::vector<Token> newline_;
  std::string default_system_;
};

}  // namespace ladder::qwen
