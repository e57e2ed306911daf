#!/bin/bash
# One rank, started by torchrun (or alone, without its variables): its output goes to a file of its own. Arguments: those of mua.
exec >>"$MUA_RANK_LOGS/${MUA_LOG_NAME:-rank-$(printf %05d "${RANK:-0}")}.log" 2>&1
exec mua "$@"
