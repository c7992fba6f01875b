#!/usr/bin/env bash
# Two TensorRT-LLM workers with KVBM behind a router that knows the blocks of each worker in all tiers: a consolidator
# merges their events and KVBM's. Needs two GPUs; EVENT_PORT is the first port of TensorRT-LLM's events
# (20081), a worker takes one; other settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
EVENT_PORT=${EVENT_PORT:-20081}

frontend --router-mode kv
DYN_KVBM_TRTLLM_ZMQ_PORT=$EVENT_PORT worker 0 --publish-kv-events
DYN_KVBM_TRTLLM_ZMQ_PORT=$((EVENT_PORT + 1)) worker 1 --publish-kv-events
wait_for_all
