#!/usr/bin/env bash
# Dynamo's frontend and one TensorRT-LLM worker with KVBM. Needs one GPU; settings: common.sh.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

frontend --router-mode round-robin
worker 0
wait_for_all
