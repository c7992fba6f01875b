"""The model that vLLM has loaded on this rank: its weights, for the fingerprint.

vLLM hands a connector no model. But every attention layer registers itself with the configuration, that of a draft
model too, and the outermost modules that hold those layers are the models of this engine and of no other.

Weights may also change while the engine runs (:func:`watch_weights`): a trainer sends new ones, or a checkpoint is
loaded again. And an engine may sleep (:func:`watch_sleep`): its worker gives the memory of the KV cache back.

On a CPU vLLM packs the weights of linear layers for its kernels and drops the parameters: the numbers are inside a
library from then on. They are read through the layer itself: its output for a unit vector is one column of its weights.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from kvbm.engines.weights import Named, UnreadableError, digest_of, roots, tensors_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase

# Columns that one call reads: enough for a matrix product to be efficient.
COLUMNS = 256

# Seconds that reading all packed layers may take at start.
MAX_READ_SECONDS = 60.0

# Parts of a quantised layer that are no weights, by what their names hold.
_NO_WEIGHTS = ("scale", "zero", "bias", "azp", "g_idx", "shape")


# Methods of vLLM's workers and model runners that bring new weights, some of them past the model's own method. The last
# calls a user's function, which may write to the parameters.
_UPDATES = (
    "reload_weights", "update_weights", "start_weight_update", "start_draft_weight_update", "finish_weight_update",
    "apply_model",
)  # fmt: skip


# Methods of vLLM's workers that give memory of the KV cache back.
_RELEASES = ("sleep", "discard")


def models_of(vllm_config: Any) -> list[torch.nn.Module]:
    """The models of this engine, its draft models included; none when they cannot be found."""
    registered = vllm_config.compilation_config.static_forward_context.values()
    layers = [layer for layer in registered if isinstance(layer, torch.nn.Module)]
    found = roots(layers) if layers else []
    known = {id(layer) for layer in layers}
    return found if all(id(root) not in known for root in found) else []


def watch_weights(models: Iterable[torch.nn.Module], changed: Callable[[], None]) -> None:
    """Call ``changed`` before and after every call that brings new weights. To be called while vLLM makes its cache:
    its worker and model runner are a few frames up then."""
    owners: list[Any] = [(model, "load_weights") for model in models]
    for caller in _calling_workers():
        owners += [(caller, name) for name in _UPDATES]
        owners += [(model, "load_weights") for model in _model_of(caller)]
    _watch(owners, changed, changed)


def watch_sleep(drain: Callable[[], None]) -> None:
    """Call ``drain`` before every call that gives memory of the KV cache back. See :func:`watch_weights`."""
    _watch([(caller, name) for caller in _calling_workers() for name in _RELEASES], drain)


def _calling_workers() -> Iterator[Any]:
    """The worker and the model runner of vLLM that are among the callers."""
    frame: Any = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if any(kind.__module__.startswith("vllm.v1.worker.") for kind in type(caller).__mro__):
            yield caller
        frame = frame.f_back


def _watch(
    owners: Iterable[tuple[Any, str]], before: Callable[[], None], after: Callable[[], None] | None = None
) -> None:
    for owner, name in {(id(owner), name): (owner, name) for owner, name in owners}.values():
        if hasattr(type(owner), name):
            object.__setattr__(owner, name, _noticed(getattr(owner, name), before, after))


def _model_of(runner: Any) -> list[Any]:
    """The model of a worker or model runner, where :func:`models_of` may not find it."""
    try:
        return [runner.get_model()]
    except Exception:
        return []  # it has none, or none yet


def _noticed(
    update: Callable[..., Any], before: Callable[[], None], after: Callable[[], None] | None
) -> Callable[..., Any]:
    @functools.wraps(update)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return update(*args, **kwargs)
        finally:
            if after is not None:
                after()

    return noticed


def digest_of_models(models: list[torch.nn.Module]) -> str:
    """Of the weights that these models compute with. Raises UnreadableError."""
    if not models:
        raise UnreadableError("the loaded model was not found in this process")
    layers = list(_packed_layers(models))
    if layers and (estimate := _estimate_seconds([layer for _, layer in layers])) > MAX_READ_SECONDS:
        raise UnreadableError(f"reading the packed weights back would take about {estimate:.0f} s")
    packed = [Named(name, _columns(layer)) for name, layer in layers]
    return digest_of([*tensors_of(models), *packed])


def _packed_layers(models: list[torch.nn.Module]) -> Iterator[tuple[str, LinearBase]]:
    """Linear layers whose weights are in no parameter. Raises UnreadableError for those that cannot be read."""
    from vllm.model_executor.layers.linear import LinearBase

    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if isinstance(module, LinearBase):
                if _is_packed(module):
                    yield f"{number}.{name.replace('.base_layer', '')}.weight", module
            elif _hides_experts(module) or any(
                "weight" in own and not tensor.numel() for own, tensor in _weights_in(module)
            ):
                raise UnreadableError(f"{name} ({type(module).__name__}): its weights are in no parameter or buffer")


def _hides_experts(module: torch.nn.Module) -> bool:
    """Whether a module holds experts, and its tensors have less than one bit for each of their weights. vLLM keeps
    experts in MXFP4 as objects of a kernel library, which are plain attributes."""
    names = ("local_num_experts", "hidden_size", "intermediate_size_per_partition")
    sizes = [getattr(module, name, None) for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return False
    seen = [tensor for _, tensor in _weights_in(module, recurse=True)]
    if any(tensor.is_meta for tensor in seen):
        return False  # of another stage of the pipeline
    experts, hidden, intermediate = sizes
    # At least two matrices an expert: one up, one down.
    return sum(8 * tensor.nbytes for tensor in seen) < 2 * experts * hidden * intermediate


def _weights_in(module: torch.nn.Module, recurse: bool = False) -> list[tuple[str, torch.Tensor]]:
    named = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    return [(name, tensor) for name, tensor in named if not any(word in name for word in _NO_WEIGHTS)]


def _is_packed(layer: LinearBase) -> bool:
    """Whether the layer's tensors have less than one bit for each of its weights."""
    seen = [tensor for _, tensor in _weights_in(layer)]
    if any(tensor.is_meta for tensor in seen):
        return False  # of another stage of the pipeline
    inputs, outputs = _sizes(layer)
    return sum(8 * tensor.nbytes for tensor in seen) < inputs * outputs


def _sizes(layer: LinearBase) -> tuple[int, int]:
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)
    return inputs, getattr(layer, "output_size_per_partition", layer.output_size)


def _estimate_seconds(layers: list[LinearBase]) -> float:
    """What reading these layers takes, from calls of the largest: each column costs a pass over the weights."""
    sizes = [_sizes(layer) for layer in layers]
    work = [inputs * inputs * outputs for inputs, outputs in sizes]
    largest = work.index(max(work))
    took = []
    for _ in range(2):  # the first call of a kernel sets it up
        began = time.monotonic()
        next(_columns(layers[largest]), None)
        took.append(time.monotonic() - began)
    share = min(COLUMNS, sizes[largest][0]) / sizes[largest][0] * work[largest] / sum(work)
    return min(took) / share


def _columns(layer: LinearBase) -> Iterator[torch.Tensor]:
    """The weights of a packed layer, some columns at a time. Exact: all other products are zeros."""
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise UnreadableError(f"{layer.prefix} ({type(layer).__name__}): its weights are in no parameter or buffer")
    inputs, _ = _sizes(layer)
    scale = getattr(layer, "input_scale", None)
    # A kernel with a fixed scale for its inputs would round small ones to zero: give it the largest it takes.
    one = 1.0 if scale is None else 127 * float(scale.max())
    empty = True
    for start in range(0, inputs, COLUMNS):
        units = torch.zeros(min(COLUMNS, inputs - start), inputs, dtype=layer.params_dtype)
        units[:, start:].fill_diagonal_(one)
        column = layer.quant_method.apply(layer, units, None)
        empty = empty and not column.any()
        yield column
    if empty:
        raise UnreadableError(f"{layer.prefix} ({type(layer).__name__}): all weights read as zero")
