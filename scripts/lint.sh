#!/usr/bin/env bash
# Formatting and static checks of everything that git tracks: clang-format, clang-tidy (.clang-tidy), ruff.
# Usage: scripts/lint.sh [--fix]   --fix rewrites formatting instead of reporting it
set -euo pipefail
cd "$(dirname "$0")/.."
fix=${1:-}
case "$fix" in '' | --fix) ;; *)
  echo "scripts/lint.sh: unknown option '$fix'; only --fix is known" >&2
  exit 2
  ;;
esac

for tool in clang-format clang-tidy; do
  command -v "$tool" > /dev/null || { echo "scripts/lint.sh: $tool is not installed (Debian: apt install $tool)" >&2; exit 2; }
done
ruff=.venv/bin/ruff
[ -x "$ruff" ] || PYTHONPATH=scripts python3 -c "from workbook import setup; setup.ensure_venv()"

mapfile -t sources < <(git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh')
if [ -n "$fix" ]; then
  clang-format -i "${sources[@]}"
  "$ruff" format -q scripts
else
  clang-format --dry-run -Werror "${sources[@]}"
  "$ruff" format -q --check scripts
fi
"$ruff" check -q scripts

# Headers are checked through the translation units that include them.
mapfile -t units < <(git ls-files '*.cpp' 'chapters/*.cu')
printf '%s\0' "${units[@]}" | xargs -0 -n 1 -P "$(nproc)" sh -c \
  'clang-tidy -quiet "$1" -- -x c++ -std=c++20 -I. -Wno-unknown-pragmas 2> /dev/null' sh
echo "lint: ${#sources[@]} C++ files and scripts/ are clean"
