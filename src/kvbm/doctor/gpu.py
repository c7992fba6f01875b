"""Checks of the GPU and of the bandwidth between it and host memory."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from kvbm.doctor.base import Examination, installed_version
from kvbm.observe.findings import bad, good, note
from kvbm.observe.format import printable, size
from kvbm.observe.snapshot import Finding

SLOW, VERY_SLOW = 20e9, 6e9  # bytes a second; PCIe 4 x16 carries 25 GB/s, PCIe 5 x16 55
PROBE = 256 << 20
# The oldest driver of each major release of CUDA, on Linux.
MIN_DRIVERS = {"11": 450, "12": 525, "13": 580}


class Card(NamedTuple):
    name: str
    memory: int
    driver: str
    width: int  # lanes of the bus now
    most_width: int
    uuid: str = ""


def gpus() -> tuple[Card, ...]:
    """The GPUs that nvidia-smi lists, without an import of torch, which takes seconds; empty without a driver."""
    return _nvidia_smi()[0]


@cache
def _nvidia_smi() -> tuple[tuple[Card, ...], str]:
    """(the GPUs, why nvidia-smi failed). Without the program there is no reason to give."""
    query = "name,memory.total,driver_version,pcie.link.width.current,pcie.link.width.max,uuid"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return (), ""
    except (OSError, subprocess.SubprocessError) as error:
        return (), str(error)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        return (), printable(said[0] if said else f"exit code {done.returncode}")
    return tuple(_card(line) for line in done.stdout.splitlines() if line.count(",") >= 4), ""


def _card(line: str) -> Card:
    name, memory, driver, width, most, *uuid = (part.strip() for part in line.split(","))
    return Card(name, _number(memory) << 20, driver, _number(width), _number(most), "".join(uuid))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0  # "[N/A]"


class Gpu:
    name = "gpu"

    def run(self, case: Examination) -> Iterator[Finding]:
        cards = gpus()
        if build := re.search(r"rocm|xpu|tpu|hpu|gaudi|neuron|ascend", installed_version("vllm")):
            yield bad(
                "not-nvidia",
                f"vllm {installed_version('vllm')} is a build for {build[0]}: KVBM has copy kernels for NVIDIA's GPUs "
                "only.",
                "Use it with an NVIDIA GPU and vLLM's CUDA build.",
            )
            return
        if not cards:
            if problem := _nvidia_smi()[1]:
                yield bad(
                    "driver-broken",
                    f"nvidia-smi is installed and fails: {problem}.",
                    "Load the driver's kernel module, or restart the machine after an update of the driver.",
                )
                return
            cpu_engine = "cpu" in installed_version("vllm")
            yield note(
                "no-gpu",
                "nvidia-smi shows no GPU" + (", and vLLM is a build for CPUs." if cpu_engine else "."),
                "" if cpu_engine else "If the machine has one: install the driver, or give the container its GPUs.",
            )
            return
        for card in cards:
            yield good("gpu", f"{card.name}, {size(card.memory)}, driver {card.driver}.")
            if 0 < card.width < card.most_width:
                yield bad(
                    "pcie-narrow",
                    f"{card.name} uses {card.width} of its {card.most_width} PCIe lanes: loads take "
                    f"{card.most_width // card.width} times as long.",
                    "Put the card into a slot with all lanes, or check for a riser or a BIOS setting that splits them.",
                )
        if "cpu" in installed_version("vllm"):
            yield bad(
                "cpu-build",
                f"vllm {installed_version('vllm')} is a build for CPUs and does not use the GPU of this machine.",
                "Install vLLM's CUDA build: pip install vllm, without the CPU index.",
            )
        yield from _versions(cards)
        hidden = case.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
            yield bad("gpu-hidden", f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU from the engine.", "Unset it.")
        elif any(_is_missing(each.strip(), cards) for each in (hidden or "").split(",")):
            yield bad(
                "gpu-hidden",
                f"CUDA_VISIBLE_DEVICES={hidden!r} names a GPU that is not there: this machine has {len(cards)}, "
                "counted from 0.",
                "Correct or unset it; `nvidia-smi -L` lists numbers and UUIDs.",
            )
        elif not case.quick:
            yield from self._torch()

    def _torch(self) -> Iterator[Finding]:
        try:
            import torch
        except ImportError:
            yield note("no-torch", "torch is not installed, so the GPU was not tested.")
            return
        if not torch.cuda.is_available():
            yield bad(
                "torch-without-cuda",
                f"torch {torch.__version__} cannot use the GPU.",
                "Install the CUDA build of torch that the engine requires, and a driver that supports it.",
            )


def _is_missing(device: str, cards: tuple[Card, ...]) -> bool:
    """A number or a UUID of CUDA_VISIBLE_DEVICES; CUDA takes the beginning of a UUID too."""
    if device.isdecimal():
        return int(device) >= len(cards)
    known = all(card.uuid for card in cards)
    return device.startswith("GPU-") and known and not any(card.uuid.startswith(device) for card in cards)


def _versions(cards: tuple[Card, ...]) -> Iterator[Finding]:
    """Whether torch is a build for GPUs, and the driver new enough for its CUDA."""
    torch, driver = installed_version("torch"), cards[0].driver
    if torch.endswith("+cpu") and "cpu" not in installed_version("vllm"):
        yield bad(
            "torch-without-cuda",
            f"torch {torch} is a build for CPUs and does not use the GPU of this machine.",
            "Install the torch that the engine requires: install the engine again, without an index of CPU builds.",
        )
    cuda = installed_version("nvidia-cuda-runtime") or installed_version("nvidia-cuda-runtime-cu12")
    build = re.search(r"\+cu(\d\d)\d", torch)
    major = build[1] if build else cuda.partition(".")[0]
    least = MIN_DRIVERS.get(major, 0)
    if 0 < _number(driver.partition(".")[0]) < least:
        yield note(
            "driver-too-old",
            f"The driver {driver} is too old for the CUDA {major} of torch {torch}, which needs {least} or newer.",
            f"Install a driver of {least} or newer, an engine for an older CUDA, or CUDA's compatibility package.",
        )


class Bandwidth:
    """Pinned memory to the GPU and back."""

    name = "bandwidth"

    def run(self, case: Examination) -> Iterator[Finding]:
        if case.quick or not gpus():
            return
        try:
            import torch
        except ImportError:
            return
        if not torch.cuda.is_available():
            return
        for device in range(torch.cuda.device_count()):
            try:
                up, down = measure(torch, device)
            except RuntimeError as error:
                yield bad(
                    "pinning-failed",
                    f"GPU {device}: {size(PROBE)} of host memory could not be pinned and copied: {error}",
                    "Free GPU memory if it is full; otherwise check `ulimit -l` and the container's memory limit.",
                )
                continue
            text = f"GPU {device}: {up / 1e9:.1f} GB/s from pinned host memory, {down / 1e9:.1f} GB/s to it"
            if min(up, down) < VERY_SLOW:
                yield bad(
                    "bus-slow", f"{text}.", "Expected 12 to 55 GB/s: check the PCIe slot, its lanes and its generation."
                )
            elif min(up, down) < SLOW:
                yield note(
                    "bus-slow",
                    f"{text}.",
                    "PCIe 4 x16 reaches 25, PCIe 5 x16 55. Short loads may not pay off.",
                )
            else:
                yield good("bandwidth", f"{text}.")


def measure(torch: Any, device: int) -> tuple[float, float]:
    """(bytes a second to the device, from the device), each the best of three."""
    with torch.cuda.device(device):
        host = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(PROBE, dtype=torch.uint8, device="cuda")
        best = [0.0, 0.0]
        for _ in range(4):  # the first round warms up
            for direction, (target, source) in enumerate(((there, host), (host, there))):
                torch.cuda.synchronize()
                began = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                best[direction] = max(best[direction], PROBE / (time.perf_counter() - began))
    return best[0], best[1]
