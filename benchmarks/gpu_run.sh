#!/usr/bin/env bash
# One call on a GPU: the named benchmarks, each under a time limit of its own. OUT names the result folder, RELAY_COMMIT the commit.
# usage: gpu_run.sh "tests 90" "engine 90" "linear 110" "linear_tall 30" "attention 90" "attention_hopper 90" "model_check 90"
#        "model_time 60" "int8 60" "model_time_int8 60" "parts 480" "serve_8b 300" "ready_8b 90" "chaos 150" (the last three need
#        RELAY_CACHE; the 8b ones write a pack of 16 GB to /dev/shm) "transfer_8b 80" "baseline 60"; on two GPUs "multi_gpu 340"
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 OUT="${OUT:-benchmarks/results/h200}"
mkdir -p "$OUT"
ulimit -c 0  # the core of a process on a GPU is large
nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv
run() { timeout "$2" python3 "${@:3}" --out "$OUT" 2>&1 | tee "$OUT/$1.log"; }
for job in "$@"; do
  read -r name seconds <<<"$job"
  case "$name" in
    linear)
      for i in $(seq 0 11); do timeout 120 python3 -m benchmarks.gpu_linear --warm "$i" 12 & done
      wait
      run linear "$seconds" -m benchmarks.gpu_linear ;;
    linear_tall) run linear_tall "$seconds" -m benchmarks.gpu_linear --tall ;;
    attention) run attention "$seconds" -m benchmarks.gpu_attention ;;
    attention_hopper) run attention_hopper "$seconds" -m benchmarks.gpu_attention --hopper ;;
    model_check) run model_check "$seconds" -m benchmarks.gpu_model --part check ;;
    model_time) run model_time "$seconds" -m benchmarks.gpu_model --part time ;;
    model_time_int8) run model_time_int8 "$seconds" -m benchmarks.gpu_model --part time --quantization int8 ;;
    int8) run int8 "$seconds" -m benchmarks.gpu_int8 ;;
    engine) run engine "$seconds" -m benchmarks.gpu_engine ;;
    serve_8b)
      [ -f /dev/shm/8b.pack ] || python3 -m benchmarks.gpu_pack /dev/shm/8b.pack "${RELAY_CACHE:?names the model cache}"
      timeout "$seconds" python3 -m benchmarks.gpu_serve /dev/shm/8b.pack --out "$OUT/serve_8b.json" --vocab 128000 \
        --parts sweep,kill,kill-both --rates 4,16,32 --streams 64 ;;
    chaos)  # a cluster for each transport, at once: most of the time is spent waiting for workers that start again
      [ -f /dev/shm/smollm2.pack ] ||
        python3 -m benchmarks.gpu_pack /dev/shm/smollm2.pack "${RELAY_CACHE:?names the model cache}" --shape smollm2
      for transport in ipc shm; do
        (
          set -o pipefail
          timeout -k 5 "$seconds" python3 -m relay.cli.main chaos /dev/shm/smollm2.pack --backend cuda --transport "$transport" \
            --shape 1P+2D --requests "${CHAOS_REQUESTS:-96}" --faults "${CHAOS_FAULTS:-8}" --seed "${CHAOS_SEED:-1}" \
            --kinds kill_engine,kill_agent,kill_both,kill_role,kill_holder,segfault_engine,stop_engine,stop_both \
            --longest-prompt 120 --longest-answer 800 --offline --output "$OUT/chaos_$transport.json" 2>&1 |
            sed -u "s/^/$transport: /" | tee "$OUT/chaos_$transport.log" || echo "chaos $transport: FAILED ($?)"
        ) &
      done
      wait ;;
    ready_8b)
      [ -f /dev/shm/8b.pack ] || python3 -m benchmarks.gpu_pack /dev/shm/8b.pack "${RELAY_CACHE:?names the model cache}"
      timeout -k 5 "$seconds" python3 -m benchmarks.gpu_ready /dev/shm/8b.pack --out "$OUT/ready_8b.json" \
        --seconds $((seconds - 10)) ;;
    transfer_8b) timeout "$seconds" python3 -m benchmarks.gpu_transfer --out "$OUT/transfer_8b.json" ;;
    multi_gpu) timeout "$seconds" python3 -m benchmarks.multi_gpu --out "$OUT/multi_gpu.json" --limit $((seconds - 10)) ;;
    parts) python3 -m benchmarks.gpu_parts --out "$OUT" --seconds "$seconds" ;;
    baseline) timeout "$seconds" python3 -m benchmarks.gpu_baseline --out "$OUT/baseline.json" ;;
    tests)  # a process for each file, at once: most of the time is spent compiling
      for file in $(grep -l "mark.gpu" tests/cuda/test_*.py); do
        PYTHONPATH="$PYTHONPATH:." timeout -k 5 "$seconds" python3 -m pytest -m gpu "$file" -q -p no:cacheprovider \
          --durations=5 >"$OUT/$(basename "$file" .py).log" 2>&1 || echo "$file: FAILED ($?)" &
      done
      wait
      tail -n 12 "$OUT"/test_*.log ;;
    *) echo "unknown benchmark $name"; exit 2 ;;
  esac
done
