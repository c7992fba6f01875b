"""The model that vLLM has loaded: weights that the digest would miss are refused, and every update is noticed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from kvbm.engines.vllm import model as module
from kvbm.engines.vllm.model import digest_of_models, models_of, watch_weights
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


class Kernel:
    """Takes one second for each 256 columns of 512 x 64 weights."""

    now = 0.0

    def apply(self, layer, units, bias):
        Kernel.now += len(units) / 256 * layer.input_size * layer.output_size / (512 * 64)
        return units[:, :1] + layer.value

    @classmethod
    def monotonic(cls):
        return cls.now


def packed_layer(inputs, outputs, value=1.0):
    from vllm.model_executor.layers.linear import LinearBase

    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    layer.input_size, layer.output_size, layer.value = inputs, outputs, value
    layer.prefix, layer.params_dtype, layer.quant_method = "packed", torch.float32, Kernel()
    return layer


def test_packed_layers_that_take_too_long_to_read_are_refused(monkeypatch):
    monkeypatch.setattr(module, "time", Kernel)
    few = [torch.nn.Sequential(packed_layer(512, 64), packed_layer(256, 64, value)) for value in (1.0, 1.0, 2.0)]
    first, same, other = (digest_of_models([model]) for model in few)
    assert first == same != other
    many = torch.nn.Sequential(*(packed_layer(512, 64) for _ in range(30)), packed_layer(512, 128))
    with pytest.raises(UnreadableError, match="reading the packed weights back would take about 64 s"):
        digest_of_models([many])


# -- updates ----------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.loaded = 0

    def load_weights(self):
        self.loaded += 1


class Runner:
    """Of a module whose name begins as those of vLLM's workers do."""

    def __init__(self, model):
        self.model = model

    def get_model(self):
        return self.model

    def reload_weights(self):
        self.model.load_weights()

    def make_cache(self, models, changed):
        watch_weights(models, changed)


Runner.__module__ = "vllm.v1.worker.gpu_model_runner"


class CustomRunner(Runner):
    pass


@pytest.mark.parametrize("kind", [Runner, CustomRunner])
def test_updates_of_vllms_and_of_custom_runners_are_noticed(kind):
    runner, seen = kind(Model()), []
    runner.make_cache([], lambda: seen.append(1))
    runner.model.load_weights()
    assert len(seen) == 2
    runner.reload_weights()
    assert len(seen) == 6  # before and after both of them
    assert runner.model.loaded == 2


def test_a_method_that_others_have_wrapped_is_watched_by_every_connector():
    model, seen = Model(), []
    model.load_weights = model.load_weights
    watch_weights([model, model], lambda: seen.append("first"))
    watch_weights([model], lambda: seen.append("second"))
    model.load_weights()
    assert sorted(seen) == ["first"] * 2 + ["second"] * 2
    assert model.loaded == 1


def test_models_are_known_only_when_every_registered_layer_belongs_to_one():
    def of(*layers):
        context = {str(i): layer for i, layer in enumerate(layers)}
        return models_of(SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context)))

    model, lonely = Model(), torch.nn.Linear(2, 2)
    assert of(model.layer) == [model]
    assert of(model.layer, lonely) == []
    assert of(lonely) == of() == []
