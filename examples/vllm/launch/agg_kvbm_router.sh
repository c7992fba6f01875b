#!/usr/bin/env bash
# Two workers with KVBM behind a router that knows the blocks of each worker in all tiers.
# Needs two GPUs; settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-2}
# The same blocks must have the same hashes in both workers. vLLM 0.29 and newer ensure that.
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}

frontend --router-mode kv
worker 0 "$KVBM"
worker 1 "$KVBM"
wait_for_all
