"""The trial at start finds that the kernels give back every byte, or that they do not. Triton's interpreter runs them.

The interpreter is chosen when the kernels are imported, so the trial runs in a process of its own, with the little of
CUDA that it calls replaced.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.parametrize("damage", ["none", "a byte"])
def test_the_trial_compares_every_byte(damage):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", __file__, damage]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(damage == "none")]


def main(damage: str) -> None:
    import torch

    from kvbm.transfer import packing_trial
    from kvbm.transfer.layout import TensorSpec, describe
    from kvbm.transfer.packing import pack_layout

    class Launcher:
        def __init__(self, kernel, warps):
            self.kernel = kernel

        def start(self, programs, tensors, numbers, constants):
            self.kernel[(programs,)](*tensors, *numbers, *constants)
            if damage != "none" and len(tensors) == 2:  # packed
                rows.pop().view(-1)[-2000] += 1

    rows = []
    zeros, carve = torch.zeros, packing_trial._carve

    def carved(*sizes):
        parts = carve(*sizes)
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        rows.append(parts[2])
        return parts

    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.zeros = lambda *shape, pin_memory=False, **options: zeros(*shape, **options)
    packing_trial.Launcher = Launcher
    packing_trial._carve = carved
    packing_trial._seconds = lambda work: (work(), 1e-3)[1]
    packing_trial._TRIAL_BYTES = 1 << 16
    shape, strides = (8, 2, 16, 2, 64), (8192, 4096, 256, 128, 2)
    layout = pack_layout(describe([TensorSpec("layer", 0, shape, strides, 2, "bfloat16")], 8))
    trial = packing_trial.try_packing(layout, torch.device("cpu"))
    assert trial.bus == (1 << 16) / 1e-3
    assert trial.unpacked == (1 << 16) / 1e-3
    print(trial.is_exact)


if __name__ == "__main__":
    main(sys.argv[1])
