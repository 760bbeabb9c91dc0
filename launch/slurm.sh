#!/usr/bin/env bash
# Trains on a Slurm cluster, from a clone of the repository on a file system that all nodes see:
#
#     sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 launch/slurm.sh CONFIG [--workdir=FOLDER] [--config.field=value ...]
#
# One task per node uses all GPUs of the node. For one task per GPU, give the number of tasks:
# --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=8. Ask for CPUs: Slurm gives a task one core
# by default, and images are decoded on CPUs.
# Slurm sends SIGTERM to every task after `scancel --signal=TERM JOB`, at a preemption, and one
# minute before the time limit. The run then saves, and the job goes back into the queue and
# continues later. After a plain `scancel JOB` the run saves and the job ends.
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

# With --gpus-per-task, Slurm shows a task only its own GPU, which then has the number 0. But jax
# takes the GPU that has the number of the task on its node: "invalid device ordinal". So every task
# sees all GPUs that the job has on the node, and takes its share of them by their numbers.
share='gpus=${SLURM_GPUS_ON_NODE:-0} tasks=${SLURM_STEP_TASKS_PER_NODE%%[(,]*}
if [ "$gpus" -gt 0 ]; then
  if [ $((gpus % tasks)) -ne 0 ]; then echo "error: $tasks tasks cannot share $gpus GPUs evenly" >&2; exit 2; fi
  first=$((SLURM_LOCALID * gpus / tasks))
  JAX_LOCAL_DEVICE_IDS=$(seq -s, $first $((first + gpus / tasks - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi
exec "$@"'
command=(srun --kill-on-bad-exit=1 --label # if one task fails, Slurm ends the others
  --gpus-per-node="${SLURM_GPUS_ON_NODE:-0}" # and not by task, so that each task sees all of them
  --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" # srun does not inherit it
  sh -c "$share" sh
  "${PYTHON:-python3}" -m dmljax.main "--config=$config" "$@" --distributed)
if [[ -n $dry ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK # srun would read these options, too
if [[ ${SLURM_CPUS_PER_TASK:-1} == 1 && ${SLURM_GPUS_ON_NODE:-0} -gt 0 ]]; then
  echo "warning: each task has one core, which decodes too few images for a GPU: give --cpus-per-task" >&2
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
