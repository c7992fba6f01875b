#!/usr/bin/env bash
# TensorRT-LLM's own server with KVBM, without Dynamo. Needs one GPU; settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -a settings
settings 0
run "${settings[@]}" trtllm-serve "$MODEL" --host "$DYN_HTTP_HOST" --port "$DYN_HTTP_PORT" --backend pytorch \
  --extra_llm_api_options "$CONFIG" "${engine_args[@]}"
wait_for_all
