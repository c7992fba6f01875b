#!/usr/bin/env bash
# One decode worker and one prefill worker. The prefill worker loads blocks from KVBM and sends the result over NIXL.
# Needs two GPUs; settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}

frontend --router-mode round-robin
decode 0
prefill 1
wait_for_all
