#!/usr/bin/env bash
# Makes the committed CPU records of chapters 00 to 02. Run it on an otherwise idle machine: the twins use every core.
# Usage: scripts/record_cpu.sh RUNS_FOLDER [--no-build]   (about ten minutes on two cores; needs 5 GB of free memory)
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:?usage: scripts/record_cpu.sh RUNS_FOLDER [--no-build]}
shift
options=("$@" --on cpu --runs "$runs" --time-limit-ms 500)

layers() { printf "%s.attn_q,%s.attn_k,%s.attn_v,%s.attn_output,%s.ffn_gate,%s.ffn_up,%s.ffn_down" "$1" "$1" "$1" "$1" "$1" "$1" "$1"; }

scripts/ladder record 00 "${options[@]}"
scripts/ladder record gemv_vec "${options[@]}" --layer "$(layers 0.5b)" --nt 1,2,4,8,16,64,512
scripts/ladder record gemv_vec "${options[@]}" --layer "$(layers 7b)" --nt 1,2,4,8,16,64
scripts/ladder record gemv_vec "${options[@]}" --layer 0.5b.output,7b.output --nt 1,8
# The scalar twin is slow at what it is not for; a few token rows are enough to see that.
scripts/ladder record gemv_scalar "${options[@]}" --layer "$(layers 0.5b),$(layers 7b)" --nt 1,8
