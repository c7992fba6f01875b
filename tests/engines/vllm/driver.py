"""Runs a real vLLM through lists of operations, each list in a process of its own.

    python driver.py            # then a JSON line a scenario on stdin

Importing vLLM takes longer than starting it on a tiny model. So this process imports it once and forks a child for
every scenario: no two engines share memory, threads or environment, one that hangs can be killed, and a start costs
one second instead of twelve. A scenario is an object with these keys, and its result is written as JSON to
``result``::

    engine   arguments of vllm.LLM
    kvbm     settings of KVBM (kv_connector_extra_config); null runs vLLM without it
    env      environment variables of the engine's processes
    patch    attributes to set before the engine is made: {"module:name": value}; {"returns": x} is a function
    spawn    true: processes of the engine import vLLM anew, as a server's do, instead of being forked from this one
    swap     [folder, other]: the model's folder is replaced by another as soon as vLLM has read its weights
    steps    a list of {"do": name, ...}: the methods of Scenario below
    log      file that takes everything the engine prints
    result   {"steps": [what each step returned], "log": [[level, message] of KVBM], "refused": why no engine started}
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import urllib.request
from pathlib import Path

ON_CUDA = os.environ.get("KVBM_TEST_DEVICE") == "cuda"  # the others run on the CPU
DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # One thread: the models are tiny, and threads that spin while they wait for each other crawl on a busy machine.
    "OMP_NUM_THREADS": "1",
}
if ON_CUDA:
    DEFAULTS |= {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # needs a compiler at run time
    }
else:
    DEFAULTS |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",  # of the sampler: compiling it takes longer than all that is computed here
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


class Collector(logging.Handler):
    """Keeps what KVBM says, for tests that promise a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


class Scenario:
    """One engine. Every public method is a step that a test can ask for by name."""

    def __init__(self, engine: dict, kvbm: dict | None) -> None:
        from vllm import LLM

        arguments = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "block_size": 32,
            "num_gpu_blocks_override": 256,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
            # Prompts are tokens, and loading a tokenizer takes half of a start. Pooling models do not run without.
            "skip_tokenizer_init": engine.get("runner") != "pooling",
            **engine,
        }
        if kvbm is not None:
            from vllm.config import KVTransferConfig

            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_connector="DynamoConnector",
                kv_connector_module_path="kvbm.vllm_integration.connector",
                kv_role="kv_both",
                kv_load_failure_policy=kvbm.pop("kv_load_failure_policy", "recompute"),
                kv_connector_extra_config=kvbm,
            )
        self.llm = LLM(**arguments)
        self._mends: list[tuple[object, str, object]] = []
        self._gates: list[threading.Event] = []

    # -- the engine ---------------------------------------------------------------------------------------------------

    @property
    def engine(self):
        return self.llm.llm_engine

    @property
    def core(self):
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def adapter(self):
        return self.scheduler.connector._adapter

    def generate(
        self,
        prompts: list,
        max_tokens: int = 16,
        salts: list | None = None,
        lora: list | None = None,
        priority: list | None = None,
        **params,
    ) -> dict:
        """Greedy, all prompts at once. ``salts``, ``lora`` ([name, number, path]) and ``priority``: an entry each."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        requests = [{"prompt_token_ids": tokens} for tokens in prompts]
        for request, salt in zip(requests, salts or (), strict=False):
            if salt is not None:
                request["cache_salt"] = salt
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params})
        adapters = [LoRARequest(*adapter) if adapter else None for adapter in lora] if lora else None
        outputs = self.llm.generate(requests, sampling, use_tqdm=False, lora_request=adapters, priority=priority)
        result = {
            "tokens": [[list(sample.token_ids) for sample in output.outputs] for output in outputs],
            "finish": [output.outputs[0].finish_reason for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }
        if sampling.logprobs:
            result["margins"] = [_margins(output.outputs[0].logprobs) for output in outputs]
        if sampling.prompt_logprobs is not None:
            result["prompt_logprobs"] = [_logprobs(output.prompt_logprobs) for output in outputs]
        return result

    def pool(self, prompts: list, task: str, **params) -> dict:
        """What a pooling model makes of each prompt; all prompts at once."""
        from vllm import PoolingParams

        requests = [{"prompt_token_ids": tokens} for tokens in prompts]
        outputs = self.llm.encode(requests, PoolingParams(**params), pooling_task=task, use_tqdm=False)
        return {
            "data": [output.outputs.data.tolist() for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def add(self, names: list[str], prompts: list, max_tokens: int = 16, lora: list | None = None, **params) -> None:
        """Hand requests to the engine without letting it work. ``lora``: as ``generate`` has it."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)
        for name, tokens, adapter in zip(names, prompts, lora or [None] * len(names), strict=True):
            request = LoRARequest(*adapter) if adapter else None
            self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling, lora_request=request)

    def add_lora(self, adapter: list, in_place: bool = False) -> bool:
        """Load an adapter ([name, number, path]) before any request needs it, or once more."""
        from vllm.lora.request import LoRARequest

        return self.engine.add_lora(LoRARequest(*adapter, load_inplace=in_place))

    def replace(self, folder: str, source: str) -> None:
        """Put the files of another folder in place of this one's. New files: vLLM may have mapped the old ones."""
        for file in os.listdir(source):
            target = os.path.join(folder, file)
            shutil.copy(os.path.join(source, file), f"{target}.new")
            os.replace(f"{target}.new", target)

    def step(self, times: int = 1) -> dict:
        """Single engine steps; returns the tokens of what has finished."""
        tokens: dict[str, list[int]] = {}
        for _ in range(times):
            for output in self.engine.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        return tokens

    def finish(self, seconds: float = 60) -> dict:
        """Steps until every request is done."""
        tokens: dict[str, list[int]] = {}
        deadline = time.monotonic() + seconds
        while self.engine.has_unfinished_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"requests left after {seconds} s: {list(self.scheduler.requests)}")
            tokens.update(self.step())
        return tokens

    def finish_timed(self, seconds: float = 60) -> dict:
        """As ``finish``, with the seconds that the slowest step took and those until each request was done."""
        tokens: dict[str, list[int]] = {}
        ends: dict[str, float] = {}
        slowest = 0.0
        began = now = time.monotonic()
        while self.engine.has_unfinished_requests():
            if now - began > seconds:
                raise TimeoutError(f"requests left after {seconds} s: {list(self.scheduler.requests)}")
            fresh = self.step()
            before, now = now, time.monotonic()
            slowest = max(slowest, now - before)
            tokens.update(fresh)
            ends.update(dict.fromkeys(fresh, now - began))
        return {"tokens": tokens, "slowest": slowest, "ends": ends}

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, path: str, seconds: float = 120) -> None:
        """Another engine has come so far (:meth:`tell`)."""
        deadline = time.monotonic() + seconds
        while not os.path.exists(path):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {path} after {seconds} s")
            time.sleep(0.01)

    def tell(self, path: str) -> None:
        Path(path).touch()

    def sources(self) -> list:
        """Of tiers that read from several places: [source, path, blocks, bytes, refusals] of each."""
        catalogs = self.adapter.leader.manager.catalogs.values()
        states = [state for catalog in catalogs for state in catalog.sources()]
        return [[each.source, each.path, each.blocks, each.bytes, each.refused] for each in states]

    def kill(self) -> None:
        """The end of this process as kill -9 makes it: nobody tidies up, and no result is written."""
        os.kill(os.getpid(), signal.SIGKILL)

    def fill_up(self, folder: str) -> int:
        """Take what is left of a filesystem; returns the bytes."""
        with open(os.path.join(folder, "ballast"), "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return file.tell()

    def abort(self, names: list[str]) -> None:
        self.engine.abort_request(names)

    def drain(self, seconds: float = 120) -> int:
        """Steps as vLLM's own loop does when it has no requests: as long as the connector says there is work."""
        deadline = time.monotonic() + seconds
        steps = 0
        while self.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still busy after {seconds} s")
            self.engine.step()
            steps += 1
        return steps

    def drain_moves(self, seconds: float = 120) -> None:
        """Drains until no rank owes an answer to a move: vLLM stops stepping for a disk that says nothing for two
        seconds, and goes on when it is woken up."""
        from kvbm.engines.vllm.idle import ASLEEP_SECONDS

        deadline = time.monotonic() + seconds
        self.drain(seconds)
        while any(edge.pending_blocks for edge in self.adapter.leader.edges):
            if time.monotonic() > deadline:
                raise TimeoutError(f"moves are under way after {seconds} s")
            time.sleep(1.1 * ASLEEP_SECONDS)
            self.drain(seconds)

    def step_until_fetched(self, blocks: int, pause: float = 0.05) -> None:
        """Steps until so many blocks have been fetched ahead of their requests, for as long as any request runs."""
        fetched = self.adapter.leader.counts.fetched_blocks
        while sum(fetched.values()) < blocks:
            if not self.scheduler.running and not self.scheduler.waiting:
                raise TimeoutError(f"{fetched} were fetched")
            self.step()
            time.sleep(pause)

    def drain_stores(self, seconds: float = 60) -> None:
        """Steps until no store is under way, while requests run."""
        deadline = time.monotonic() + seconds
        while self.adapter.leader.unconfirmed_store_blocks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"stores are under way after {seconds} s")
            self.step()

    def drain_loads(self, seconds: float = 60) -> None:
        """One step, and more until no load is under way."""
        deadline = time.monotonic() + seconds
        self.step()
        while self.adapter.leader.loads:
            if time.monotonic() > deadline:
                raise TimeoutError(f"loads are under way after {seconds} s")
            self.step()

    def wait_for_index(self, seconds: float = 60) -> None:
        """The index thread of each persistent tier has written what it was given, of itself."""
        from kvbm.tiers.disk import index

        for each in list(index._open):
            with each._changed:
                if not each._changed.wait_for(lambda each=each: each._written >= each._given, seconds):
                    raise TimeoutError(f"the index in {each.directory} is not written after {seconds} s")

    def reset(self, connector: bool = False, running: bool = False) -> bool:
        """vLLM's prefix cache and, if asked to, KVBM's."""
        return self.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)

    def empty(self, seconds: float = 30) -> bool:
        """Resets vLLM's prefix cache as soon as that is possible: when no request and no load holds a block."""
        deadline = time.monotonic() + seconds
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def race(self, rounds: list, max_tokens: int = 16) -> list[bool]:
        """Hands prompts to an engine in another process, and takes them back a little later: [[seconds, prompts], ...].

        Returns for each round whether the engine could be emptied before it.
        """
        emptied = []
        for i, (seconds, prompts) in enumerate(rounds):
            emptied.append(self.empty())
            names = [f"race-{i}-{j}" for j in range(len(prompts))]
            self.add(names, prompts, max_tokens)
            time.sleep(seconds)
            self.abort(names)
        return emptied

    def pause(self, state: str) -> None:
        """vLLM's own pause: UNPAUSED, PAUSED_NEW or PAUSED_ALL."""
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler.set_pause_state(PauseState[state])

    # -- what to look at ----------------------------------------------------------------------------------------------

    def metrics(self) -> dict:
        """Counters and gauges of vLLM and KVBM in this process, summed over their labels.

        Those of transfers also by their way, as "name source target".
        """
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            if family.name.startswith(("vllm:", "kvbm_")) and family.type in ("counter", "gauge"):
                for sample in family.samples:
                    if not sample.name.endswith("_created"):
                        names = [family.name]
                        if "source" in sample.labels and "target" in sample.labels:
                            names.append(f"{family.name} {sample.labels['source']} {sample.labels['target']}")
                        for name in names:
                            found[name] = found.get(name, 0) + sample.value
        return found

    def look(self, path: str) -> str:
        """What KVBM's own port answers."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.adapter.observer.server.url + path, timeout=60) as response:
            return response.read().decode()

    def state(self) -> dict:
        """What the leader holds. Needs the scheduler in this process."""
        from kvbm.tiers import disk

        adapter = self.adapter
        if adapter is None or adapter.leader is None:
            return {"bypassed": True}
        leader = adapter.leader
        pool = leader.manager.near
        return {
            "bypassed": False,
            "size": pool.size,
            "free": pool.free,
            "published": pool.published,
            "pinned": pool.pinned,
            "writing": pool.writing,
            "evictions": pool.evictions,
            "busy": leader.busy,
            "requests": len(adapter._requests),
            "chains": len(adapter._keys._chains),
            "engine_requests": len(self.scheduler.requests),
            "engine_blocks_free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "faults": dict(self.scheduler.connector._faults.counts),
            "failed_load_blocks": leader.counts.failed_load_blocks,
            "failed_store_blocks": leader.counts.failed_store_blocks,
            "tainted_store_blocks": leader.counts.tainted_store_blocks,
            "onboarded": sum(leader.counts.onboarded_blocks.values()),
            "onboarded_from": dict(leader.counts.onboarded_blocks),
            "offloaded": leader.counts.offloaded_blocks,
            "fetched": sum(leader.counts.fetched_blocks.values()),
            "from_disk": leader.counts.onboarded_blocks.get(disk.TIER.name, 0),
            "missed_load_blocks": leader.counts.missed_load_blocks,
            "spilled": sum(leader.counts.moved_blocks.values()),
            "failed_spill_blocks": sum(leader.counts.failed_move_blocks.values()),
            "disk_size": getattr(leader.manager.catalogs.get(disk.TIER.name), "size", 0),
            "engine_hashes": adapter._keys.reuses_engine_hashes,
        }

    def held(self, prompts: list, salts: list | None = None) -> list[list[bool]]:
        """Which blocks of each prompt KVBM would find."""
        pool = self.adapter.leader.manager.near
        found = []
        for i, tokens in enumerate(prompts):
            request = self._request(f"held-{i}", tokens, salts[i] if salts else None)
            found.append([key in pool for key in self.adapter._keys.of(request)])
            self.adapter._keys.forget(request.request_id)
        return found

    def events(self) -> list:
        """Every KV cache event published so far, in batches, as vLLM's publisher replays them."""
        import msgspec
        import zmq

        publisher = self.scheduler.kv_event_publisher
        deadline = time.monotonic() + 60
        while not publisher._event_queue.empty() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(publisher._replay_endpoint)
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while socket.poll(60_000):
                *_, number, payload = socket.recv_multipart()
                if number == publisher.END_SEQ:
                    return found
                found.append(msgspec.msgpack.decode(payload)[1])
        raise TimeoutError("no replay of events")

    def names(self) -> list[int]:
        """What vLLM's events call the blocks that host memory holds."""
        from kvbm.engines.vllm.feed import _external

        return _external(list(self.adapter.leader.manager.near.findable))

    def command(self, command: dict) -> dict:
        """Send the leader a command, as `kvbm control` does."""
        from kvbm.control.socket import ask

        return ask(self.adapter._services._presence.control.address, command)

    def fed(self) -> bool:
        return self.adapter._services._feed is not None

    def _request(self, name: str, tokens: list[int], salt: str | None = None):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.core.request_block_hasher,
        )

    def weights(self, look: str, **arguments) -> object:
        """What a function of weighed.py finds."""
        import weighed

        return getattr(weighed, look)(self.engine.vllm_config, **arguments)

    def load_weights(self, checkpoint: str, directly: bool = False) -> None:
        """New weights for the running engine, on every rank, as a trainer brings them: through the model's own method,
        or ``directly`` into its parameters."""
        if directly:
            self.llm.apply_model(functools.partial(_write_parameters, checkpoint=checkpoint))
        else:
            self.llm.collective_rpc(_load_weights, args=(checkpoint,))

    def call(self, target: str, **arguments) -> object:
        """Call ``module:function`` of a folder under tests/ in the engine's process."""
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)(self, **arguments)

    # -- breaking things ----------------------------------------------------------------------------------------------

    def break_(self, target: str, times: int | None = None) -> None:
        """Let the ``target``, module:Class.method, raise, always or the first ``times`` times it is called."""
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        owner = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        real = original.fget if isinstance(original, property) else original
        left = [times]

        def broken(*args, **kwargs):
            if left[0] is None or left[0] > 0:
                if left[0] is not None:
                    left[0] -= 1
                raise RuntimeError(f"{path} was broken on purpose")
            return real(*args, **kwargs)

        self._mends.append((owner, name, original))
        setattr(owner, name, property(broken) if isinstance(original, property) else broken)

    def faults(self, rules: str) -> None:
        """What KVBM_INJECT_FAULTS does, from now on; no rules end it. No store may be under way at the end."""
        from kvbm.engines.vllm.worker import find_local
        from kvbm.testing.copier_faults import FaultyCopier
        from kvbm.testing.fault_rules import parse

        worker = find_local(self.engine.vllm_config.kv_transfer_config.engine_id, 0)._worker
        copier = worker._copier
        if isinstance(copier, FaultyCopier):
            copier = copier._inner
        if rules:
            copier = FaultyCopier(copier, parse(rules), 0)
        worker._copier = worker._submission._copier = copier  # it hands loads over

    def hold_stores(self) -> None:
        """No store that ``slow-store`` delays begins of itself until ``mend``, however long this machine takes."""
        from kvbm.testing.copier_faults import _Late

        self._mends.append((_Late, "done", _Late.done))
        _Late.done = lambda ticket: False

    def hang_disk(self) -> None:
        """Every call to the disk waits until ``mend``."""
        from kvbm.tiers.disk.file import FileIO

        gate = threading.Event()
        for name in ("read", "write"):
            real = getattr(FileIO, name)

            def wait(*args, real=real):
                gate.wait()
                return real(*args)

            self._mends.append((FileIO, name, real))
            setattr(FileIO, name, wait)
        self._gates.append(gate)

    def onboard(self, mode: str) -> None:
        """What KVBM_ONBOARD does, from now on."""
        self.adapter._cost._mode = mode

    def layers(self) -> int:
        """How often an attention layer has asked for its blocks since this was asked last; 0 at first."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        if not hasattr(self, "_asked"):
            self._asked = 0
            real = connector.wait_for_layer_load

            def wait_for_layer_load(layer_name: str) -> None:
                self._asked += 1
                real(layer_name)

            connector.wait_for_layer_load = wait_for_layer_load
        asked, self._asked = self._asked, 0
        return asked

    def graphs(self) -> str:
        """Which CUDA graphs the engine has."""
        return str(getattr(self.core.vllm_config.compilation_config.cudagraph_mode, "name", None))

    def mend(self) -> None:
        while self._mends:
            owner, name, original = self._mends.pop()
            setattr(owner, name, original)
        while self._gates:
            self._gates.pop().set()

    def close(self) -> None:
        # vLLM's end unfreezes the heap and collects it four times: two seconds for a process that is about to end.
        gc.unfreeze = gc.freeze
        self.engine.engine_core.shutdown()


def _margins(logprobs) -> list[float]:
    """By how much each token was preferred to the next best one."""
    ordered = (sorted((entry.logprob for entry in position.values()), reverse=True) for position in logprobs)
    return [round(best - second, 3) for best, second, *_ in ordered]


def _logprobs(prompt_logprobs) -> list[float | None]:
    first = (None if position is None else next(iter(position.values())) for position in prompt_logprobs or ())
    return [None if entry is None else round(entry.logprob, 3) for entry in first]


def _load_weights(worker, checkpoint: str) -> None:
    model = worker.model_runner.model
    model.load_weights(_new_weights(model, checkpoint).items())


def _write_parameters(model, checkpoint: str) -> None:
    known = dict(model.named_parameters())
    for name, tensor in _new_weights(model, checkpoint).items():
        known[name].data.copy_(tensor)


def _new_weights(model, checkpoint: str) -> dict:
    from safetensors.torch import load_file

    # On a CPU vLLM has packed the linear layers away, and could not put new numbers in: the others have to do.
    known = dict(model.named_parameters())
    return {name: tensor for name, tensor in load_file(checkpoint).items() if name in known and known[name].numel()}


def swap_after_loading(folder: str, other: str) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_and_swap(self, *args, **kwargs):
        load(self, *args, **kwargs)
        os.rename(folder, f"{folder} before")
        os.rename(other, folder)

    CPUModelRunner.load_model = load_and_swap


def run(scenario: dict) -> dict:
    collector = Collector()
    logger = logging.getLogger("kvbm")
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    result: dict = {"steps": [], "log": collector.lines, "refused": None}
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # tests/
    for where, value in scenario.get("patch", {}).items():
        module, _, name = where.partition(":")
        if isinstance(value, dict):
            value = (lambda answer: lambda *args, **kwargs: answer)(value["returns"])
        setattr(importlib.import_module(module), name, value)
    if not ON_CUDA and not scenario.get("spawn"):
        import warm_start

        warm_start.ease_processes()
    if scenario.get("swap"):
        swap_after_loading(*scenario["swap"])
    try:
        running = Scenario(scenario["engine"], scenario.get("kvbm"))
    except Exception as error:
        traceback.print_exc()
        result["refused"] = f"{type(error).__name__}: {error}"
        return result
    try:
        for step in scenario["steps"]:
            arguments = dict(step)
            name = arguments.pop("do")
            print(f"---- {name} {str(arguments)[:200]}", flush=True)
            result["steps"].append(getattr(running, f"{name}_" if name == "break" else name)(**arguments))
    finally:
        running.close()
    return result


def child(scenario: dict) -> None:
    os.setsid()
    log = os.open(scenario["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(scenario.get("env", {}))
    status = 1
    try:
        result = run(scenario)
        with open(scenario["result"], "w") as file:
            json.dump(result, file)
        status = 0
    except BaseException:
        traceback.print_exc()
    # The end of an ordinary interpreter, without the seconds it spends on taking a forked one apart.
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    # Answers go where stdout went; what libraries print on import goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    os.environ.update({name: os.environ.get(name, value) for name, value in DEFAULTS.items()})
    if not ON_CUDA:  # importing vLLM calls CUDA, and no process that is forked after that can use it
        import warm_start

        warm_start.prepare()
    say({"ready": None if ON_CUDA else sys.modules["vllm"].__version__})
    for line in sys.stdin:
        sys.stdout.flush()
        sys.stderr.flush()
        if ON_CUDA:
            order = json.loads(line)["log"] + ".order"
            with open(order, "w") as file:
                file.write(line)
            pid = os.posix_spawn(sys.executable, [sys.executable, __file__, order], os.environ)
        else:
            pid = os.fork()
            if pid == 0:
                child(json.loads(line))
        say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        say({"status": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with open(sys.argv[1]) as order:
            child(json.load(order))
    main()
