"""Checks of the object store tier: reachability, credentials, clock, latency, rate, the rule for its size."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm.doctor.base import Examination, installed_version
from kvbm.observe.findings import bad, good, note
from kvbm.observe.format import size
from kvbm.observe.snapshot import Finding

_SLOW = 0.1e9  # bytes a second: recomputing is often faster


class ObjectStore:
    name = "objects"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None or not config.object_enabled:
            return
        if not config.has_host_tier:
            yield bad(
                "objects-without-host",
                "DYN_KVBM_OBJECT_ENABLED is on, but there is no host tier: blocks pass through host memory.",
                "Set DYN_KVBM_CPU_CACHE_GB.",
            )
        for package in ("obstore", *(["cryptography"] if config.object_encryption_secret else [])):
            if not installed_version(package):
                text = f"The object store tier needs the package {package}, which is not installed."
                yield bad("objects-package", text, "pip install 'kvbm[objects]'")
                return
        from kvbm.tiers.objects import doctor
        from kvbm.tiers.objects.capacity import statement
        from kvbm.tiers.objects.client import ObjectStoreError
        from kvbm.tiers.objects.settings import settings_for

        try:
            settings = settings_for(config, 0)
        except ValueError as error:
            yield bad("objects-settings", f"{error}.", "The engine runs without an object store tier until then.")
            return
        for name, check in (
            ("objects-reachable", doctor.check_reachable),
            ("objects-clock", doctor.check_clock),
            ("objects-credentials", doctor.check_credentials),
        ):
            found = check(settings)
            yield good(name, found.text) if found.good else bad(name, found.text, found.cure)
            if not found.good and name != "objects-clock":
                return
        yield note("objects-capacity", f"Size: {statement(config.object_num_blocks)}.")
        if not settings.encryption_secret:
            yield note(
                "objects-plain",
                "Objects are not encrypted: a reader of the bucket can read KV and confirm guesses of prompts.",
                "Set KVBM_OBJECT_ENCRYPTION_SECRET to the same secret for every engine, unless the bucket is private.",
            )
        if case.quick:
            return
        try:
            latency, speed = doctor.measure_latency(settings), doctor.measure_speed(settings)
        except ObjectStoreError as error:
            yield bad("objects-speed", f"The store cannot be measured: {error}.", "Run the command again.")
            return
        text = f"Latency {latency * 1e3:.1f} ms, reads {size(speed.read)}/s, writes {size(speed.write)}/s."
        cure = "Use a store in the same network: KVBM loads a block only where that beats recomputing it."
        is_slow = latency > doctor.SLOW_LATENCY_SECONDS or speed.read < _SLOW
        yield note("objects-speed", text, cure) if is_slow else good("objects-speed", text)
