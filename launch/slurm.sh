#!/usr/bin/env bash
# Trains on a Slurm cluster, from a clone of the repository on a file system that all nodes see:
#
#     sbatch --nodes=2 [--gpus-per-node=8] launch/slurm.sh CONFIG [--workdir=FOLDER] [--config.field=value ...]
#
# One task a node takes all of its GPUs; with --ntasks-per-node=8 --gpus-per-task=1 there is one a GPU.
# `scancel --signal=TERM JOB`, a preemption and a time limit that is a minute away reach every task:
# the run saves, the job goes back into the queue, and goes on from there. A plain `scancel JOB` saves
# and ends. PYTHON chooses the interpreter. With --dry-run before CONFIG, and no sbatch, the script
# prints what every task would execute.
#SBATCH --job-name=dmljax
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
#SBATCH --signal=TERM@60
set -uo pipefail

dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=yes
  shift
fi
if [[ $# -lt 1 ]]; then
  echo "usage: sbatch [--nodes=N] $0 CONFIG [--workdir=FOLDER] [--config.field=value ...]" >&2
  exit 2
fi
config=$1
shift
command=(srun --kill-on-bad-exit=1 --label # if one task fails, Slurm ends the others
  "${PYTHON:-python3}" -m dmljax.main "--config=$config" "$@" --distributed)

# jax gives one device to a task; where a task is alone on its node, it takes all.
if [[ ${SLURM_NTASKS_PER_NODE:-1} == 1 && ${SLURM_GPUS_ON_NODE:-0} -gt 0 ]]; then
  JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi
if [[ -n $dry ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi

trap : TERM # for the tasks, which get it from Slurm; this script has to see how they end
"${command[@]}" &
step=$!
while :; do
  wait "$step"
  status=$?
  kill -0 "$step" 2> /dev/null || break # otherwise a signal has ended the waiting
done

# 143: stopped by a signal, and saved. A cancelled job has another state, and stays cancelled.
if (( status == 143 )) && [[ $(squeue --noheader --job="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
  echo "saved; job $SLURM_JOB_ID goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60 # until Slurm ends this script
fi
exit "$status"
