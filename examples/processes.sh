# shellcheck shell=bash
# Starts processes and stops all of them on exit. The launch scripts source this file.
#
#   DYN_HTTP_HOST   address of the frontend (127.0.0.1; 0.0.0.0 opens it to the network)
#   DYN_HTTP_PORT   port of the frontend (8000)
#   FRONTEND_ARGS   more arguments for the frontend, separated by blanks
#   DEVICES         GPUs of the workers in order, separated by commas (0,1,2,...)
#   PYTHON          interpreter with Dynamo, the engine and KVBM (python3)
#   KVBM_DRY_RUN    1 prints the commands instead of running them
# Dynamo reads its own variables for service discovery: ETCD_ENDPOINTS and NATS_SERVER, or DYN_DISCOVERY_BACKEND=file
# and DYN_EVENT_PLANE=zmq on one machine without etcd and NATS.

set -euo pipefail

DYN_HTTP_HOST=${DYN_HTTP_HOST:-127.0.0.1}
DYN_HTTP_PORT=${DYN_HTTP_PORT:-8000}
DEVICES=${DEVICES:-0,1,2,3,4,5,6,7}
PYTHON=${PYTHON:-python3}
KVBM_DRY_RUN=${KVBM_DRY_RUN:-0}
read -r -a frontend_args <<<"${FRONTEND_ARGS:-}"
IFS=, read -r -a devices <<<"$DEVICES"

started=()
folder=/nonexistent # for sockets; mode 0700
[ "$KVBM_DRY_RUN" = 1 ] || folder=$(mktemp -d)

# Stops every started process. Each one leads a process group of its own.
clean_up() {
  trap - EXIT INT TERM
  local pid
  # A signal can arrive before a started process is in the list, or before it has made its group.
  for pid in $(jobs -p); do started+=("$pid"); done
  for pid in "${started[@]}"; do
    kill -TERM -- "-$pid" "$pid" 2>/dev/null || true
  done
  for _ in $(seq 100); do
    any_left || break
    sleep 0.1
  done
  for pid in "${started[@]}"; do
    kill -KILL -- "-$pid" "$pid" 2>/dev/null || true
  done
  wait 2>/dev/null || true
  rm -rf "$folder"
}

any_left() {
  local pid
  for pid in "${started[@]}"; do
    if kill -0 -- "-$pid" 2>/dev/null || kill -0 "$pid" 2>/dev/null; then return 0; fi
  done
  return 1
}

# run VAR=VALUE... COMMAND...
run() {
  if [ "$KVBM_DRY_RUN" = 1 ]; then
    printf '%q ' "$@"
    printf '\n'
    return
  fi
  setsid env "$@" &
  started+=("$!")
}

# frontend ARGUMENTS...
frontend() {
  run "$PYTHON" -m dynamo.frontend --http-host "$DYN_HTTP_HOST" --http-port "$DYN_HTTP_PORT" "$@" "${frontend_args[@]}"
}

# device NUMBER: prints the GPU of a worker.
device() {
  if [ "$1" -ge "${#devices[@]}" ]; then
    echo "DEVICES=$DEVICES: expected at least $(($1 + 1)) GPUs, separated by commas" >&2
    return 2
  fi
  echo "${devices[$1]}"
}

# Waits until the first process (the frontend, if there is one) has ended, or all others have.
wait_for_all() {
  [ "$KVBM_DRY_RUN" = 1 ] && return
  local status pid left
  while true; do
    status=0
    wait -n || status=$?
    left=0
    for pid in "${started[@]:1}"; do
      if kill -0 "$pid" 2>/dev/null; then left=$((left + 1)); fi
    done
    if ! kill -0 "${started[0]}" 2>/dev/null || [ "$left" = 0 ]; then
      echo "a process has ended with status $status: ending the others" >&2
      exit "$status"
    fi
    echo "a worker has ended with status $status; $left left" >&2
  done
}

trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
