#!/usr/bin/env bash
# Trains with N processes on this machine:
#
#     launch/local.sh N CONFIG [--workdir=FOLDER] [--config.field=value ...]
#
# Lines of process i begin with [i]. The first that fails ends all, and its exit code is that of this
# script. SIGTERM and Ctrl-C go on to every process: the run saves and leaves with 143 or 130.
# Devices: the machine's GPUs are divided evenly; on CPUs, JAX_NUM_CPU_DEVICES says how many each
# process makes of its own. PYTHON chooses the interpreter, PORT the port of process 0.
set -uo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 N CONFIG [--workdir=FOLDER] [--config.field=value ...]" >&2
  exit 2
fi
count=$1 config=$2
shift 2
python=${PYTHON:-python3}
grace=${GRACE:-60} # seconds to save in, before what is left is killed
port=${PORT:-$("$python" -c 'import socket as s; c = s.socket(); c.bind(("", 0)); print(c.getsockname()[1])')}
gpus=0
if command -v nvidia-smi > /dev/null; then gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU'); fi
if (( gpus > 0 && gpus % count )); then
  echo "$gpus GPUs cannot be divided by $count processes evenly" >&2
  exit 2
fi

set -m # every process in a group of its own: the terminal's Ctrl-C comes here only, and goes on once
pids=() printers=()
for (( i = 0; i < count; i++ )); do
  own=(PYTHONUNBUFFERED=1)
  if (( gpus > 0 )); then
    each=$(( gpus / count ))
    own+=("JAX_LOCAL_DEVICE_IDS=$(seq -s, $(( i * each )) $(( (i + 1) * each - 1 )))")
  fi
  exec {out}> >(exec sed -u "s/^/[$i] /")
  printers+=($!)
  env "${own[@]}" "$python" -m dmljax.main "--config=$config" "$@" \
    "--coordinator=127.0.0.1:$port" "--processes=$count" "--process=$i" \
    >&"$out" 2>&1 {out}>&- < /dev/null &
  pids+=($!)
  exec {out}>&-
done

passed=0 deadline=0
pass() { # the first signal asks for a save, the second ends at once
  passed=1 deadline=$(( SECONDS + grace ))
  for pid in "${pids[@]}"; do kill "-$1" "$pid" 2> /dev/null; done
}
trap 'pass TERM' TERM
trap 'pass INT' INT

status=0
while (( ${#pids[@]} )); do
  left=() fresh=0
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2> /dev/null; then
      left+=("$pid")
      continue
    fi
    { wait "$pid"; } 2> /dev/null # bash would tell of a kill with the whole command
    code=$?
    # Of those that ended since the last look, one that was killed (128 and more) took the others with
    # it, and one that has said why (2) those that only saw it go (1).
    if (( code && (! status || fresh && status < 128 && code > status) )); then
      status=$code fresh=1
      echo "$0: process $pid was the first to end, with $code" >&2
      # The others cannot go on; they may have something to say, or to save after a signal.
      if (( ! passed )); then deadline=$(( SECONDS + 3 )); fi
    fi
  done
  pids=("${left[@]}")
  if (( deadline && SECONDS >= deadline )); then
    for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2> /dev/null; done # workers too
  fi
  sleep 0.1
done
for pid in "${printers[@]}"; do
  for (( i = 0; i < 20; i++ )); do
    kill -0 "$pid" 2> /dev/null || break
    sleep 0.1
  done
done
exit "$status"
