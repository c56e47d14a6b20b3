#!/usr/bin/env bash
# The commands of a sitting on a borrowed GPU; README.md has them in order. ROOT is where everything is kept there.
#
#   sitting.sh prepare [PART.zip ...]       copy the checkout, unpack the parts, start MPS
#   sitting.sh here NAME SECONDS COMMAND    run and wait, for what needs the device for itself
#   sitting.sh start NAME SECONDS COMMAND   run in the background: it goes on when the call has ended
#   sitting.sh queue FILE JOBS [NAMES]      the lines NAME SECONDS COMMAND of FILE in the background, JOBS at a time
#   sitting.sh stop NAME                    end a job that was started or queued
#   sitting.sh poll [SECONDS]               wait until all jobs are done, at most so long; bring everything back
set -euo pipefail
ROOT=${ROOT:-/root}
OUT=${OUT:-$ROOT/out}
REPO=$ROOT/repo
RES=$ROOT/res
SCRIPT=$REPO/experiments/sitting/sitting.sh
export ROOT PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MPLBACKEND=agg
export PYTHONPATH=$REPO/src:$REPO:$REPO/build/packages${PYTHONPATH:+:$PYTHONPATH}
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mpslog

prepare() {
  mkdir -p "$REPO" "$RES" "$OUT"
  tar c --exclude=./build --exclude=./data --exclude=./.git --exclude=./shared . | tar x -C "$REPO"
  if [ $# -gt 0 ]; then python3 "$REPO/experiments/sitting/unpack.py" "$@" --root "$REPO"; fi
  if command -v nvidia-cuda-mps-control > /dev/null; then
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    pgrep -x nvidia-cuda-mps > /dev/null || nvidia-cuda-mps-control -d
  fi
  cd "$REPO"
  python3 -c "import dmcp, torch; print('torch', torch.__version__, torch.cuda.device_count(), 'GPU', dmcp.__file__)"
  python3 -m dmcp --help > /dev/null && echo "dmcp runs" || echo "dmcp does not run: what does build/packages lack?"
}

here() { # a command: its log has how it ended in the last line
  local name=$1 seconds=$2 begin=$SECONDS code=0
  shift 2
  cd "$REPO"
  timeout "$seconds" bash -c "$*" > "$RES/$name.txt" 2>&1 || code=$?
  echo "END $name: code $code, $((SECONDS - begin)) s" | tee -a "$RES/$name.txt"
}

start() {
  touch "$RES/$1.running"
  setsid nohup bash "$SCRIPT" job "$@" > /dev/null 2>&1 < /dev/null &
  echo "$1 is started"
}

job() {
  echo $$ > "$RES/$1.running"
  here "$@" || true
  rm -f "$RES/$1.running"
}

queue() { # NAMES: words that the names of jobs begin with; default: all lines
  local file=$1 jobs=$2 line wanted
  shift 2
  cd "$REPO"
  wanted=$(grep -v '^ *\(#\|$\)' "$file" | grep -E "^($(IFS='|'; echo "${*:-.}"))")
  while read -r line; do touch "$RES/${line%% *}.running"; done <<< "$wanted"
  setsid nohup xargs -P "$jobs" -d '\n' -I LINE bash "$SCRIPT" line "LINE" <<< "$wanted" > /dev/null 2>&1 &
  echo "$(wc -l <<< "$wanted") jobs are queued, $jobs at a time"
}

line() {
  local name seconds command
  read -r name seconds command <<< "$1"
  job "$name" "$seconds" "$command"
}

stop() {
  local group
  group=$(cat "$RES/$1.running")
  kill -TERM -- "-$(ps -o pgid= -p "$group" | tr -d ' ')"
  rm -f "$RES/$1.running"
}

poll() {
  local until=$((SECONDS + ${1:-0})) file
  while [ $SECONDS -lt "$until" ] && compgen -G "$RES/*.running" > /dev/null; do sleep 1; done
  tar czf "$OUT/res.tgz" -C "$RES" .
  for file in "$RES"/*.txt; do
    [ -e "$file" ] || continue
    echo "$(basename "$file" .txt): $(tr '\r' '\n' < "$file" | grep -v '^ *$' | tail -n 1 | cut -c 1-150)"
  done
  for file in "$RES"/*.running; do [ ! -e "$file" ] || echo "not done: $(basename "$file" .running)"; done
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader 2> /dev/null || true
}

"$@"
