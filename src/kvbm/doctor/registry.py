"""Whether this engine can be entered in Dynamo's service discovery."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm.control import discovery
from kvbm.doctor.base import Examination
from kvbm.observe.findings import bad, good
from kvbm.observe.format import printable
from kvbm.observe.snapshot import Finding


class Registry:
    name = "registry"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None or not config.runtime_enabled:
            return
        if discovery.registry(config) is None:
            yield bad(
                "registry-unknown",
                f"DYN_DISCOVERY_BACKEND={config.discovery_backend}: KVBM cannot enter its engines there.",
                "Set it to etcd or file. Without it, `kvbm control list` finds the engines of this machine only.",
            )
            return
        try:
            cards = discovery.find(config)
        except OSError as error:
            named = f" (ETCD_ENDPOINTS={config.etcd_endpoints})" if config.discovery_backend == "etcd" else ""
            yield bad(
                "registry-unreachable",
                f"Dynamo's registry{named} does not answer: {printable(error, 500)}. Other machines do not find this "
                "engine.",
                "Start etcd, correct ETCD_ENDPOINTS, or unset DYN_RUNTIME_ENABLED_KVBM.",
            )
            return
        yield good("registry", f"Dynamo's registry ({config.discovery_backend}) answers and has {len(cards)} entries.")
