#!/bin/bash
# One node's part of a step, started by srun: torchrun starts the node's ranks. Arguments: those of mua.
set -euo pipefail
eval "$MUA_SETUP"
export PATH="$VENV/bin:$PATH"
cores=$(env -u OMP_NUM_THREADS nproc)  # that this process may use
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > MUA_RANKS_PER_NODE ? cores / MUA_RANKS_PER_NODE : 1))}
# Slurm sends a signal to every process of a step. The ranks know what to do with this one; torchrun would die of it.
trap '' USR1
if [ "$SLURM_STEP_NUM_NODES" = 1 ] && [ "$MUA_RANKS_PER_NODE" = 1 ]; then
  exec bash "$MUA_ROOT/slurm/rank.sh" "$@"
fi
exec torchrun --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$MUA_RANKS_PER_NODE" --node-rank="$SLURM_NODEID" \
  --master-addr="$MUA_HEAD" --master-port="$MUA_PORT" --max-restarts=0 \
  --no-python bash "$MUA_ROOT/slurm/rank.sh" "$@" 2>>"$MUA_RANK_LOGS/torchrun-$SLURM_NODEID.log"
