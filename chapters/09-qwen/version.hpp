// Which build this is.
#pragma once

namespace ladder::qwen {

[[nodiscard]] const char* build_version();  ///< of the project, "0.1.0"
[[nodiscard]] const char* build_commit();   ///< short id of the commit, "unknown" outside a repository

}  // namespace ladder::qwen
