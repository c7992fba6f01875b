"""Starts the ranks, watches them, and collects what they have to say."""

from __future__ import annotations

import faulthandler
import importlib
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import random
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

from trtllm_sim import api
from trtllm_sim.comm import Comm
from trtllm_sim.connector import KvCacheConnectorManager
from trtllm_sim.executor import Executor, Options
from trtllm_sim.workload import Work, Workload

KVBM = {
    "connector_module": "kvbm.trtllm_integration.connector",
    "connector_scheduler_class": "DynamoKVBMConnectorLeader",
    "connector_worker_class": "DynamoKVBMConnectorWorker",
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "trtllm_sim.executor"])


class SimulationError(RuntimeError):
    """A rank has failed, or nothing has moved for too long."""


def run(options: Options, work: Work, timeout: float = 300.0) -> dict[str, Any]:
    """Serve a workload. Returns what rank 0 reports: answers, counts, and what is left of everything."""
    options.env = {**_ports(), **options.env}
    pairs = {rank: _context.Pipe() for rank in range(1, options.ranks)}
    mine, theirs = _context.Pipe(duplex=False)
    ranks = []
    for rank in range(options.ranks):
        pipes = {r: pair[0] for r, pair in pairs.items()} if rank == 0 else {0: pairs[rank][1]}
        process = _context.Process(target=_rank, args=(rank, options, work, pipes, theirs, timeout), daemon=True)
        process.start()
        ranks.append(process)
    theirs.close()
    for first, second in pairs.values():
        first.close()
        second.close()
    try:
        return _collect(mine, ranks, timeout)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def end_fork_server() -> None:
    """The ranks are forked from a server that has torch loaded. It ends when told to, and its folder goes with it."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    multiprocessing.util._run_finalizers(-100)  # type: ignore[attr-defined]


def _collect(results: Connection, ranks: list[Any], timeout: float) -> dict[str, Any]:
    ready = wait([results], timeout + 10)
    if not ready:
        raise SimulationError(f"no result after {timeout:.0f} s")
    try:
        rank, outcome = results.recv()
    except EOFError:
        raise SimulationError(f"the ranks ended without a word: {[process.exitcode for process in ranks]}") from None
    if isinstance(outcome, str):
        raise SimulationError(f"rank {rank} failed:\n{outcome}")
    return outcome  # type: ignore[no-any-return]


def _rank(
    rank: int, options: Options, work: Work, pipes: dict[int, Connection], results: Connection, timeout: float
) -> None:
    # The watchdog: a rank that hangs says where, and ends.
    faulthandler.dump_traceback_later(timeout, exit=True)
    os.environ.update(options.env)
    try:
        outcome = _serve(rank, options, work, Comm(rank, options.ranks, pipes))
        if rank == 0:
            results.send((rank, outcome))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        if rank == 0:
            results.send((rank, traceback.format_exc()))
    except BaseException:
        results.send((rank, traceback.format_exc()))
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # as an engine that is shut down: nobody calls the connector first


def _serve(rank: int, options: Options, work: Work, comm: Comm) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    if not options.device.startswith("cuda"):
        return _loop(rank, options, work, comm)
    torch.cuda.set_device(options.device)
    # Not the default stream, with which others may be in order by accident.
    with torch.cuda.stream(torch.cuda.Stream()):
        return _loop(rank, options, work, comm)


def _loop(rank: int, options: Options, work: Work, comm: Comm) -> dict[str, Any]:
    began = time.monotonic()
    executor = Executor(options, comm)
    worker, scheduler = _build_connector(executor, rank)
    executor.warm_up()
    if worker is not None:
        _register(executor, worker, scheduler)
    comm.allgather("ready")
    started = time.monotonic()
    workload = Workload(work, options.max_length)
    ended: dict[int, list[int]] = {}
    while True:
        order = None
        if rank == 0:
            prompts, cancels = workload.next(executor.iteration, ended)
            order = prompts, cancels, workload.done and not _busy(executor, scheduler)
        prompts, cancels, stop = comm.broadcast(order)
        if stop:
            break
        ended = {number: executor.outputs[number] for number in executor.step(prompts, cancels)}
        for dead in comm.lost:
            _end_silence(scheduler, dead)
    return {
        "outputs": executor.outputs,
        "cancelled": workload.cancelled,
        "prompts": workload.prompts,
        "iterations": executor.iteration,
        "replays": executor.replays,
        "seconds": time.monotonic() - started,
        "start_seconds": started - began,
        "reused_tokens": executor.blocks.reused,
        "free_blocks": executor.blocks.free,
        "blocks": options.blocks,
        "lost_ranks": sorted(comm.lost),
        "loaded_requests": sorted(executor.manager.onboarded) if executor.manager is not None else [],
        "kvbm": _state(scheduler),
    }


def _build_connector(executor: Executor, rank: int) -> tuple[Any, Any]:
    options = executor.options
    if options.connector is None:
        return None, None
    api.install(options.generation, lambda value: list(executor.comm.allgather(value).values()))
    module = importlib.import_module(options.connector["connector_module"])
    _adjust(options)
    args = llm_args(options, rank)
    # As the engine does: both at once, so that one may wait for the other.
    with ThreadPoolExecutor(2) as pool:
        worker = pool.submit(getattr(module, options.connector["connector_worker_class"]), args)
        scheduler = None
        if rank == 0:
            scheduler = pool.submit(getattr(module, options.connector["connector_scheduler_class"]), args).result()
        return worker.result(), scheduler


def _adjust(options: Options) -> None:
    """Times that no setting sets, so that a test need not wait for them; and what a test takes away."""
    from kvbm.engines.trtllm.worker import WorkerAdapter
    from kvbm.testing import copier_faults as faults

    if options.load_delay is not None:
        faults.LOAD_DELAY_SECONDS = options.load_delay
    if options.store_delay is not None:
        faults.STORE_DELAY_SECONDS = options.store_delay
    if not options.fences:
        begin = WorkerAdapter._begin
        WorkerAdapter._begin = lambda adapter, fences, stream: begin(adapter, [], stream)  # type: ignore[method-assign]


def llm_args(options: Options, rank: int) -> Any:
    """What the engine hands to connectors, as far as they read it."""
    mapping = SimpleNamespace(rank=rank, world_size=options.ranks, tp_size=options.ranks, pp_size=1, cp_size=1)
    return SimpleNamespace(
        model="simulated",
        kv_cache_config=SimpleNamespace(
            tokens_per_block=options.block_size, enable_partial_reuse=options.partial_reuse, dtype="auto"
        ),
        parallel_config=SimpleNamespace(to_mapping=lambda: mapping),
        max_beam_width=1,
        enable_attention_dp=False,
    )


def _register(executor: Executor, worker: Any, scheduler: Any) -> None:
    executor.forward_pass_callable = worker.register_forward_pass_callable()
    pool = executor.model.pool
    if executor.options.layout:
        region = SimpleNamespace(num_slots=pool.shape[0], as_tensor=lambda: pool.view(pool.shape[0], -1))
        group = SimpleNamespace(layer_group_id=0, window_size=None, regions=(region,), replicated_regions=())
        worker.register_kv_cache_layout(SimpleNamespace(tokens_per_block=executor.options.block_size, groups=(group,)))
    else:
        worker.register_kv_caches(pool)
    if scheduler is not None and executor.options.generation == "1.3":
        scheduler.wait_for_initialization()
    elif scheduler is not None:
        # Nothing waits in the older engine; here the first requests are to be served like all others.
        scheduler._adapter.wait()
    executor.manager = KvCacheConnectorManager(executor.comm, worker, scheduler, executor.options.generation)


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Requests that were answered otherwise. Of a cancelled one, as far as both got."""
    different = []
    for number, answer in expected["outputs"].items():
        other = found["outputs"].get(number)
        length = min(len(answer), len(other or ())) if number in expected["cancelled"] else None
        if other is None or answer[:length] != other[:length]:
            different.append(f"request {number}: {answer[:length]} became {other}")
    return different


def _end_silence(scheduler: Any, rank: int) -> None:
    """As if the leader had last heard of a dead rank longer ago than it waits for a live one."""
    channel = scheduler._adapter._channel
    with channel._lock:
        channel._by_rank[rank].seen = -math.inf


# -- looking into KVBM ------------------------------------------------------------------------------------------------


def _busy(executor: Executor, scheduler: Any) -> bool:
    if executor.busy:
        return True
    adapter = getattr(scheduler, "_adapter", None)
    return adapter is not None and adapter.leader is not None and adapter.leader.busy


def _state(scheduler: Any) -> dict[str, Any] | None:
    adapter = getattr(scheduler, "_adapter", None)
    if adapter is None or adapter.leader is None:
        return None
    pools = adapter.leader.manager.catalogs
    return {
        "counts": adapter.session.counts,
        "faults": dict(scheduler._faults.counts),
        "requests": len(adapter._requests),
        "offers": sum(state.match is not None for state in adapter._requests.values()),
        "set_backs": len(adapter._set_backs),
        "pinned": sum(pool.pinned for pool in pools.values()),
        "writing": sum(pool.writing for pool in pools.values()),
        "published": {tier: len(pool.findable) for tier, pool in pools.items()},
        "lost": sorted(adapter._lost),
    }


def _ports() -> dict[str, str]:
    """A pair of free ports, and the port of events 1000 above the first. From 32768 on, any connection may take one."""
    while True:
        port = random.SystemRandom().randrange(20_000, 31_000)
        try:
            for number in (port, port + 1):
                with closing(socket.socket()) as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        return {"DYN_KVBM_LEADER_ZMQ_PUB_PORT": str(port), "DYN_KVBM_LEADER_ZMQ_ACK_PORT": str(port + 1)}
