#!/usr/bin/env bash
# Trains on a Slurm cluster, from a clone of the repository on a file system that all nodes see:
#
#     sbatch --nodes=2 [--gpus-per-node=8] launch/slurm.sh CONFIG [--workdir=FOLDER] [--config.field=value ...]
#
# By default one task per node uses all GPUs of the node. With --ntasks-per-node=8 --gpus-per-task=1
# there is one task per GPU. Slurm sends SIGTERM to every task after `scancel --signal=TERM JOB`, at
# a preemption, and one minute before the time limit. The run then saves, and the job goes back into
# the queue and continues later. After a plain `scancel JOB` the run saves and the job ends.
# PYTHON chooses the interpreter. `launch/slurm.sh --dry-run CONFIG`, without sbatch, prints the
# command of every task.
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

# jax gives each task one device. A task that is alone on its node takes all of them.
if [[ ${SLURM_NTASKS_PER_NODE:-1} == 1 && ${SLURM_GPUS_ON_NODE:-0} -gt 0 ]]; then
  JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi
if [[ -n $dry ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi

trap : TERM # Slurm also sends it to the tasks; this script must wait for their exit status
"${command[@]}" &
step=$!
while :; do
  wait "$step"
  status=$?
  kill -0 "$step" 2> /dev/null || break # else a signal has ended `wait` too early
done

# 143: a signal stopped the run, which has saved. A canceled job is not RUNNING and stays canceled.
if (( status == 143 )) && [[ $(squeue --noheader --job="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
  echo "saved; job $SLURM_JOB_ID goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60 # until Slurm ends this script
fi
exit "$status"
