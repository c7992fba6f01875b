"""What the scripts in this folder have in common: a result file, the machine it was taken on, and simple statistics.

A result is one JSON object: ``benchmark``, ``taken`` (UTC), ``command``, ``machine``, ``settings`` and ``rows``. Rows
hold every single measurement; medians are made from them by whoever reads them (report.py). A file is written anew
after every row that cost seconds to get, so that a run that is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "src"
NO_DEVICE = 3  # exit status

Row = dict[str, Any]


class Record:
    """Rows of one run, and the file they go to."""

    def __init__(self, benchmark: str, settings: Mapping[str, Any], path: Path | None) -> None:
        self.benchmark = benchmark
        self.settings = dict(settings)
        self.rows: list[Row] = []
        self._path = path
        self._taken = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._machine = machine()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_name(self._path.name + ".part")
            unfinished.write_text(json.dumps(self.as_json()) + "\n")
            unfinished.replace(self._path)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "taken": self._taken,
            "command": [Path(word).name if Path(word).is_absolute() else word for word in sys.argv],
            "machine": self._machine,
            "settings": self.settings,
            "rows": self.rows,
        }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to this file")
    return parser


def why_no_device() -> str | None:
    """A sentence that says why nothing can be measured here; None when there is a CUDA device."""
    try:
        import torch
    except ImportError as error:
        return f"There is nothing to measure with: torch cannot be imported ({error})."
    if not torch.cuda.is_available():
        return f"There is nothing to measure: torch {torch.__version__} sees no CUDA device on this machine."
    return None


def leave_without_device() -> None:
    """Ends the program with a sentence and status 3 where there is no CUDA device."""
    reason = why_no_device()
    if reason is not None:
        print(reason, file=sys.stderr)
        raise SystemExit(NO_DEVICE)


def machine() -> dict[str, Any]:
    """What a reader must know of where numbers were taken. Makes no CUDA context: that would take a GPU's memory."""
    return {
        "gpu": _first_line("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "vllm", "kvbm")},
        "commit": _first_line("git", "-C", str(PROJECT), "describe", "--always", "--dirty"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def median(values: Iterable[float]) -> float:
    """The middle one, of an even number the upper: always one that was measured, and rather the worse for a time."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to take a percentile of")
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[min(int(rank), len(ordered)) - 1]
