#!/usr/bin/env bash
# Two workers behind a router that weighs load against cached prefixes. When it sends a prompt to the worker that has
# less to do, it hints where the prefix lies, and that worker reads it from the other's host memory.
# Needs two GPUs; settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-2}
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
if [ -z "${KVBM_PEER_SECRET:-}${KVBM_PEER_SECRET_FILE:-}" ]; then
  # For workers of this script only. Workers on several machines need a file with the same secret.
  KVBM_PEER_SECRET=$(head -c 32 /dev/urandom | base64)
  export KVBM_PEER_SECRET
fi
# The blocks of a worker that dies are not served on: a script ends everything that it has started.
export KVBM_PEER_ORPHAN_SECS=${KVBM_PEER_ORPHAN_SECS:-0}

frontend --router-mode kv
peer 0
peer 1
wait_for_all
