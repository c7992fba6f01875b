#!/usr/bin/env bash
# Two workers with KVBM behind a router that knows what each of them holds, on the GPU and below it.
# Needs two GPUs; settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-2}
# The same blocks must have the same names in both workers. vLLM 0.29 and newer see to that themselves.
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}

frontend --router-mode kv
worker 0 "$KVBM"
worker 1 "$KVBM"
wait_for_all
