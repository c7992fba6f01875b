#!/usr/bin/env bash
# As disagg_kvbm_2p2d.sh, with a router that also counts blocks of prefill workers in host memory and on disk. Needs four
# GPUs; HOST_WEIGHT and DISK_WEIGHT (0 to 1) are the weights of such blocks relative to a block on the GPU; other
# settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}

frontend --router-mode kv --router-host-cache-hit-weight "${HOST_WEIGHT:-0.75}" \
  --router-disk-cache-hit-weight "${DISK_WEIGHT:-0.25}"
decode 0
decode 1
prefill 2
prefill 3
wait_for_all
