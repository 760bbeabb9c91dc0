#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice, from a clone of the repository on your own machine:
#
#     launch/tpu_pod.sh [--dry-run] setup NAME ZONE     copies the last commit and installs it on every host
#     launch/tpu_pod.sh [--dry-run] run NAME ZONE CONFIG --workdir=FOLDER [--config.field=value ...]
#     launch/tpu_pod.sh [--dry-run] status NAME ZONE    says of every host whether the run goes on
#     launch/tpu_pod.sh [--dry-run] logs NAME ZONE      follows the log of every host; Ctrl-C is safe
#     launch/tpu_pod.sh [--dry-run] stop NAME ZONE      SIGTERM to every host: save, and leave
#
# FOLDER must be on a file system that all hosts share. `run` starts the same command on all hosts
# and returns: jax asks the slice for the number of a host and for the address of process 0. The run
# does not need your connection. Its output is in ~/dmljax/run.log of every host, its exit status in
# ~/dmljax/run.status. The same `run` continues a run that has ended.
# `setup` copies no change that is not committed, and says so if there is one. It installs Python 3.12
# by uv, because the usual images of TPU VMs have 3.10, which is too old. `--dry-run` prints the
# commands instead of executing them.
set -euo pipefail

dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=yes
  shift
fi
usage() {
  sed -n '4,8s/^# *//p' "$0" >&2
  exit 2
}
if [[ $# -lt 3 ]]; then usage; fi
action=$1 name=$2 zone=$3
shift 3

execute() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}
every_host() { # executes $1 in a shell of every host, and waits for all of them
  if [[ -n $dry ]]; then echo "on every host of $name: $1"; fi
  execute gcloud compute tpus tpu-vm ssh "$name" "--zone=$zone" --worker=all "--command=$1"
}
# The process of the run on a host. A number that another program has by now does not count.
find_run='pid=$(cat run.pid 2> /dev/null) && grep -qs dmljax.main "/proc/$pid/cmdline"'

case $action in
  setup)
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    clone=$(dirname "$0")/..
    changed=$(git -C "$clone" status --porcelain | wc -l)
    if (( changed )); then
      echo "warning: $(git -C "$clone" log -1 --format='commit %h') is copied, without your changes of $changed files or folders: commit them to copy them" >&2
    fi
    git -C "$clone" archive --format=tar.gz --output="$archive" HEAD
    execute gcloud compute tpus tpu-vm scp "$archive" "$name:dmljax.tar.gz" "--zone=$zone" --worker=all
    every_host "set -e; mkdir -p dmljax; tar -xzf dmljax.tar.gz -C dmljax; cd dmljax; python3 -m pip install -q --user uv; python3 -m uv venv -q --allow-existing --python=3.12 .venv; python3 -m uv pip install -q --python=.venv/bin/python -e '.[tpu]'"
    ;;
  run)
    if [[ $# -lt 2 || " $*" != *" --workdir"[=\ ]* ]]; then usage; fi
    config=$1
    shift
    printf -v command '%q ' .venv/bin/python -m dmljax.main "--config=$config" "$@" --distributed
    # setsid: the run is in a session of its own, which the end of the connection does not touch.
    printf -v script '%q' "echo \$\$ > run.pid; ${command% } & pid=\$!; echo \$pid > run.pid; wait \$pid; echo \$? > run.status"
    every_host "cd dmljax && if $find_run; then echo \"\$(hostname): process \$pid is running already\" >&2; exit 1; fi; rm -f run.status; setsid nohup bash -c $script > run.log 2>&1 < /dev/null &"
    ;;
  status)
    every_host "cd dmljax && if $find_run; then echo \"\$(hostname): process \$pid is running: \$(tail -n 1 run.log)\"; else echo \"\$(hostname): ended with status \$(cat run.status 2> /dev/null || echo unknown): \$(tail -n 1 run.log)\"; fi"
    ;;
  logs)
    every_host "tail -n 100 -F dmljax/run.log"
    ;;
  stop)
    every_host "cd dmljax && if $find_run; then kill -TERM \"\$pid\"; fi"
    ;;
  *) usage ;;
esac
