#!/usr/bin/env bash
# Runs what is missing of a study: launch/study.sh studies/glyphs.py [--config.dataset.root=...]
#
# By itself, it starts one process for each GPU of this host, or one process without GPUs. Each takes
# the next missing run. Start it on several hosts with one file system to share the study.
#
# As a Slurm array, each task is one process:
#   sbatch --array=1-8 --gpus=1 --requeue --signal=B:TERM@120 launch/study.sh studies/glyphs.py
set -euo pipefail
python=${PYTHON:-python}

if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  exec "$python" -m dmljax.main study run "$@" --no-wait
fi
gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}
if [ -z "$gpus" ]; then
  exec "$python" -m dmljax.main study run "$@"
fi
pids=()
for gpu in ${gpus//,/ }; do
  CUDA_VISIBLE_DEVICES=$gpu "$python" -m dmljax.main study run "$@" &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' INT TERM
set +e
status=0
for pid in "${pids[@]}"; do
  wait "$pid"
  ended=$?
  # A trapped signal ends `wait`: wait again until the process has saved.
  while [ "$ended" -gt 128 ] && kill -0 "$pid" 2>/dev/null; do
    wait "$pid"
    ended=$?
  done
  [ "$ended" -eq 0 ] || status=$ended
done
exit "$status"
