#!/usr/bin/env bash
# Embeds a collection in N parts by a Slurm job array, from a clone that all nodes see:
#
#     sbatch --array=0-63 --cpus-per-task=8 [--gpus=1] launch/shards.slurm.sh photos.bundle --images=list.parquet --out=vectors/
#     sbatch --array=0-63 --cpus-per-task=8 [--gpus=1] launch/shards.slurm.sh runs/photos --split=train --out=embeddings/
#
# Images are decoded on CPUs, and Slurm gives a task one core by default.
# The array must start at 0 and have a step of 1: task I of N gets --shard=I/N. Tasks do not talk to
# each other, start at any time, and may be preempted: Slurm starts them again, and they continue.
# After a failure, only the missing parts are needed. Name them, and N, which must stay the same:
#
#     sbatch --array=3,17 --export=ALL,PARTS=64 launch/shards.slurm.sh photos.bundle ...
#
# vectors/manifest.json lists them under "missing". PYTHON chooses the interpreter.
# `launch/shards.slurm.sh --dry-run ARGUMENTS`, without sbatch, prints the command of every task.
#SBATCH --job-name=dmljax-embed
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A_%a.out
set -euo pipefail

dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=yes
  shift
fi
if [[ -n $dry && -z ${SLURM_ARRAY_TASK_ID:-} ]]; then # the numbers that Slurm will set
  task=I parts=${PARTS:-N}
else
  task=${SLURM_ARRAY_TASK_ID:-} parts=${PARTS:-${SLURM_ARRAY_TASK_COUNT:-}}
fi
if [[ $# -lt 2 || -z $task ]]; then
  echo "usage: sbatch --array=0-\$((N - 1)) $0 BUNDLE --images=COLLECTION --out=FOLDER" >&2
  exit 2
fi
if [[ -z ${PARTS:-} && $task != I && $((SLURM_ARRAY_TASK_MAX + 1)) -ne $parts ]]; then
  echo "error: --array must be 0-$((parts - 1)) for $parts parts; for some of N parts set PARTS=N" >&2
  exit 2
fi
command=("${PYTHON:-python3}" -m dmljax.main embed "$@" "--shard=$task/$parts")
if [[ -n $dry ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
