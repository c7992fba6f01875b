#!/usr/bin/env bash
# One worker with KVBM. Needs one GPU; settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}

frontend --router-mode round-robin
worker 0 "$KVBM"
wait_for_all
