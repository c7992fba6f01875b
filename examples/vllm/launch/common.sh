# shellcheck shell=bash
# The common part of the launch scripts, which source this file.
#
# Settings, all of them environment variables, beside those of processes.sh:
#   MODEL                  model to serve (Qwen/Qwen3-0.6B)
#   SERVED_MODEL_NAME      name of the model for clients (MODEL)
#   DYN_KVBM_CPU_CACHE_GB  host memory of each worker with KVBM; the worker gets DYN_KVBM_DISK_CACHE_GB and all other
#                          settings of KVBM unchanged
#   PUB_PORT               first port of the leaders; a worker takes two (56001)
#   SIDE_PORT              first port of NIXL's handshakes; a worker takes one (20096)
#   METRICS_PORT           first port of KVBM's metrics, if DYN_KVBM_METRICS is on; a worker takes one (6880)
#   PEER_PORT              first port at which workers read each other's host memory, where a script turns that on; a
#                          worker takes one (23280)
#   PEER_HOST              address of these ports, which the router puts into its hints (127.0.0.1)
#   EVENT_PORT             first port of vLLM's events, open to the whole network; a worker takes one
#                          (not set: a socket in a private folder)
#   ENGINE_ARGS            more arguments for every worker, separated by blanks
#   KVBM_DECODE            1 gives decode workers KVBM as well (0)
#   KVBM_DEVICE            cuda, or cpu to run without a GPU (cuda)

# shellcheck source-path=SCRIPTDIR source=../../processes.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../processes.sh"

KVBM_DEVICE=${KVBM_DEVICE:-cuda}
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-$MODEL}
PUB_PORT=${PUB_PORT:-56001}
EVENT_PORT=${EVENT_PORT:-}
SIDE_PORT=${SIDE_PORT:-20096}
METRICS_PORT=${METRICS_PORT:-6880}
PEER_PORT=${PEER_PORT:-23280}
PEER_HOST=${PEER_HOST:-127.0.0.1}
read -r -a engine_args <<<"${ENGINE_ARGS:-}"
export VLLM_NIXL_SIDE_CHANNEL_HOST=${VLLM_NIXL_SIDE_CHANNEL_HOST:-127.0.0.1} # all workers are on this machine

ours='"kv_connector_module_path":"kvbm.vllm_integration.connector","kv_role":"kv_both","kv_load_failure_policy":"recompute"'
KVBM="{\"kv_connector\":\"DynamoConnector\",$ours}"
NIXL='{"kv_connector":"NixlConnector","kv_role":"kv_both"}'

case $KVBM_DEVICE in
  cuda) ;;
  cpu)
    # 300 s: on few cores a worker may not run for longer than the usual 30 s.
    NIXL='{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu","kv_connector_extra_config":{"kv_lease_duration":300}}'
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    export PYTHONPATH=$here/cpu${PYTHONPATH:+:$PYTHONPATH} # keeps NIXL from using all cores
    # float32: CPUs without AMX compute bfloat16 several times slower. 32: the attention kernel takes no smaller block.
    engine_args=(--dtype float32 --block-size 32 --max-model-len 2048 "${engine_args[@]}")
    ;;
  *)
    echo "KVBM_DEVICE=$KVBM_DEVICE: expected cuda or cpu" >&2
    exit 2
    ;;
esac

PD="{\"kv_connector\":\"PdConnector\",$ours,\"kv_connector_extra_config\":{\"connectors\":[$KVBM,$NIXL]}}"
decoder=$NIXL
[ "${KVBM_DECODE:-0}" = 1 ] && decoder=$PD

# worker NUMBER CONNECTOR ARGUMENTS...
# The number decides its GPU and its ports.
worker() {
  local number=$1 connector=$2
  shift 2
  local events=ipc://$folder/events-$number
  [ -z "$EVENT_PORT" ] || events="tcp://*:$((EVENT_PORT + number))"
  local settings=(
    "DYN_KVBM_LEADER_ZMQ_PUB_PORT=$((PUB_PORT + 2 * number))"
    "DYN_KVBM_LEADER_ZMQ_ACK_PORT=$((PUB_PORT + 2 * number + 1))"
    "DYN_KVBM_METRICS_PORT=$((METRICS_PORT + number))"
    "VLLM_NIXL_SIDE_CHANNEL_PORT=$((SIDE_PORT + number))"
  )
  if [ "$KVBM_DEVICE" = cuda ]; then
    local gpu
    gpu=$(device "$number")
    settings+=("CUDA_VISIBLE_DEVICES=$gpu")
  fi
  run "${settings[@]}" "$PYTHON" -m dynamo.vllm --model "$MODEL" --served-model-name "$SERVED_MODEL_NAME" \
    --enforce-eager --kv-transfer-config "$connector" \
    --kv-events-config "{\"publisher\":\"zmq\",\"topic\":\"kv-events\",\"endpoint\":\"$events\",\"enable_kv_cache_events\":true}" \
    "${engine_args[@]}" "$@"
}

# peer NUMBER
# A worker with KVBM that reads from the host memory of the others, and tells the router at which address they read
# from its own (secondary_tiers). All need the same secret.
peer() {
  local port=$((PEER_PORT + $1))
  local hints="[{\"type\":\"kvbm\",\"router_capabilities\":[\"router_hint\"],\"control_ports\":[$port],\"control_advertise_host\":\"$PEER_HOST\"}]"
  export KVBM_PEERS_ENABLED=1 KVBM_PEER_LISTEN=$PEER_HOST:$port
  worker "$1" "{\"kv_connector\":\"DynamoConnector\",$ours,\"kv_connector_extra_config\":{\"secondary_tiers\":$hints}}"
}

# prefill NUMBER, decode NUMBER
# Both sides must use the same KV cache manager, and KVBM does not support vLLM's hybrid one here.
prefill() {
  worker "$1" "$PD" --disaggregation-mode prefill --disable-hybrid-kv-cache-manager
}

decode() {
  worker "$1" "$decoder" --disaggregation-mode decode --disable-hybrid-kv-cache-manager
}
