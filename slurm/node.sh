#!/bin/bash
# One node's part of a step, started by srun: torchrun starts the node's ranks. Arguments: those of mua.
set -euo pipefail
eval "$MUA_SETUP"
export PATH="$VENV/bin:$PATH"
cpus=${SRUN_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > MUA_RANKS_PER_NODE ? cpus / MUA_RANKS_PER_NODE : 1))}
# Slurm sends a signal to every process of a step. The ranks know what to do with this one; torchrun would die of it.
trap '' USR1
if [ "$SLURM_NNODES" = 1 ] && [ "$MUA_RANKS_PER_NODE" = 1 ]; then
  exec bash "$MUA_ROOT/slurm/rank.sh" "$@"
fi
exec torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$MUA_RANKS_PER_NODE" --node-rank="$SLURM_NODEID" \
  --master-addr="$MUA_HEAD" --master-port="$MUA_PORT" --max-restarts=0 \
  --no-python bash "$MUA_ROOT/slurm/rank.sh" "$@" 2>>"$MUA_RANK_LOGS/torchrun-$SLURM_NODEID.log"
