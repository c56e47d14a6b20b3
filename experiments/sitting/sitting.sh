#!/usr/bin/env bash
# The commands of a sitting on a borrowed GPU; README.md has them in order. ROOT is where everything is kept there.
#
#   sitting.sh prepare [PART.zip ...]       copy the checkout, unpack the parts, start MPS
#   sitting.sh here NAME SECONDS COMMAND    run and wait, for what needs the device for itself
#   sitting.sh alone NAME SECONDS COMMAND   the same, while all other jobs are held
#   sitting.sh start NAME SECONDS COMMAND   run in the background: it goes on when the call has ended
#   sitting.sh queue FILE JOBS [NAMES]      the lines NAME SECONDS COMMAND of FILE in the background, JOBS at a time
#   sitting.sh stop NAME ...                end jobs that run, and take those that wait out of the queue; 'd-*' names several
#   sitting.sh poll [SECONDS]               wait until all jobs are done, at most so long; bring everything back
#
# A job in a queue waits for others if its command begins with `after NAME,NAME`, and runs alone if it begins with `alone`.
# COMMAND is a single one, without ; or &&. It runs in the copy of the checkout. $RES is the folder that comes back, and
# $RESULTS is a file of rows there, one for each job. At its limit a job gets SIGTERM, and SIGKILL 20 seconds later.
set -euo pipefail
ROOT=${ROOT:-/root}
OUT=${OUT:-$ROOT/out}
REPO=$ROOT/repo
RES=$ROOT/res
SCRIPT=$REPO/experiments/sitting/sitting.sh
export ROOT REPO RES PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MPLBACKEND=agg
export PYTHONPATH=$REPO/src:$REPO:$REPO/build/packages${PYTHONPATH:+:$PYTHONPATH}
export YOLO_OFFLINE=true YOLO_AUTOINSTALL=false YOLO_CONFIG_DIR=$ROOT/yolo # Ultralytics asks for updates otherwise
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mpslog

prepare() {
  mkdir -p "$REPO/data" "$RES" "$OUT" "$YOLO_CONFIG_DIR"
  ln -sfn "$REPO/data" "$ROOT/data" # as REPORT.md names it
  if [ ! -e "$SCRIPT" ]; then # later calls bring parts only, since jobs import this code
    tar c --exclude=./build --exclude=./data --exclude=./.git --exclude=./shared . | tar x -C "$REPO"
  fi
  if [ $# -gt 0 ]; then python3 "$REPO/experiments/sitting/unpack.py" "$@" --root "$REPO"; fi
  if command -v nvidia-cuda-mps-control > /dev/null; then
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    setsid nvidia-cuda-mps-control -d || true # it runs already
  else
    echo "There is no MPS: jobs take turns."
  fi
  cd "$REPO"
  python3 -c "import dmcp, torch; print('torch', torch.__version__, torch.cuda.device_count(), 'GPU', dmcp.__file__)"
  python3 -m dmcp --help > /dev/null && echo "dmcp runs" || echo "dmcp does not run: what does build/packages lack?"
}

here() { # the last line of the log says how the command ended
  local name=$1 seconds=$2 begin=$SECONDS code=0
  shift 2
  cd "$REPO"
  export RESULTS=$RES/$name.jsonl
  timeout -k 20 "$seconds" bash -c "exec $*" > "$RES/$name.txt" 2>&1 < /dev/null &
  echo $! > "$RES/$name.running"
  wait $! || code=$?
  rm -f "$RES/$name.running"
  echo "END $name: code $code, $((SECONDS - begin)) s" | tee -a "$RES/$name.txt"
}

alone() { # one at a time; jobs that the queue begins meanwhile wait in hold_on
  exec 9> "$ROOT/alone.lock"
  flock 9
  touch "$ROOT/held"
  signal STOP
  sleep 2 # until the GPU has done what they asked for
  here "$@"
  rm -f "$ROOT/held"
  signal CONT
}

signal() { # to all jobs that run; each has a process group of its own, whose leader is `timeout`
  local file
  for file in "$RES"/*.running; do
    if [ -s "$file" ]; then kill -"$1" -- "-$(cat "$file")" || true; fi
  done
}

hold_on() {
  while [ -e "$ROOT/held" ]; do sleep 0.5; done
}

start() {
  touch "$RES/$1.running"
  setsid nohup bash "$SCRIPT" here "$@" > /dev/null 2>&1 < /dev/null &
  echo "$1 is started"
}

queue() { # NAMES: what the names of the jobs begin with; default: all lines
  local file=$1 jobs=$2 line wanted
  shift 2
  cd "$REPO"
  wanted=$(grep -E "^($(IFS='|'; echo "${*:-[^#]}"))" "$file")
  while read -r line; do touch "$RES/${line%% *}.running"; done <<< "$wanted"
  setsid nohup xargs -P "$jobs" -d '\n' -I LINE bash "$SCRIPT" line LINE <<< "$wanted" > /dev/null 2>&1 &
  echo "$(wc -l <<< "$wanted") jobs are queued, $jobs at a time"
}

line() { # `after NAMES` comes first, then `alone`
  local name seconds command names
  read -r name seconds command <<< "$1"
  if [ "${command%% *}" = after ]; then
    read -r _ names command <<< "$command"
    while are_running "$names"; do sleep 0.5; done
  fi
  hold_on
  [ -e "$RES/$name.running" ] || return 0 # it was stopped while it waited
  if [ "${command%% *}" = alone ]; then
    alone "$name" "$seconds" "${command#alone }"
  else
    here "$name" "$seconds" "$command"
  fi
}

are_running() { # whether one of the jobs, NAME,NAME,..., runs or waits
  local name
  for name in ${1//,/ }; do
    if [ -e "$RES/$name.running" ]; then return 0; fi
  done
  return 1
}

stop() {
  local name file
  local -a waiting=() running=()
  for name in "$@"; do
    for file in "$RES"/$name.running; do
      if [ -s "$file" ]; then running+=("$file"); elif [ -e "$file" ]; then waiting+=("$file"); fi
    done
  done
  rm -f "${waiting[@]}" # first, since the queue goes on when a job has ended
  for file in "${running[@]}"; do kill -TERM "$(cat "$file")" || true; done
  for file in "${running[@]}"; do
    while [ -e "$file" ]; do sleep 0.2; done
  done
}

poll() {
  local until=$((SECONDS + ${1:-0})) file
  while [ $SECONDS -lt "$until" ] && compgen -G "$RES/*.running" > /dev/null; do sleep 1; done
  tar czf "$OUT/res.tgz" --exclude=checkpoint.safetensors -C "$RES" . || [ $? -eq 1 ] # 1: a job wrote to its log meanwhile
  echo "res.tgz has $(stat -c %s "$OUT/res.tgz") bytes; above 16 MiB it does not come back"
  for file in "$RES"/*.txt; do # the last two lines of every log: one that failed says why
    [ -e "$file" ] || continue
    echo "$(basename "$file" .txt): $(tr '\r' '\n' < "$file" | grep -v '^ *$' | tail -n 2 | cut -c 1-120 | paste -sd '|')"
  done
  for file in "$RES"/*.running; do
    [ -e "$file" ] || continue
    if [ -s "$file" ]; then echo "runs: $(basename "$file" .running)"; else echo "waits: $(basename "$file" .running)"; fi
  done
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader 2> /dev/null || true
}

"$@"
