#!/usr/bin/env bash
# Runs every CUDA test under compute-sanitizer: memcheck, racecheck, initcheck, synccheck.
# Usage: scripts/sanitize_gpu.sh [BUILD_FOLDER]   (default: build; the tests must be built: scripts/ladder test)
#
# Test cases named "*broken*" are left out: they launch kernels with planted bugs. One of these bugs is a race in shared
# memory, so racecheck must find it: a control that the tool sees anything at all.
# What initcheck sees as initialised: outputs and guard bands are poisoned with 0xFF by cudaMemset before each run, and
# that counts as a write. A kernel that reads its poisoned output is caught by the tests (it computes NaN), not here.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
stop() { echo "scripts/sanitize_gpu.sh: $1" >&2; exit 2; }
[ $# -le 1 ] || stop "at most one argument, the build folder; $# were given"
build=${1:-build}

sanitizer=$(command -v compute-sanitizer || true)
for found in /usr/local/cuda*/bin/compute-sanitizer /opt/nvidia/*/bin/compute-sanitizer; do
  [ -n "$sanitizer" ] || sanitizer=$found
done
[ -n "$sanitizer" ] || stop "no compute-sanitizer on PATH or in /usr/local/cuda*/bin; it comes with the CUDA Toolkit"
tests=("$build"/test_*_cuda "$build"/chapters/test_*_cuda "$build"/chapters/*/test_*_cuda)
[ ${#tests[@]} -gt 0 ] || stop "no test_*_cuda in $build; build first (scripts/ladder test)"
# Without a device a CUDA test skips itself with this status, and there is nothing to check.
status=0
"${tests[0]}" --list-test-cases > /dev/null 2>&1 || status=$?
[ $status -ne 77 ] || stop "no CUDA device, or no driver for one"

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# verdict TOOL NAME clean|dirty COMMAND...: is the outcome the expected one? Only a summary counts as an answer: a
# tool that never attached prints none. Leaves one line, and what it is about, in $logs/TOOL NAME.verdict.
verdict() {
  local tool=$1 name=$2 expected=$3 log="$logs/$1 $2" outcome=none status=0
  shift 3
  "$@" > "$log" 2>&1 || status=$?
  if [ $status -eq 0 ] && grep -q 'SUMMARY: 0 ' "$log"; then
    outcome=clean
  elif grep -q 'SUMMARY: [1-9]' "$log"; then
    outcome=dirty
  fi
  if [ $outcome = "$expected" ]; then
    printf '%-10s %-32s passed\n' "$tool" "$name" > "$log.verdict"
  else
    {
      printf '%-10s %-32s FAILED (exit status %d, %s)\n' "$tool" "$name" "$status" \
        "$(grep -m 1 'SUMMARY:' "$log" | tr -d = || true)"
      grep -m 8 -E 'Error|Invalid|Uninitialized|hazard|Barrier|ERROR|not supported' "$log" | cut -c -160 | sed 's/^/  /' || true
    } > "$log.verdict"
  fi
  cat "$log.verdict"
}

# The tool's own work is on the CPU, so several tests run side by side.
jobs=$(($(nproc) / 2))
[ $jobs -ge 1 ] || jobs=1
check() {
  while [ "$(jobs -rp | wc -l)" -ge $jobs ]; do wait -n || true; done
  verdict "$@" &
}
for tool in memcheck racecheck initcheck synccheck; do
  for test in "${tests[@]}"; do
    check $tool "$(basename "$test")" clean \
      "$sanitizer" --tool $tool --error-exitcode 1 "$test" "--test-case-exclude=*broken*"
  done
done
planted="$build/chapters/test_vector_gemv_cuda"
if [ -x "$planted" ]; then
  check racecheck "planted race" dirty \
    "$sanitizer" --tool racecheck --error-exitcode 1 "$planted" "--test-case=*broken*"
fi
wait

passed=$(cat "$logs"/*.verdict | grep -c ' passed$' || true)
failed=$(cat "$logs"/*.verdict | grep -c ' FAILED (' || true)
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
