#!/bin/bash
# The shaders on an NVIDIA GPU: run.sh BUILD_FOLDER [LOG_FOLDER]. Builds the check program from what
# plan.py wrote into BUILD_FOLDER, compares all kernels with float64, runs compute-sanitizer's four
# tools and every planted fault, and prints a summary. Exit 0: results right, sanitizers silent,
# every fault that its tool can see reported.
#
# Everything runs under a timeout: a vote in divergent code hangs the GPU program. racecheck's
# warnings count, because a missing simdgroup barrier is only a warning to it.
set -u
build=$1
logs=${2:-$build/logs}
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
cd "$build" || exit 2
start=$SECONDS
bad=0
say() { echo "[$((SECONDS - start)) s] $*"; }
sanitizer="compute-sanitizer --print-limit 5 --error-exitcode 9"

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
nvcc --version | tail -1
make -j"$(nproc)" ARCH="${ARCH:-native}" > "$logs/build.txt" 2>&1 || { tail -20 "$logs/build.txt"; exit 2; }
say "built, $(./check list | wc -l) kernels"

numbers() {  # MODE: the check program's verdict and its worst result
  say "$1: $(tail -1 "$logs/$1.txt")"
  grep FAIL "$logs/$1.txt" | head -20
  grep -oE '= [0-9.]+ of the bound' "$logs/$1.txt" | sort -t' ' -k2 -g | tail -1
  tail -1 "$logs/$1.txt" | grep -q ' 0 failures' || bad=1
}
timeout -k 5 120 ./check all > "$logs/all.txt" 2>&1
numbers all

# Sequences of 32768 against plain attention on the GPU; samples for long_cpu.py.
mkdir -p "$logs/samples"
timeout -k 5 300 ./long "$logs/samples" > "$logs/long32k.txt" 2>&1
numbers long32k

# The long problems, whose references are the CPU's work, beside the sanitizers on the small ones.
timeout -k 5 240 ./check long > "$logs/long.txt" 2>&1 &
declare -A tools=([memcheck]="--padding 64 --leak-check full" [racecheck]="--racecheck-report all"
                  [synccheck]="" [initcheck]="")
for tool in "${!tools[@]}"; do
  ( timeout -k 5 400 $sanitizer --tool "$tool" ${tools[$tool]} ./check small > "$logs/$tool.txt" 2>&1
    echo "rc $?" >> "$logs/$tool.txt" ) &
done
wait
numbers long
for tool in memcheck racecheck synccheck initcheck; do
  say "$tool: $(tail -1 "$logs/$tool.txt"); $(grep -E 'SUMMARY' "$logs/$tool.txt" | tail -1 | sed 's/=* *//')"
  [ "$(tail -1 "$logs/$tool.txt")" = "rc 0" ] || bad=1
done

# Planted faults: plain numbers, then the tool that should see them; a few at a time.
fault() {
  local name=$1 tool=racecheck options="--racecheck-report all"
  case $name in edit_*) tool=memcheck; options="--padding 64" ;; esac
  timeout -k 2 30 ./check fault "$name" > "$logs/fault_$name.txt" 2>&1
  local plain=$?
  timeout -k 2 60 $sanitizer --tool $tool $options ./check fault "$name" >> "$logs/fault_$name.txt" 2>&1
  local seen=$?
  local where
  where=$(grep -oE '[a-z_]+\.(metal|h):[0-9]+' "$logs/fault_$name.txt" | sort | uniq -c | sort -rn |
          head -2 | awk '{print $2}' | tr '\n' ' ')
  [ -n "$where" ] || where="(in matrix loads and stores)"
  echo "$name: plain rc $plain, $tool rc $seen $where" >> "$logs/faults_summary.txt"
}
: > "$logs/faults_summary.txt"
running=0
for name in $(cat faults.txt); do
  fault "$name" &
  running=$((running + 1))
  if [ $running -ge 8 ]; then wait -n; running=$((running - 1)); fi
done
wait
sort "$logs/faults_summary.txt"
unseen=$(grep -vcE '(racecheck|memcheck) rc 9' "$logs/faults_summary.txt")
say "faults: $(grep -cE '(racecheck|memcheck) rc 9' "$logs/faults_summary.txt") reported, $unseen not reported"
[ "$unseen" = 0 ] || bad=1
say "end, exit $bad"
exit $bad
