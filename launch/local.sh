#!/usr/bin/env bash
# Trains with N processes on this machine:
#
#     launch/local.sh N CONFIG [--workdir=FOLDER] [--config.field=value ...]
#
# Lines of process i begin with [i]. If a process fails, the script ends the others, and returns the
# exit code of the process that failed first. The script passes SIGTERM and Ctrl-C on to every
# process: the run saves and ends with 143 or 130.
# The processes share the GPUs of the machine, or of CUDA_VISIBLE_DEVICES, evenly. On CPUs,
# JAX_NUM_CPU_DEVICES is the number of devices of a process. PYTHON chooses the interpreter, PORT the
# port of process 0, GRACE the seconds between a signal and SIGKILL.
set -uo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 N CONFIG [--workdir=FOLDER] [--config.field=value ...]" >&2
  exit 2
fi
count=$1 config=$2
shift 2
python=${PYTHON:-python3}
grace=${GRACE:-60} # seconds that processes have for saving before they are killed
port=${PORT:-$("$python" -c 'import socket as s; c = s.socket(); c.bind(("", 0)); print(c.getsockname()[1])')}
gpus=0
if [[ ${JAX_PLATFORMS:-}, == cpu,* ]]; then # the first one computes
  :
elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then # jax numbers the visible devices from 0
  # As in CUDA, a device that does not exist, such as -1, hides itself and all devices after it.
  visible=${CUDA_VISIBLE_DEVICES// /}
  visible=,${visible//NoDevFiles/-1}
  gpus=$(tr , '\n' <<< "${visible%%,-*}" | grep -c .)
elif command -v nvidia-smi > /dev/null; then
  gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU')
fi
if (( gpus > 0 && gpus % count )); then
  echo "$gpus GPUs cannot be divided by $count processes evenly" >&2
  exit 2
fi

# Every process gets a process group of its own. So the terminal sends Ctrl-C to this script only,
# which passes it on once.
set -m
pids=() printers=()
for (( i = 0; i < count; i++ )); do
  environment=(PYTHONUNBUFFERED=1)
  if (( gpus > 0 )); then
    share=$(( gpus / count ))
    environment+=("JAX_LOCAL_DEVICE_IDS=$(seq -s, $(( i * share )) $(( (i + 1) * share - 1 )))")
  fi
  exec {out}> >(exec sed -u "s/^/[$i] /")
  printers+=($!)
  env "${environment[@]}" "$python" -m dmljax.main "--config=$config" "$@" \
    "--coordinator=127.0.0.1:$port" "--processes=$count" "--process=$i" \
    >&"$out" 2>&1 {out}>&- < /dev/null &
  pids+=($!)
  exec {out}>&-
done

has_signal=0 deadline=0
pass_on() { # after the first signal the run saves, a second one ends it at once
  has_signal=1 deadline=$(( SECONDS + grace ))
  for pid in "${pids[@]}"; do kill "-$1" "$pid" 2> /dev/null; done
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

status=0
while (( ${#pids[@]} )); do
  running=() is_new=0
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2> /dev/null; then
      running+=("$pid")
      continue
    fi
    { wait "$pid"; } 2> /dev/null # otherwise bash prints the command of a killed process
    code=$?
    # Several processes may have failed since the last check. One that was killed (128 or more) is the
    # cause; else one that printed an error (2); the others only lost their connection to it (1).
    if (( code && (! status || is_new && status < 128 && code > status) )); then
      status=$code is_new=1
      echo "$0: process $pid was the first to end, with $code" >&2
      # The others cannot continue. They get time to print an error, or to save after a signal.
      if (( ! has_signal )); then deadline=$(( SECONDS + 3 )); fi
    fi
  done
  pids=("${running[@]}")
  if (( deadline && SECONDS >= deadline )); then
    for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2> /dev/null; done # with their workers
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
