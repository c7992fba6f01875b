"""Commands through Dynamo: an endpoint of its distributed runtime that passes them to a leader on the same machine.

    python -m kvbm.control.dynamo --control ADDRESS

It runs in its own process: Dynamo's runtime may end its process when it loses etcd, and the engine must survive that.
Dynamo registers the endpoint as ``<namespace>.kvbm.control`` with a lease; :class:`BlockManagerClient` is the client.
The endpoint does not authenticate: every client of Dynamo's request plane can send commands (KVBM_CONTROL_DYNAMO).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvbm.control.socket import CommandError, ask
from kvbm.tiers import registry

logger = logging.getLogger("kvbm")

COMPONENT = "kvbm"
ENDPOINT = "control"
RESTART_SECONDS = 10.0


class BlockManagerClient:
    """Commands for one leader, or for any of them; ``runtime`` is a ``dynamo.runtime.DistributedRuntime``.

    Tiers are named as upstream does (G1, G2, G3) or in words (host, disk). Raises CommandError for a refused command.
    """

    def __init__(self, runtime: Any, instance_id: int | None = None, namespace: str = "dynamo") -> None:
        self._endpoint = runtime.endpoint(f"{namespace}.{COMPONENT}.{ENDPOINT}")
        self._instance_id = instance_id
        self._client: Any = None

    async def instances(self) -> list[int]:
        client = await self._connect()
        return sorted(client.instance_ids())

    async def status(self, level: str) -> dict[str, int]:
        pools = (await self._ask({"do": "status"}))["pools"]
        tier = registry.resolve(level)
        if tier not in pools:
            raise CommandError(f"level={level!r}: expected one of {', '.join(pools)}")
        return dict(pools[tier])

    async def reset_pool(self, level: str) -> int:
        return int((await self._ask({"do": "reset", "tier": level}))["reset_blocks"])

    async def reset_blocks(self, level: str, hashes: Sequence[int]) -> dict[str, list[int]]:
        return await self._ask({"do": "reset", "tier": level, "blocks": list(hashes)})

    async def reset_all_pools(self) -> int:
        return int((await self._ask({"do": "reset"}))["reset_blocks"])

    async def _connect(self) -> Any:
        if self._client is None:
            self._client = await self._endpoint.client()
            await self._client.wait_for_instances()
        return self._client

    async def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        client = await self._connect()
        if self._instance_id is None:
            stream = await client.round_robin(command)
        else:
            stream = await client.direct(command, self._instance_id)
        async for part in stream:
            answer = part.data() if callable(getattr(part, "data", None)) else part
            if not answer.pop("ok"):
                raise CommandError(answer["error"])
            return dict(answer)
        raise ConnectionError("the leader's endpoint does not answer")


async def serve(control: str, namespace: str, parent: int | None) -> None:
    """Serve until the runtime or the parent process ends."""
    from dynamo.runtime import DistributedRuntime

    loop = asyncio.get_running_loop()
    backend = os.environ.get("DYN_DISCOVERY_BACKEND", "etcd")
    runtime = DistributedRuntime(loop, backend, os.environ.get("DYN_REQUEST_PLANE", "tcp"))

    async def carry_out(command: dict[str, Any], context: Any = None) -> AsyncIterator[dict[str, Any]]:
        try:
            yield {"ok": True, **await loop.run_in_executor(None, ask, control, command)}
        except (OSError, CommandError) as error:
            yield {"ok": False, "error": str(error)}

    async def watch() -> None:
        while parent is None or os.getppid() == parent:
            await asyncio.sleep(1)
        runtime.shutdown()

    watching = asyncio.create_task(watch())
    try:
        await runtime.endpoint(f"{namespace}.{COMPONENT}.{ENDPOINT}").serve_endpoint(carry_out, graceful_shutdown=False)
    finally:
        watching.cancel()


class DynamoEndpoint:
    """Starts that process beside the engine, and starts it again when it ends."""

    def __init__(self, control: str, namespace: str) -> None:
        self._command = [sys.executable, "-m", "kvbm.control.dynamo", "--control", control, "--namespace", namespace]
        self._command += ["--parent", str(os.getpid())]
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="kvbm-dynamo", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        # The port belongs to the worker's own status server; a second process on it would exit at once.
        environment = {name: value for name, value in os.environ.items() if name != "DYN_SYSTEM_PORT"}
        said = False
        while not self._over.is_set():
            try:
                self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=environment)
                status: object = self._process.wait()
            except OSError as error:
                status = error
            if not self._over.is_set() and not said:
                logger.warning("Control through Dynamo is unavailable (%s); KVBM starts its process again", status)
                said = True
            self._over.wait(RESTART_SECONDS)

    def close(self) -> None:
        self._over.set()
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.terminate()
        self._thread.join(timeout=5)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


def is_installed() -> bool:
    try:
        return importlib.util.find_spec("dynamo.runtime") is not None
    except ModuleNotFoundError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--control", required=True, metavar="ADDRESS", help="the leader's control socket")
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process")
    options = parser.parse_args(arguments)
    asyncio.run(serve(options.control, options.namespace, options.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
