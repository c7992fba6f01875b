"""Whether KVBM helps a running engine and, if not, why."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm.doctor.base import Examination
from kvbm.observe.findings import bad, note
from kvbm.observe.format import printable
from kvbm.observe.remote import NotReachableError
from kvbm.observe.snapshot import Finding


class Running:
    name = "running"

    def run(self, case: Examination) -> Iterator[Finding]:
        engine = case.engine
        if isinstance(engine, NotReachableError):
            if case.asked:
                yield bad("engine-not-reachable", f"{engine}", "Start the engine with metrics, or correct --url.")
            elif case.starting:
                for server in case.starting:
                    yield note(
                        "engine-starting",
                        f"`vllm serve {printable(server.model)}` with KVBM is starting (process {server.pid}, for "
                        f"{server.seconds:.0f} s): it does not answer at {case.url} yet.",
                        "Ask again when it serves requests. If it does already, name its metrics port with --url, or "
                        "start it with DYN_KVBM_METRICS=1.",
                    )
            else:
                yield note("no-engine-running", f"No engine with metrics runs here ({case.url}).")
            return
        yield from engine.findings
