#!/usr/bin/env bash
# One decode worker and one prefill worker; KVBM is on the prefill worker. Needs two GPUs; PREFILL_CONFIG and
# DECODE_CONFIG are the files with their options (prefill.yaml, decode.yaml); other settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
PREFILL_CONFIG=${PREFILL_CONFIG:-$(dirname "$CONFIG")/prefill.yaml}
DECODE_CONFIG=${DECODE_CONFIG:-$(dirname "$CONFIG")/decode.yaml}

frontend --router-mode round-robin
CONFIG=$DECODE_CONFIG worker 0 --disaggregation-mode decode
CONFIG=$PREFILL_CONFIG worker 1 --disaggregation-mode prefill
wait_for_all
