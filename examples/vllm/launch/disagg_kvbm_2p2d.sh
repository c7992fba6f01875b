#!/usr/bin/env bash
# Two decode workers and two prefill workers with KVBM. Needs four GPUs; settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}

frontend --router-mode kv
decode 0
decode 1
prefill 2
prefill 3
wait_for_all
