"""Which layers of a model are of one kind, and the model with two layers of each kind."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.models.unrolling.recording import Recording, record
from graphopt.models.unrolling.refusals import DIFFERENT, FEW_LAYERS, NO_LAYERS, OUTSIDE, NotUnderstoodError

# Below so many layers nothing is gained.
_FEWEST = 4


@dataclass(frozen=True)
class Plan:
    """Which layers are traced, and which of these each layer is like.

    Attributes:
        prefix: the name of the list of layers, such as ``model.layers``.
        kinds: the number of the kind of each layer of the model.
        samples: the layers that are traced, in order: the first two of each kind.
    """

    prefix: str
    kinds: tuple[int, ...]
    samples: tuple[int, ...]


def plan_layers(model: Any, inputs: Mapping[str, Any]) -> Plan:
    """Find out which layers of a model are of one kind, and confirm that the model with two of each does the same.

    Two layers are of one kind if they compute the same, operation by operation, and their modules hold the same: class,
    attributes, shapes of parameters, buffers, and entries of those lists of the configuration that have one per layer.

    Args:
        model: a skeleton, see :mod:`graphopt.models.unrolling.skeleton`.
        inputs: tensors to run it on.

    Raises:
        NotUnderstoodError: there is no list of layers, too few of them, or the smaller model does something else.
    """
    prefix = find_layers(model)
    layers = list(model.get_submodule(prefix))
    if len(layers) < _FEWEST:
        raise NotUnderstoodError(FEW_LAYERS(traced=len(layers), layers=len(layers)))
    whole = record(model, prefix, inputs)
    indices = index_attributes(layers)
    keys = [
        (_key(whole, n), fingerprint(layer, indices), _entries(model, len(layers), n)) for n, layer in enumerate(layers)
    ]
    distinct = list(dict.fromkeys(keys))
    kinds = tuple(distinct.index(key) for key in keys)
    samples = tuple(n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < 2)
    if len(samples) == len(layers):
        raise NotUnderstoodError(FEW_LAYERS(traced=len(samples), layers=len(layers)))
    plan = Plan(prefix, kinds, samples)
    with shorten(model, plan):
        _compare(whole, record(model, prefix, inputs), plan)
    return plan


def _key(recording: Recording, layer: int) -> tuple[Any, ...]:
    return (tuple(recording.layers[layer]), recording.outputs[layer])


def _compare(whole: Recording, part: Recording, plan: Plan) -> None:
    if whole.outside != part.outside:
        raise NotUnderstoodError(OUTSIDE())
    for index, n in enumerate(plan.samples):
        if _key(whole, n) != _key(part, index):
            raise NotUnderstoodError(DIFFERENT(layer=n, layers=len(plan.samples)))


def find_layers(model: Any) -> str:
    """Return the name of the list of modules that holds the most parameters and lies in no other list.

    Raises:
        NotUnderstoodError: there is none.
    """
    torch = importlib.import_module("torch")
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in sizes):
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    if not sizes:
        raise NotUnderstoodError(NO_LAYERS())
    return max(sizes, key=lambda name: sizes[name])


def index_attributes(layers: Sequence[Any]) -> set[tuple[str, str]]:
    """Return those attributes of the layers' modules that say the number of the layer: module and attribute.

    Layers may hold other modules. What only one layer has counts if an attribute of that name numbers others.
    """
    matches: dict[tuple[str, str], list[bool]] = {}
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            for attribute, value in vars(module).items():
                if type(value) is int:
                    matches.setdefault((name, attribute), []).append(value == number)
    names = {key: len(equal) for key, equal in matches.items() if all(equal)}
    common = {attribute for (_, attribute), count in names.items() if count > 1}
    return {(module, attribute) for module, attribute in names if attribute in common}


def fingerprint(layer: Any, indices: set[tuple[str, str]]) -> str:
    """Return a text that is the same for layers whose modules hold the same, numbers of layers aside."""
    lines = []
    for name, module in layer.named_modules():
        attributes = {
            key: _text(value)
            for key, value in vars(module).items()
            if (name, key) not in indices and key not in ("_parameters", "_buffers", "_modules") and "hook" not in key
        }
        parameters = {
            key: None if value is None else (tuple(value.shape), str(value.dtype))
            for key, value in module._parameters.items()
        }
        buffers = {key: _content(module, key, value) for key, value in module._buffers.items()}
        lines.append(repr((name, type(module).__qualname__, attributes, parameters, buffers)))
    return "\n".join(lines)


def _content(module: Any, name: str, buffer: Any) -> Any:
    if buffer is None:
        return None
    shape = (tuple(buffer.shape), str(buffer.dtype))
    # What a checkpoint holds is a weight, whatever its number.
    if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
        return shape
    return (*shape, hashlib.sha256(buffer.contiguous().numpy().tobytes()).hexdigest())


def _text(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple, set)):
        return f"{type(value).__name__}{[_text(element) for element in value]}"
    if isinstance(value, Mapping):
        return repr({str(key): _text(element) for key, element in value.items()})
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _configurations(model: Any) -> list[Any]:
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return list(configs.values())


def _entries(model: Any, count: int, layer: int) -> str:
    """Return what the lists of the configuration that have one entry for each layer say of one."""
    return repr(
        [
            (name, value[layer])
            for config in _configurations(model)
            for name, value in vars(config).items()
            if isinstance(value, (list, tuple)) and len(value) == count
        ]
    )


@contextlib.contextmanager
def shorten(model: Any, plan: Plan) -> Iterator[None]:
    """Give ``model`` the traced layers only, for as long as the block runs: modules, configuration, their numbers."""
    torch = importlib.import_module("torch")
    parent, _, name = plan.prefix.rpartition(".")
    layers = list(model.get_submodule(plan.prefix))
    count, fewer = len(layers), len(plan.samples)
    indices = index_attributes(layers)
    configs = [(config, dict(vars(config))) for config in _configurations(model)]
    try:
        for config, before in configs:
            number = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
            if before.get(number) == count:
                vars(config)[number] = fewer
            for key, value in before.items():
                if isinstance(value, (list, tuple)) and len(value) == count:
                    vars(config)[key] = type(value)(value[n] for n in plan.samples)
        setattr(model.get_submodule(parent), name, torch.nn.ModuleList(layers[n] for n in plan.samples))
        for index, n in enumerate(plan.samples):
            _number(layers[n], indices, index)
        yield
    finally:
        for config, before in configs:
            vars(config).update(before)
        setattr(model.get_submodule(parent), name, torch.nn.ModuleList(layers))
        for n, layer in enumerate(layers):
            _number(layer, indices, n)


def _number(layer: Any, indices: set[tuple[str, str]], number: int) -> None:
    modules = dict(layer.named_modules())
    for module, attribute in indices:
        if module in modules:
            setattr(modules[module], attribute, number)
