"""The model that vLLM has loaded: weights that the digest would miss are refused, and every update is noticed."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch

from kvbm.engines.vllm.model import digest_of_models
from kvbm.engines.weights import UnreadableError


class Experts(torch.nn.Module):
    """Sizes are named as in vLLM's RoutedExperts."""

    def __init__(self, w13, w2):
        super().__init__()
        self.local_num_experts, self.hidden_size, self.intermediate_size_per_partition = 4, 16, 8
        self.w13_bias = torch.nn.Parameter(torch.zeros(4, 1024))
        self.w13_weight, self.w2_weight = w13, w2


def model_with(*weights):
    return torch.nn.Sequential(torch.nn.LayerNorm(2), Experts(*weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_experts_in_parameters_are_digested(dtype):
    packed = 2 if dtype is torch.uint8 else 1  # two 4-bit numbers a byte

    def of(value):
        w13, w2 = torch.full((4, 16, 16 // packed), value, dtype=dtype), torch.zeros(4, 16, 8 // packed, dtype=dtype)
        found = model_with(*(torch.nn.Parameter(tensor, requires_grad=False) for tensor in (w13, w2)))
        return digest_of_models([found])

    assert of(1) == of(1) != of(2)


@pytest.mark.parametrize("shown", [False, True], ids=["both", "one"])
def test_experts_that_are_objects_of_a_kernel_library_are_refused(shown):
    """Biases, scales and routing tables that are in sight do not make up for the weights."""
    w2 = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.uint8), requires_grad=False) if shown else object()
    with pytest.raises(UnreadableError, match=r"1 \(Experts\): its weights are in no parameter or buffer"):
        digest_of_models([model_with(object(), w2)])
