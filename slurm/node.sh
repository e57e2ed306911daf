#!/bin/bash
# One node's part of a step, started by srun: torchrun starts the node's ranks. Arguments: those of mua.
set -euo pipefail
eval "$MUA_SETUP"
export PATH="$VENV/bin:$PATH"
cores=$(env -u OMP_NUM_THREADS nproc)  # that this process may use
gpus=${SLURM_GPUS_ON_NODE:-0}
shares=$((MUA_RANKS_PER_NODE > gpus ? MUA_RANKS_PER_NODE : gpus))  # one process for each GPU, a rank's or an engine's
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > shares ? cores / shares : 1))}
# Slurm sends a signal to every process of a step. The ranks know what to do with this one; torchrun would die of it.
trap '' USR1
if [ -n "${MUA_FIRST_NODE:-}" ]; then
  # Engines of one job with the trainer, which a dead node does not end. If that is the first one, the batch script is
  # gone with it, and nobody but us can tell Slurm to start the job again.
  trap ':' TERM
  ended=0
  bash "$MUA_ROOT/slurm/rank.sh" "$@" || ended=$?
  if [ "$ended" != 0 ] && list=$(squeue --noheader --job "$SLURM_JOB_ID" --format=%N); then
    scontrol show hostnames "$list" | grep -qxF "$MUA_FIRST_NODE" || scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$ended"
fi
if [ "$SLURM_STEP_NUM_NODES" = 1 ] && [ "$MUA_RANKS_PER_NODE" = 1 ]; then
  exec bash "$MUA_ROOT/slurm/rank.sh" "$@"
fi
exec torchrun --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$MUA_RANKS_PER_NODE" --node-rank="$SLURM_NODEID" \
  --master-addr="$MUA_HEAD" --master-port="$MUA_PORT" --max-restarts=0 \
  --no-python bash "$MUA_ROOT/slurm/rank.sh" "$@" 2>>"$MUA_RANK_LOGS/torchrun-$SLURM_NODEID.log"
