#!/usr/bin/env bash
# Everything of a kernel run in one call: fill the compile cache in parallel, then check and time. OUT names the result folder.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1 OUT="${OUT:-benchmarks/results/h200}"
nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv
for i in $(seq 0 11); do timeout 120 python3 benchmarks/gpu_linear.py --warm "$i" 12 & done
wait
timeout "${LINEAR_S:-240}" python3 benchmarks/gpu_linear.py --out "$OUT" 2>&1 | tee "$OUT/linear.log"
[ "${ATTENTION_S:-1}" = 0 ] || timeout "${ATTENTION_S:-140}" python3 benchmarks/gpu_attention.py --out "$OUT" 2>&1 | tee "$OUT/attention.log"
timeout "${HOPPER_S:-100}" python3 benchmarks/gpu_attention.py --hopper --out "$OUT" 2>&1 | tee "$OUT/attention_hopper.log"
