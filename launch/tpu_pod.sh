#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice, from a clone of the repository on your own machine:
#
#     launch/tpu_pod.sh [--dry-run] setup NAME ZONE              copies the clone, installs, on every host
#     launch/tpu_pod.sh [--dry-run] run NAME ZONE CONFIG --workdir=FOLDER [--config.field=value ...]
#     launch/tpu_pod.sh [--dry-run] stop NAME ZONE               SIGTERM to every host: save, and leave
#
# FOLDER must be on a file system that all hosts share. All hosts execute the same command: jax asks
# the slice for the number of the host and for the address of process 0. `--dry-run` prints the
# commands instead of executing them.
set -euo pipefail

dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=yes
  shift
fi
usage() {
  sed -n '4,6s/^# *//p' "$0" >&2
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

case $action in
  setup)
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$archive" HEAD
    execute gcloud compute tpus tpu-vm scp "$archive" "$name:dmljax.tar.gz" "--zone=$zone" --worker=all
    every_host "mkdir -p dmljax && tar -xzf dmljax.tar.gz -C dmljax && cd dmljax && python3 -m venv .venv && .venv/bin/pip install -q -e '.[tpu]'"
    ;;
  run)
    if [[ $# -lt 2 || "$*" != *--workdir=* ]]; then usage; fi
    config=$1
    shift
    printf -v command '%q ' .venv/bin/python -m dmljax.main "--config=$config" "$@" --distributed
    every_host "cd dmljax && exec ${command% }"
    ;;
  stop)
    # Because of the brackets, the pattern does not match the command line of pkill itself.
    every_host "pkill -TERM -f '[d]mljax.main'"
    ;;
  *) usage ;;
esac
