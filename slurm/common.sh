# What the batch scripts share: where logs go, which port is free, steps that signals reach, and what comes after them.
# Sourced on the first node of the job. Uses bash, Slurm's programs and nothing else: the rest runs inside steps.
set -uo pipefail

leaving=      # Slurm said that the time is nearly over, or somebody wants the nodes
cancelled=    # somebody cancelled the job, or the time is over
step=         # process of the step that runs
keepers=()    # processes that keep an engine node's step running, one for each
finished=     # the job's last step ended well
status=0      # of the last step, as rank 0 left it; "fault" when it left none
trap 'leaving=1; say "asked to leave (SIGUSR1)"; forward USR1' USR1
trap 'cancelled=1; forward TERM; end_engines' TERM

say() { printf '%s mua: %s\n' "$(date '+%F %T')" "$*"; }

forward() { [ -z "$step" ] || kill -s "$1" "$step" 2>/dev/null; }

begin() {
  [ $# -gt 0 ] || { say "usage: sbatch SCRIPT CONFIG.yaml [KEY=VALUE ...]"; exit 2; }
  attempt=${SLURM_RESTART_COUNT:-0}
  MUA_ATTEMPT=$MUA_LOGS/attempt-$attempt
  MUA_STATUS_FILE=$MUA_ATTEMPT/status
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  trainer_nodes=("${nodes[@]:0:${#nodes[@]}-${MUA_ENGINE_NODES:-0}}")
  MUA_HEAD=$(address_of "${nodes[0]}")
  export MUA_ROOT VENV MUA_SETUP MUA_RANKS_PER_NODE MUA_ATTEMPT MUA_STATUS_FILE MUA_HEAD
  # A step that names a number of cores gets no more than that, and binds its one process to them: srun takes the
  # number from these variables, which of them depends on its version. One that names none gets what the job has there.
  unset SRUN_CPUS_PER_TASK SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
  mkdir -p "$MUA_ATTEMPT" || { say "cannot write logs to $MUA_LOGS"; exit 2; }
  say "job $SLURM_JOB_ID, attempt $attempt, on $SLURM_JOB_NODELIST; logs in $MUA_ATTEMPT"
}

# Where other nodes reach a node: its NodeAddr, which is its name unless the cluster says otherwise.
address_of() {
  local address
  address=$(scontrol show node "$1" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  echo "${address:-$1}"
}

# A port on this node that nothing listens on. Two jobs on one node begin to look at different places.
free_port() {
  local try port
  for try in $(seq 0 200); do
    port=$((20000 + (SLURM_JOB_ID * 37 + attempt * 7 + try * 101 + ${1:-0}) % 12000))
    if ! (exec 3<>"/dev/tcp/$MUA_HEAD/$port") 2>/dev/null; then
      echo "$port"
      return
    fi
  done
  say "no free port on $MUA_HEAD" >&2
  return 1
}

# Run a command in the background, so that signals are handled while it runs, and wait for its end.
run_step() {
  local ended
  "$@" &
  step=$!
  # A signal that came just before could not reach it.
  [ -z "$leaving" ] || forward USR1
  [ -z "$cancelled" ] || forward TERM
  while true; do
    ended=0
    wait "$step" || ended=$?
    kill -0 "$step" 2>/dev/null || break
  done
  step=
  return "$ended"
}

# Wait so many seconds, or until the job is cancelled. Short sleeps: one that Slurm does not find may outlive the script.
pause() {
  local left=$1
  while [ -z "$cancelled" ] && [ "$left" -gt 0 ]; do
    sleep 1
    left=$((left - 1))
  done
}

# one_task_a_node NODE,NODE ... srun's arguments: with all of the job's cores there, in the container if there is one.
one_task_a_node() {
  local container=() list=$1 count
  shift
  count=$(tr ',' '\n' <<<"$list" | wc -l)
  [ -z "${MUA_CONTAINER_IMAGE:-}" ] || container+=(--container-image="$MUA_CONTAINER_IMAGE")
  [ -z "${MUA_CONTAINER_MOUNTS:-}" ] || container+=(--container-mounts="$MUA_CONTAINER_MOUNTS")
  run_step srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$list" --cpu-bind=none \
    "${container[@]}" "$@"
}

# ranks NAME VERB ...: `mua VERB ...` on every rank of the job, logs in <attempt>/NAME/rank-<n>.log. Sets status.
ranks() {
  local ended=0 name=$1
  shift
  export MUA_RANK_LOGS=$MUA_ATTEMPT/$name MUA_PORT
  MUA_PORT=$(free_port) || { status=fault; return; }
  mkdir -p "$MUA_RANK_LOGS"
  rm -f "$MUA_STATUS_FILE"
  one_task_a_node "$(joined "${trainer_nodes[@]}")" --kill-on-bad-exit=1 \
    bash "$MUA_ROOT/slurm/node.sh" "$@" || ended=$?
  status=fault
  [ ! -s "$MUA_STATUS_FILE" ] || status=$(<"$MUA_STATUS_FILE")
  say "$name ended: rank 0 with $status, the step with $ended"
  [ "$status" = 0 ] || grep '^mua: ' "$MUA_RANK_LOGS/rank-00000.log" 2>/dev/null | tail -n 3 || true
  if [ "$status" = fault ]; then
    tail -n 5 "$MUA_RANK_LOGS"/*.log 2>/dev/null || true
  fi
}

joined() { local IFS=,; echo "$*"; }

# engines CONFIG ...: `mua engines CONFIG ...` on each engine node, beside the trainer. Not heard of further: a node whose
# step ends before the run does gets a new one, and one that is lost takes its engines with it and nothing else.
engines() {
  local engine_nodes=("${nodes[@]:${#trainer_nodes[@]}}") node
  engine_group=()
  if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
    engine_group=(--het-group=1)
    mapfile -t engine_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
  fi
  mkdir -p "$MUA_ATTEMPT/engines"
  for node in "${engine_nodes[@]}"; do
    keep_engines "$node" "$@" &
    keepers+=($!)
  done
}

# One engine node, in a process of its own: a look at it, then its steps one after the other until the run has ended.
keep_engines() {
  local ended=0 node=$1
  shift
  # srun passes on SIGUSR1, at which engines leave once their requests have ended; for SIGTERM it kills.
  trap 'cancelled=1; forward USR1' TERM
  trap 'forward TERM' ALRM
  trap '' USR1  # the trainer saves and leaves; then its engines are ended
  export MUA_RANK_LOGS=$MUA_ATTEMPT/engines MUA_RANKS_PER_NODE=1
  if [ "${#trainer_nodes[@]}" != 0 ] && [ "${#engine_group[@]}" = 0 ]; then
    export MUA_FIRST_NODE=${nodes[0]}
  fi
  unset MUA_STATUS_FILE
  [ "$MUA_PREFLIGHT" = 0 ] || on_engine_node "$node-doctor" "$node" doctor || ended=$?
  [ "$ended" != 2 ] || { say "engines of $node: $(grep ^failure "$MUA_RANK_LOGS/$node-doctor.log")"; return 2; }
  while [ -z "$cancelled" ]; do
    ended=0
    on_engine_node "$node" "$node" engines "$@" || ended=$?
    [ -z "$cancelled" ] || return 75
    case $ended in
      0) say "engines of $node: the run has ended"; return ;;
      2) say "engines of $node: stopped by something a person has to fix, see $MUA_RANK_LOGS/$node.log"; return 2 ;;
    esac
    say "engines of $node ended with $ended"
    still_ours "$node" || { say "Slurm has taken $node from the job: its engines are gone, the run goes on"; return 75; }
    pause "${MUA_ENGINE_SECONDS:-20}"
  done
  return 75
}

# on_engine_node LOG NODE VERB ...: one step there.
on_engine_node() {
  export MUA_LOG_NAME=$1
  one_task_a_node "$2" "${engine_group[@]}" bash "$MUA_ROOT/slurm/node.sh" "${@:3}" >>"$MUA_RANK_LOGS/srun-$2.log" 2>&1
}

# The end of engines that are a job of their own: the run's, a mistake, or what asked them to leave. Sets status.
await_engines() {
  local keeper ended
  status=75
  leaving=1
  for keeper in "${keepers[@]}"; do
    while true; do
      ended=0
      wait "$keeper" || ended=$?
      kill -0 "$keeper" 2>/dev/null || break
    done
    case $ended in
      0) finished=1 ;;
      2) status=2 ;;
    esac
  done
}

# Whether the job still has a node. One that Slurm finds dead is taken from a job that is not ended for it (--no-kill).
still_ours() {
  local job=$SLURM_JOB_ID list
  [ "${SLURM_HET_SIZE:-1}" = 1 ] || job=$SLURM_JOB_ID_HET_GROUP_1
  list=$(squeue --noheader --states=all --job "$job" --format=%N) || return 0  # nobody answers: look again later
  scontrol show hostnames "$list" | grep -qxF "$1"
}

# Ask engines to leave, and after a minute end those that have not. The script itself counts the seconds: Slurm may not
# find, and so not end, what outlives it.
end_engines() {
  local asked=("${keepers[@]}") left=$((${MUA_LEAVE_SECONDS:-60} * 5))
  keepers=()
  [ "${#asked[@]}" != 0 ] || return 0
  kill -s TERM "${asked[@]}" 2>/dev/null
  while kill -0 "${asked[@]}" 2>/dev/null; do
    if [ "$left" = 0 ]; then
      say "engines have not left: ended"
      kill -s ALRM "${asked[@]}" 2>/dev/null
      break
    fi
    left=$((left - 1))
    sleep 0.2
  done
  wait "${asked[@]}" 2>/dev/null
}

# The simulated user's server, started by another job: wait for its address file and for something that listens there.
find_user() {
  [ -n "${MUA_USER_ADDRESS:-}" ] || return 0
  local deadline=$((SECONDS + MUA_USER_SECONDS)) url host
  say "waiting for the user's server: $MUA_USER_ADDRESS"
  while [ -z "$leaving$cancelled" ]; do
    url=$(sed -n 's/^MUA_USER_BASE_URL=//p' "$MUA_USER_ADDRESS" 2>/dev/null)
    host=${url#http://}
    host=${host%%/*}
    if [ -n "$url" ] && (exec 3<>"/dev/tcp/${host%:*}/${host##*:}") 2>/dev/null; then
      export MUA_USER_BASE_URL=$url MUA_USER_MODEL MUA_USER_API_KEY
      MUA_USER_MODEL=$(sed -n 's/^MUA_USER_MODEL=//p' "$MUA_USER_ADDRESS")
      MUA_USER_API_KEY=$(sed -n 's/^MUA_USER_API_KEY=//p' "$MUA_USER_ADDRESS")
      say "the user's server is at $url"
      return
    fi
    if [ $SECONDS -ge $deadline ]; then
      say "no server for the user within $MUA_USER_SECONDS s; is serve_user.sbatch running? $MUA_USER_ADDRESS"
      status=2
      was_well
      finish
    fi
    sleep 2
  done
}

# What an earlier attempt has found in order is no mistake of a person when a later one misses it: it may come back.
was_well() {
  [ "$attempt" = 0 ] || [ "$status" != 2 ] || status=75
}

# What comes after the last step: the end, or another attempt. The statuses are those of mua/utils/errors.py.
finish() {
  if [ -n "$finished" ]; then
    say "finished"
    exit 0
  elif [ -n "$cancelled" ]; then
    say "cancelled, or out of time"
    exit 143
  elif [ "$status" = 2 ]; then
    say "stopped by something a person has to fix, see $MUA_ATTEMPT"
    exit 2
  elif [ -z "$leaving" ] && ! bearable; then
    say "$MUA_MAX_FAULTS faults without a new checkpoint between them: given up, see $MUA_ATTEMPT"
    exit 1
  fi
  requeue
}

# Whether the fault that just happened may be followed by another attempt.
bearable() {
  local newest=none
  [ -z "${MUA_CHECKPOINTS:-}" ] || newest=$(ls "$MUA_CHECKPOINTS" 2>/dev/null | tail -n 1)
  echo "${newest:-none}" >>"$MUA_LOGS/faults"
  if [ "$status" = 75 ]; then
    say "a fault that may pass, after checkpoint ${newest:-none}"
  else
    say "a fault (a killed rank, a lost node, a bug) after checkpoint ${newest:-none}"
  fi
  [ "$(grep -cxF "${newest:-none}" "$MUA_LOGS/faults")" -le "$MUA_MAX_FAULTS" ]
}

requeue() {
  if [ "$MUA_REQUEUE" != 1 ]; then
    say "not finished, and not to be requeued; submit it again to continue"
    exit 75
  fi
  say "requeueing; the next attempt continues from the newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID" || [ -n "$cancelled" ] || { say "Slurm does not requeue this job; submit it again to continue"; exit 75; }
  pause 60  # Slurm ends this script
  exit 75
}
