# shellcheck shell=bash
# The common part of the launch scripts, which source this file.
#
# Settings, all of them environment variables, beside those of processes.sh:
#   MODEL                  model to serve (Qwen/Qwen3-0.6B)
#   SERVED_MODEL_NAME      name of the model for clients (MODEL)
#   CONFIG                 options of the engine (kvbm_llm_api_config.yaml)
#   DYN_KVBM_CPU_CACHE_GB  host memory of each worker (20); the worker gets all other settings of KVBM unchanged
#   PUB_PORT               first port of the leaders; a worker takes two (56001)
#   METRICS_PORT           first port of KVBM's metrics, if DYN_KVBM_METRICS is on; a worker takes one (6880)
#   ENGINE_ARGS            more arguments for every worker, separated by blanks

# shellcheck source-path=SCRIPTDIR source=../../processes.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../processes.sh"

MODEL=${MODEL:-Qwen/Qwen3-0.6B}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-$MODEL}
CONFIG=${CONFIG:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/kvbm_llm_api_config.yaml}
PUB_PORT=${PUB_PORT:-56001}
METRICS_PORT=${METRICS_PORT:-6880}
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
read -r -a engine_args <<<"${ENGINE_ARGS:-}"

# settings NUMBER: fills the array of that name with a worker's GPU and ports.
settings() {
  local gpu
  gpu=$(device "$1")
  settings=(
    "CUDA_VISIBLE_DEVICES=$gpu"
    "DYN_KVBM_LEADER_ZMQ_PUB_PORT=$((PUB_PORT + 2 * $1))"
    "DYN_KVBM_LEADER_ZMQ_ACK_PORT=$((PUB_PORT + 2 * $1 + 1))"
    "DYN_KVBM_METRICS_PORT=$((METRICS_PORT + $1))"
  )
}

# worker NUMBER ARGUMENTS...
worker() {
  local settings
  settings "$1"
  shift
  run "${settings[@]}" "$PYTHON" -m dynamo.trtllm --model-path "$MODEL" --served-model-name "$SERVED_MODEL_NAME" \
    --extra-engine-args "$CONFIG" "${engine_args[@]}" "$@"
}
