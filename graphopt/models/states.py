"""What a causal language model keeps between calls: looked at before it is traced, which may take minutes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graphopt.analysis.structure.ports import exported_name
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PLAIN = (bool, int, float, str)


def confirm_caches(inputs: Mapping[str, Any], source: str) -> None:
    """Refuse a model whose sample inputs show that its graph will be refused.

    Args:
        inputs: what the second call of the model is given, by name.
        source: where it came from, for messages.

    Raises:
        InputError: a state is neither a key-value cache nor a recurrent state.
    """
    torch = importlib.import_module("torch")
    caches = {
        name: value
        for name, value in inputs.items()
        if value is not None and not isinstance(value, (*_PLAIN, torch.Tensor))
    }
    if not all(hasattr(value, "layers") for value in caches.values()):
        return  # caches of another kind: the graph will tell
    for port, cache in caches.items():
        for name, tensor in _states(torch, port, cache):
            if exported_name(name) is None:
                raise other_input(name, [str(dimension) for dimension in tensor.shape], source)


def _states(torch: Any, port: str, cache: Any) -> Iterator[tuple[str, Any]]:
    """Yield the floats that a cache holds, by the names that the exporter gives them; sizes are integers."""
    for number, layer in enumerate(cache.layers):
        for part, state in vars(layer).items():
            tensors = state if isinstance(state, dict) else {"": state}
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
                    yield ".".join(filter(None, ("input", port, "layers", str(number), part, str(key)))), tensor


def other_input(name: str | None, shape: list[str] | None, source: str | None = None) -> InputError:
    """Return the error for an input that no task knows."""
    return InputError(
        "the model has an input other than tokens, mask, token types, positions, key-value caches and recurrent states",
        file=source,
        tensor=name,
        shape=shape,
        remedy="graphopt takes encoders, and decoder-only models whose states are keys and values, keys of "
        "indexers, tails of convolutions and recurrent states of the names that transformers has for them",
    )
