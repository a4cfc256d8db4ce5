#!/usr/bin/env bash
# Makes the committed GPU records of chapters 00 to 03 and of the final program: checks first, then times.
# Usage: scripts/record_gpu.sh RUNS_FOLDER [--no-build]   (about six minutes on an H200)
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:?usage: scripts/record_gpu.sh RUNS_FOLDER [--no-build]}
shift
options=("$@" --on gpu --runs "$runs")

for test in build/test_*_cuda build/chapters/*/test_*_cuda; do "$test"; done

layers() { printf "%s.attn_q,%s.attn_k,%s.attn_v,%s.attn_output,%s.ffn_gate,%s.ffn_up,%s.ffn_down" "$1" "$1" "$1" "$1" "$1" "$1" "$1"; }
all_layers="$(layers 0.5b),$(layers 7b)"
heads=0.5b.output,7b.output

scripts/ladder record 00 "${options[@]}"
for chapter in gemv_scalar_grid2d,gemv_scalar,gemv_scalar_inner gemv_vec_chunk,gemv_vec_lane,gemv_vec; do
  # A prompt's logits are wanted for its last token only, so the output head stays at few tokens.
  scripts/ladder record ${chapter//,/ } "${options[@]}" --layer "$all_layers" --nt 1,2,4,8,16,64,512 --time-limit-ms 100
  scripts/ladder record ${chapter//,/ } "${options[@]}" --layer "$heads" --nt 1,2,4,8,16 --time-limit-ms 100
done
scripts/ladder record gemv_vec_w1 gemv_vec_w2 gemv_vec_w4 gemv_vec_w8 "${options[@]}" --nt 1,8 --time-limit-ms 100 \
  --layer 0.5b.attn_q,0.5b.ffn_gate,0.5b.ffn_down,0.5b.output,7b.attn_q,7b.ffn_gate,7b.ffn_down,7b.output
scripts/ladder record gemv_vec_lane gemv_vec "${options[@]}" --nt 1 --mode hot --layer 0.5b.attn_q,0.5b.ffn_down,7b.ffn_down
scripts/ladder record 03 "${options[@]}" --layer "$all_layers,$heads" --nt 1 --time-limit-ms 60
scripts/ladder record 03 "${options[@]}" --layer 0.5b.ffn_down,7b.ffn_down --nt 2,8 --time-limit-ms 60
# Whole models: every kind of tile, float weights, and how much a filled cache costs.
scripts/ladder engine 0.5b:Q4_0 0.5b:Q4_K_M 0.5b:Q8_0 0.5b:F16 7b:Q4_0 7b:Q4_K_M 7b:Q8_0 "$@" --on gpu --runs "$runs" -p 512 -n 128
scripts/ladder engine 0.5b:Q4_0 7b:Q4_K_M "$@" --on gpu --runs "$runs" -p 0 -n 128 -d 512,4096
