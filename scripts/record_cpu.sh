#!/usr/bin/env bash
# Makes the committed CPU records of chapters 00 to 06 and of the final program. Run it on an otherwise idle machine: the twins use every core.
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
scripts/ladder record 03 "${options[@]}" --layer 7b.ffn_gate,0.5b.ffn_down --nt 1
for type in q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl q6_k q5_k q4_k iq4_xs q3_k q2_k; do
  scripts/ladder record ${type}_q8_mmvq "${options[@]}" --layer 7b.ffn_gate,7b.ffn_down --nt 1
done
scripts/ladder record gemm_f16_nt gemm_f16_nt_af32 q4_0_q8_mmq_raw "${options[@]}" --layer 0.5b.ffn_gate,0.5b.ffn_down --nt 512
scripts/ladder record q4_k_q8_mmq_raw "${options[@]}" --layer 0.5b.ffn_down --nt 512

engine=("$@" --on cpu --runs "$runs")
scripts/ladder engine 0.5b:Q4_0 0.5b:Q4_K_M 0.5b:Q8_0 "${engine[@]}" -p 512 -n 128
tales=data/models/tales-f16.gguf
types=(BF16 Q8_0 Q6_K Q5_K_M Q5_K_S Q5_1 Q5_0 Q4_K_M Q4_K_S Q4_1 Q4_0 IQ4_NL IQ4_XS Q3_K_L Q3_K_M Q3_K_S Q2_K)
scripts/ladder engine "$tales" "${types[@]/#/$tales:}" "${engine[@]}" --perplexity data/models/tales-heldout.txt
