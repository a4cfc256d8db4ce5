#!/usr/bin/env bash
# Makes the committed GPU records of chapters 00 to 08 and of the final program: checks first, then times; and gates.json
# in the same folder, which belongs into data/gates under the name of the device.
# Usage: scripts/record_gpu.sh RUNS_FOLDER [--no-build]   (about a quarter of an hour on an H200)
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:?usage: scripts/record_gpu.sh RUNS_FOLDER [--no-build]}
shift
options=("$@" --on gpu --runs "$runs")

for test in build/test_*_cuda build/chapters/test_*_cuda build/chapters/*/test_*_cuda; do "$test"; done

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
scripts/ladder record quantize_q8_pad40_plain quantize_q8_pad40 quantize_q8_pad40_t "${options[@]}" --time-limit-ms 25 \
  --layer 0.5b.attn_q,7b.attn_q,7b.ffn_down --nt 1,8,512 --mode cold,hot

types=(q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl q6_k q5_k q4_k iq4_xs q3_k q2_k)
tiles=("${types[@]/%/_q8_mmvq_tiles}")
scripts/ladder record 04 "${options[@]}" --time-limit-ms 25 --nt 1 \
  --layer 7b.attn_q,7b.ffn_gate,7b.ffn_down,7b.output,0.5b.ffn_gate,0.5b.ffn_down
scripts/ladder record "${tiles[@]}" "${types[@]/%/_q8_mmvq_multi}" "${options[@]}" --time-limit-ms 25 --nt 2,8 \
  --layer 7b.ffn_gate,7b.ffn_down,7b.output
scripts/ladder record "${tiles[@]}" "${options[@]}" --time-limit-ms 25 --nt 1 --layer 7b.attn_k,0.5b.attn_q,0.5b.attn_k,0.5b.output
# What would make it slow: rows that no wide load fits, rows too short for int8, blocks of the wrong size, a warm cache.
scripts/ladder record gemv_vec "${options[@]}" --time-limit-ms 25 --od 896 --id 4868
scripts/ladder record gemv_scalar "${options[@]}" --time-limit-ms 25 --od 896 --id 4865
for id in 256 512 1024 2048 4864; do
  scripts/ladder record q4_0_q8_mmvq q4_0_q8_mmvq_v2 q8_0_q8_mmvq_v2 q4_k_q8_mmvq_v2 q6_k_q8_mmvq_v2 "${options[@]}" \
    --time-limit-ms 25 --od 3584 --id $id
  scripts/ladder record q4_0_f32_matmul q8_0_f32_matmul q4_k_f32_matmul q6_k_f32_matmul "${options[@]}" \
    --time-limit-ms 25 --od 3584 --id $id
done
scripts/ladder record q4_0_q8_mmvq_t64 q4_0_q8_mmvq_t128 q4_0_q8_mmvq "${options[@]}" --time-limit-ms 25 \
  --layer 0.5b.ffn_down,7b.attn_q,7b.ffn_down
scripts/ladder record q4_0_q8_mmvq q4_0_q8_mmvq_v2 "${options[@]}" --time-limit-ms 25 --layer 0.5b.ffn_down,7b.ffn_down --mode cold,hot
scripts/ladder record q4_0_f32_matmul "${options[@]}" --time-limit-ms 25 --layer 0.5b.ffn_down,7b.ffn_down --mode hot
for step in "" _rows _v2 _multi _pf _tiles; do
  scripts/ladder counters q4_0_q8_mmvq$step q4_k_q8_mmvq$step q8_0_q8_mmvq$step "$@" --runs "$runs" --od 64 --id 4096
done

# Prompts in f16: the steps of the chapter, what its kernels do beside cuBLAS, and packed weights.
steps=(gemm_naive gemm_shared gemm_register gemm_f16_nt_b1 gemm_f16_nt gemm_f16_nt_af32 gemm_f16_nt_tm64 gemm_f16_nt_k64
  gemm_f16_nt_tm64_k64 gemm_f16_nt_s80 gemm_f16_nt_k64_s144 gemm_f16_nt_s80_b1 gemm_f16_nt_s80_xy gemm_f16_mma_w32_plain
  gemm_f16_mma_w32 gemm_f16_mma_w64 gemm_f16_mma_w64_s4)
best=(gemm_f16_mma gemm_f16_mma_splitk gemm_f16_mma_tma_whole gemm_f16_mma_tma gemm_f16_wgmma cublas_hgemm)
packed=(q8_0 q4_0 q6_k q4_k)
scripts/ladder record "${steps[@]}" "${options[@]}" --time-limit-ms 25 --layer 7b.attn_q,7b.ffn_down --nt 512
scripts/ladder record gemm_f16_nt gemm_f16_nt_tm64 gemm_f16_nt_k64 gemm_f16_nt_tm64_k64 "${options[@]}" --time-limit-ms 25 \
  --layer 0.5b.ffn_down --nt 512
scripts/ladder record gemm_f16_nt_s80 gemm_f16_nt_s80_xy "${options[@]}" --time-limit-ms 25 --layer 7b.ffn_gate --nt 512
scripts/ladder record gemm_f16_nt_s80 gemm_f16_nt_s80_b1 "${options[@]}" --time-limit-ms 25 --layer 7b.attn_q --nt 16
scripts/ladder record "${best[@]}" "${options[@]}" --time-limit-ms 50 --nt 512 \
  --layer 0.5b.attn_q,0.5b.ffn_gate,0.5b.ffn_down,7b.attn_q,7b.ffn_gate,7b.ffn_down
for n in 4096 8192; do
  scripts/ladder record gemm_f16_nt "${best[@]}" "${options[@]}" --time-limit-ms 150 --od $n --id $n --nt $n
done
scripts/ladder record gemm_f16_nt gemm_f16_nt_tm64 gemm_f16_mma_tma gemm_f16_wgmma "${options[@]}" --time-limit-ms 25 \
  --layer 7b.attn_q --nt 1,16,30,64,65,128
scripts/ladder record gemm_f16_nt gemm_f16_mma gemm_f16_mma_tma gemm_f16_wgmma "${options[@]}" --time-limit-ms 40 \
  --layer 7b.ffn_gate --nt 1,8,64,256,512,1024,4096
scripts/ladder record "${packed[@]/#/gemm_qb_nt_}" "${packed[@]/%/_f16_wgmma}" "${packed[@]/%/_dequantize_cublas}" \
  "${options[@]}" --time-limit-ms 25 --nt 512 --layer 7b.attn_q,7b.ffn_gate,7b.ffn_down
scripts/ladder record "${packed[@]/%/_f16_wgmma}" "${options[@]}" --time-limit-ms 25 --nt 1,8,9,16,32,64,128,256,1024,4096 \
  --layer 7b.ffn_gate

# Prompts in int8: ways to scale, tiles of a file's blocks, parts of k.
scripts/ladder record 06 "${options[@]}" --time-limit-ms 25 --nt 512 --layer 7b.attn_q,7b.ffn_gate,7b.ffn_down
scripts/ladder record q4_k_q8_mmq_raw q4_k_q8_mmq_raw_b2 "${options[@]}" --time-limit-ms 25 --nt 16 --layer 7b.ffn_down
scripts/ladder record q4_0_q8_mmq_raw q4_0_q8_mmq q4_k_q8_mmq_raw q4_k_q8_mmq "${options[@]}" --time-limit-ms 25 \
  --nt 1,8,16,32,64,128,256,1024,4096 --layer 7b.ffn_gate
scripts/ladder record q4_0_q8_mmq_k1 q4_0_q8_mmq_k2 q4_0_q8_mmq_k4 q4_0_q8_mmq_k8 q4_0_q8_mmq "${options[@]}" \
  --time-limit-ms 25 --nt 16,512 --layer 0.5b.ffn_down
scripts/ladder record q4_0_q8_mmq_s2 q4_0_q8_mmq_k1 "${options[@]}" --time-limit-ms 25 --nt 64,512 --layer 7b.ffn_down

# What is around the matmuls: one token at several depths, prompts of several lengths.
scripts/ladder record 08 "${options[@]}" --time-limit-ms 25

# Whole models: every kind of tile, float weights, how much a filled cache costs, and how long loading takes.
scripts/ladder engine 0.5b:Q4_0 0.5b:Q4_K_M 0.5b:Q8_0 0.5b:F16 7b:Q4_0 7b:Q4_K_M 7b:Q8_0 "$@" --on gpu --runs "$runs" -p 512 -n 128
scripts/ladder engine 0.5b:Q4_0 7b:Q4_K_M "$@" --on gpu --runs "$runs" -p 0 -n 128 -d 512,4096
scripts/ladder engine data/models/tales-f16.gguf data/models/tales-f16.gguf:Q4_0 "$@" --on gpu --runs "$runs" -p 512 -n 128
scripts/ladder engine 7b:Q4_K_M "$@" --on gpu --runs "$runs" --load -r 3

# Where kernels overtake each other, and what each switch is worth.
scripts/ladder tune --measure "$@" --output "$runs/gates.json"
for experiment in baseline q40_mmvq mmvq_v1 mmq_off; do
  scripts/ladder ab $experiment "$@" --on gpu --runs "$runs" -r 2
done
