#!/usr/bin/env bash
# Is the engine right on this GPU? The kernels' tests, the engine's, random traffic, every family against transformers,
# what goes wrong with a card, and compute-sanitizer over the kernels' tests.
#
#   benchmarks/gpu_check.sh                      # all but racecheck
#   benchmarks/gpu_check.sh kernels sanitizer    # some of: kernels engine traffic families errors sanitizer racecheck
#
# Compiling takes most of the time, so the files of a part run side by side (JOBS at a time), each with a time limit;
# none stops the others. The kernels come first: what they compile, the sanitizer finds in Triton's cache.
# TIDEMILL_GPU_SECONDS is how long random traffic runs. SANITIZE is a pytest -k expression for the sanitizer's subset.
# All logs end up in $OUT/gpu_check.log (or under a temporary folder), a summary at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
JOBS=${JOBS:-6}
SANITIZE=${SANITIZE:-}
LOGS=$(mktemp -d)
WHOLE=${OUT:-$LOGS}/gpu_check.log
NAMES=()

existing() { for file in "$@"; do [ -e "$file" ] && echo "$file"; done; }

job() { # name, seconds, command...: in the background, once there is room
  while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
  NAMES+=("$1")
  (
    began=$SECONDS
    timeout --kill-after=10 "$2" "${@:3}" >"$LOGS/$1.log" 2>&1
    echo "$? $((SECONDS - began)) $2" >"$LOGS/$1.code"
  ) &
}

tests() { # name, seconds, pytest arguments...
  job "$1" "$2" "$PYTHON" -m pytest --tb=short --durations=5 -p no:cacheprovider "${@:3}"
}

sanitize() { # tool, seconds: the allocator's cache would hide reads past the end of a tensor
  local checker
  checker=$(command -v compute-sanitizer || existing /usr/local/cuda/bin/compute-sanitizer)
  for file in $(kernel_tests); do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 job "$1-$(basename "$file" .py)" "$2" "${checker:-compute-sanitizer}" --tool "$1" \
      --error-exitcode 99 --print-limit 20 "$PYTHON" -m pytest --tb=short -p no:cacheprovider \
      ${SANITIZE:+-k "$SANITIZE"} "$file"
  done
}

kernel_tests() { existing tests/test_triton_*.py tests/test_quant_packed.py tests/test_device_sampler.py; }

# Files of families that need what a GPU machine may lack, or that are about other things than a family's numbers.
family_tests() {
  existing tests/test_models_*.py | grep -v -E 'test_models_(config|names|support|fallback).py'
}

[ $# -gt 0 ] || set -- kernels engine traffic families errors sanitizer
for part in "$@"; do
  case $part in
    kernels) for file in $(kernel_tests); do tests "$(basename "$file" .py)" 300 "$file"; done ;;
    engine) for file in tests/gpu/test_{graphs,offload}_gpu.py; do tests "$(basename "$file" .py)" 180 "$file"; done ;;
    traffic) tests test_traffic_gpu 180 tests/gpu/test_traffic_gpu.py ;;
    families)
      for file in $(family_tests); do tests "$(basename "$file" .py)" 300 -k "tokens or logits" "$file"; done ;;
    # Takes most of the card's memory for a moment, so it runs alone.
    errors) wait && tests test_errors_gpu 120 tests/gpu/test_errors_gpu.py && wait ;;
    sanitizer) wait && sanitize memcheck 240 ;;
    racecheck) wait && sanitize racecheck 240 ;;
    *) echo "no part $part; there are kernels engine traffic families errors sanitizer racecheck" >&2 && exit 2 ;;
  esac
done
wait

failed=0
summary=()
for name in "${NAMES[@]}"; do
  read -r code took limit <"$LOGS/$name.code"
  { echo "==== $name (exit status $code)" && cat "$LOGS/$name.log"; } >>"$WHOLE"
  last=$(grep -E '[0-9]+ (passed|failed|error|deselected|skipped)' "$LOGS/$name.log" | tail -n 1)
  found=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$LOGS/$name.log" | tail -n 1)
  case $code in
    0) word=ok ;;
    124 | 137) word=STOPPED ;;
    *) word=FAILED ;;
  esac
  [ "$word" = ok ] || failed=1
  if [ "$word" != ok ]; then
    echo "---- $name: the end of its log"
    grep -E '^(FAILED|ERROR) |^E  |Invalid|=========     at ' "$LOGS/$name.log" | head -n 12
    tail -n 4 "$LOGS/$name.log"
  fi
  summary+=("$(printf '%-8s %-36s %4s s of %s  %s %s' "$word" "$name" "$took" "$limit" "$last" "$found")")
done
printf '\n%s\n' "summary (all logs: $WHOLE)"
printf '%s\n' "${summary[@]}"
exit $failed
