#!/usr/bin/env bash
# Runs the CUDA tests, and the program with the bundled model, under compute-sanitizer: memcheck, racecheck, initcheck,
# synccheck. Every test case is a job of its own, and several run side by side: the tool's own work is on the CPU.
# Usage: scripts/sanitize_gpu.sh [--tool T,..] [--test NAME,..] [--jobs N] [--cases N] [--limit SECONDS]
#                                [--within SECONDS] [--whole] [--runs FOLDER] [BUILD_FOLDER]
#   --tool    only these of the four, in this order
#   --test    only tests whose names have one of these in them (mmvq_tiles, attention, qwen_tales), in this order; the
#             program, qwen_cuda, counts as a test, and its cases are types of weights that the model is written in
#   --jobs    cases at a time (default: as many as there are CPUs)
#   --cases   so many cases of a test in a job (default: 1), which saves the tool's start; where such a job does not
#             pass, each of its cases runs alone. Under racecheck, which is ten times as slow, every case is a job anyway
#   --limit   a case that takes longer is cut off, and counts as not passed (default: no limit)
#   --within  all is over after that: cases under way are cut off, the others not run (default: no limit)
#   --whole   tests do all that they do without a sanitizer. Otherwise LADDER_SANITIZER=1 tells them to leave out their
#             largest shapes and most repetitions: kernels run a hundred times slower here (under_sanitizer.hpp)
#   --runs    adds a record for each tool and test to FOLDER/<device>/sanitizer.jsonl, such as data/runs
# The folder is build unless given; the tests must be built there (scripts/ladder test).
#
# Test cases named "*broken*" are left out: they launch kernels with planted bugs. One of these bugs is a race in shared
# memory, so racecheck must find it: a control that the tool sees anything at all.
# What initcheck sees as initialised: outputs and guard bands are poisoned with 0xFF by cudaMemset before each run, and
# that counts as a write. A kernel that reads its poisoned output is caught by the tests (it computes NaN), not here.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
stop() { echo "scripts/sanitize_gpu.sh: $1" >&2; exit 2; }
number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || stop "$1: '$2' is not a whole number above 0"; }
known=(memcheck racecheck synccheck initcheck)
command=scripts/sanitize_gpu.sh  # without where things are, for the records
tools=("${known[@]}") names=() jobs=$(nproc) together=1 limit='' within='' runs='' build=''
export LADDER_SANITIZER=1
while [ $# -gt 0 ]; do
  case $1 in
    --tool | --test | --jobs | --cases | --limit | --within | --runs)
      [ $# -ge 2 ] || stop "$1 needs a value"
      case $1 in
        --tool) IFS=, read -ra tools <<< "$2" ;;
        --test) IFS=, read -ra names <<< "$2" ;;
        --jobs) number "$1" "$2"; jobs=$2 ;;
        --cases) number "$1" "$2"; together=$2 ;;
        --limit) number "$1" "$2"; limit=$2 ;;
        --within) number "$1" "$2"; within=$2 ;;
        --runs) runs=$2 ;;
      esac
      [ "$1" = --runs ] || command+=" $1 $2"
      shift
      ;;
    --whole) unset LADDER_SANITIZER; command+=" --whole" ;;
    -*) stop "no option '$1'; there are --tool, --test, --jobs, --cases, --limit, --within, --whole, --runs" ;;
    *)
      [ -z "$build" ] || stop "one build folder at most, not $build and $1"
      build=$1
      ;;
  esac
  shift
done
build=${build:-build}
for tool in "${tools[@]}"; do
  [[ " ${known[*]} " == *" $tool "* ]] || stop "--tool: no tool '$tool'; there are ${known[*]}"
done

sanitizer=$(command -v compute-sanitizer || true)
for found in /usr/local/cuda*/bin/compute-sanitizer /opt/nvidia/*/bin/compute-sanitizer; do
  [ -n "$sanitizer" ] || sanitizer=$found
done
[ -n "$sanitizer" ] || stop "no compute-sanitizer on PATH or in /usr/local/cuda*/bin; it comes with the CUDA Toolkit"
all=("$build"/test_*_cuda "$build"/chapters/test_*_cuda "$build"/chapters/*/test_*_cuda)
[ ${#all[@]} -gt 0 ] || stop "no test_*_cuda in $build; build first (scripts/ladder test)"
# Without a device a CUDA test skips itself with this status, and there is nothing to check.
status=0
"${all[0]}" --list-test-cases > /dev/null 2>&1 || status=$?
[ $status -ne 77 ] || stop "no CUDA device, or no driver for one"
[ ${#names[@]} -gt 0 ] || mapfile -t all < <(ls -S "${all[@]}")  # large ones first: they tend to take long
program="$build/chapters/09-qwen/qwen_cuda" types=(Q4_0 Q4_K_M)
[ ! -x "$program" ] || all+=("$program")
tests=()
for name in "${names[@]-}"; do
  for test in "${all[@]}"; do
    [[ $(basename "$test") != *"$name"* || " ${tests[*]-} " == *" $test "* ]] || tests+=("$test")
  done
done
[ ${#tests[@]} -gt 0 ] || stop "no test_*_cuda of ${names[*]} in $build; build first (scripts/ladder test)"

[ -z "$runs" ] || nvidia-smi -L > /dev/null 2>&1 || stop "--runs: nvidia-smi does not say which GPU this is"

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# What a log is about, a few lines.
about() { grep -m 8 -E 'Error|Invalid|Uninitialized|hazard|Barrier|ERROR|not supported' "$1" | cut -c -160 | sed 's/^/    /' || true; }
# attempt LOG clean|dirty SECONDS COMMAND...: sets "said" to "passed" if the outcome is the expected one, else to what is
# wrong, and "took". Only a summary counts as an answer: a tool that never attached prints none. SECONDS may be empty.
attempt() {
  local log=$1 expected=$2 most=$3 outcome=none status=0 begin=$SECONDS
  shift 3
  if [ -n "$within" ]; then
    local left=$((within - SECONDS))
    [ -n "$most" ] && [ "$most" -lt $left ] || most=$left
  fi
  if [ -n "$most" ] && [ "$most" -lt 1 ]; then
    said="not run: there was no time left"
  else
    ${most:+timeout -k 5 "$most"} "$@" > "$log" 2>&1 || status=$?
    if [ $status -eq 0 ] && grep -q 'SUMMARY: 0 ' "$log"; then
      outcome=clean
    elif grep -q 'SUMMARY: [1-9]' "$log"; then
      outcome=dirty
    fi
    if [ $outcome = "$expected" ]; then
      said=passed
    elif [ -n "$most" ] && { [ $status -eq 124 ] || [ $status -eq 137 ]; }; then
      said="cut off after $most s"
    else
      said="exit status $status,$(grep -m 1 "SUMMARY:" "$log" | tr -d = || true)"
    fi
  fi
  took=$((SECONDS - begin))
}
# tell TOOL NAME FIRST LAST LOG: says at once what was said of these cases, and leaves it and the seconds in
# "$logs/TOOL NAME CASE.verdict" of each of them.
tell() {
  local what="$1 $2 $3" i
  for ((i = $3; i <= $4; ++i)); do printf '%s\n%d\n' "$said" $((i == $3 ? took : 0)) > "$logs/$1 $2 $i.verdict"; done
  [ "$3" -eq "$4" ] || what+=" to $4"
  [[ $said == "not run"* ]] || printf '%s: %s (%d s)\n' "$what" "$said" "$took"
  [[ $said == passed || ! -e $5 ]] || about "$5" | head -n 3
}
# check TOOL TEST FIRST LAST: cases of a test under a tool, in one run of it; one by one where that does not pass.
check() {
  local tool=$1 test=$2 first=$3 last=$4 i name
  name=$(basename "$test")
  local run=("$test" "$exclude" --first="$first" --last="$last")
  [ "$test" != "$program" ] || run=("$test" run "$logs/$first.gguf" "Once upon a time" -n 8 --temp 0 --on gpu)
  attempt "$logs/$tool $name $first" clean "${limit:+$((limit * (last - first + 1)))}" \
    "$sanitizer" --tool "$tool" --error-exitcode 1 "${run[@]}"
  if [[ $said == passed || $said == "not run"* || $first -eq $last ]]; then
    tell "$tool" "$name" "$first" "$last" "$logs/$tool $name $first"
  else
    for ((i = first; i <= last; ++i)); do check "$tool" "$test" "$i" "$i"; done
  fi
}
planted_race() {
  attempt "$logs/racecheck planted race 1" dirty "$limit" \
    "$sanitizer" --tool racecheck --error-exitcode 1 "$planted" "--test-case=*broken*"
  tell racecheck "planted race" 1 1 "$logs/racecheck planted race 1"
}
start() {
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
  "$@" &
}

exclude="--test-case-exclude=*broken*"
declare -A cases
# The names of a test's cases, a line each, in $logs/NAME.cases; what has no list is one case.
list_cases() {
  if [ "$1" = "$program" ]; then
    local i
    for ((i = 0; i < ${#types[@]}; ++i)); do
      "$1" quantize data/models/tales-f16.gguf "$logs/$((i + 1)).gguf" "${types[i]}" > /dev/null
    done
    printf 'the bundled model in %s: a prompt, and eight tokens\n' "${types[@]}"
  else
    { "$1" --list-test-cases "$exclude" || true; } | sed '1,/^====/d;/^====/,$d' | grep . || echo all
  fi > "$logs/$(basename "$1").cases"
}
for test in "${tests[@]}"; do list_cases "$test" & done
wait
for test in "${tests[@]}"; do cases[$test]=$(wc -l < "$logs/$(basename "$test").cases"); done
for tool in "${tools[@]}"; do
  for test in "${tests[@]}"; do
    [[ $tool != racecheck && $test != "$program" ]] && each=$together || each=1
    for ((i = 1; i <= cases[$test]; i += each)); do
      start check "$tool" "$test" "$i" $((i + each - 1 < cases[$test] ? i + each - 1 : cases[$test]))
    done
  done
done
planted="$build/chapters/test_vector_gemv_cuda"
if [[ " ${tools[*]} " == *" racecheck "* && " ${tests[*]} " == *" $planted "* ]]; then start planted_race; fi
wait

# A line for each tool and test, and below it what is wrong.
echo
passed=0 failed=0
report() {  # TOOL NAME CASES
  local tool=$1 name=$2 seconds=0 longest=0 good=0 wrong="" i log
  for ((i = 1; i <= $3; ++i)); do
    log="$logs/$tool $name $i"
    { read -r said; read -r took; } < "$log.verdict"
    seconds=$((seconds + took))
    [ "$took" -le "$longest" ] || longest=$took
    if [ "$said" = passed ]; then
      good=$((good + 1))
    else
      wrong+="  case $i: $said"$'\n'
      [ -e "$log" ] || continue
      wrong+=$(about "$log")
      wrong+=$'\n'
    fi
  done
  if [ "$good" -eq "$3" ]; then
    passed=$((passed + 1))
    printf '%-10s %-32s passed (%d cases, %d s, longest %d)\n' "$tool" "$name" "$3" "$seconds" "$longest"
  else
    failed=$((failed + 1))
    printf '%-10s %-32s FAILED (%d of %d cases passed, %d s, longest %d)\n' "$tool" "$name" "$good" "$3" "$seconds" "$longest"
    printf '%s' "$wrong" | grep -v '^$'
  fi
}
for tool in "${tools[@]}"; do
  for test in "${tests[@]}"; do report "$tool" "$(basename "$test")" "${cases[$test]}"; done
done
[ ! -e "$logs/racecheck planted race 1.verdict" ] || report racecheck "planted race" 1
if [ -n "$runs" ]; then
  # A line for each case: tool, test, the case's number and name, the verdict.
  for test in "${tests[@]}"; do
    name=$(basename "$test") i=0
    while IFS= read -r case; do
      i=$((i + 1))
      for tool in "${tools[@]}"; do
        printf '%s\t%s\t%s\t%s\n' "$tool" "$name" "$case" "$(head -1 "$logs/$tool $name $i.verdict")"
      done
    done < "$logs/$name.cases"
  done > "$logs/found"
  [ ! -e "$logs/racecheck planted race 1.verdict" ] ||
    printf 'racecheck\tplanted race\tis found\t%s\n' "$(head -1 "$logs/racecheck planted race 1.verdict")" >> "$logs/found"
  version=$("$sanitizer" --version | grep -m 1 -oE 'Version [0-9.]+' || true)
  PYTHONPATH=scripts python3 -m workbook.sanitizer "$runs" "$build" "${version#Version }" "$command" < "$logs/found"
fi
[ -z "${LADDER_SANITIZER:-}" ] || echo "without the largest shapes and most repetitions (--whole has them)"
echo "$passed passed, $failed failed, $SECONDS s"
[ "$failed" -eq 0 ]
