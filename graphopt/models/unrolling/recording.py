"""What each layer of a model computes, recorded while the model runs on tensors without numbers.

A run of all layers costs a second where a trace costs minutes. Each operation is written down with all its arguments;
a tensor among these by where it comes from: this layer, the layer before, outside of the layers, a parameter. Layers
that wrote down the same do the same, whatever the model's code looks like.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphopt.models.unrolling.refusals import CROSSING, NOT_RECORDED, OUTSIDE, NotUnderstoodError

_OUTSIDE = -1
Line = tuple[Any, ...]
Origin = tuple[int, int, int]  # the layer or _OUTSIDE, the line there, the number of the output


@dataclass
class Recording:
    """What a run wrote down.

    Attributes:
        layers: the lines of each layer. What the layer before passes on is called ``passed``, also in the first layer.
        outputs: which line and output of each layer is what it passes on.
        outside: the lines of all that is computed around the layers.
    """

    layers: list[list[Line]]
    outputs: list[tuple[int, int] | None]
    outside: list[Line]


def record(model: Any, prefix: str, inputs: Mapping[str, Any]) -> Recording:
    """Run ``model`` on tensors without numbers, and return what it computes.

    Args:
        model: a skeleton, see :mod:`graphopt.models.unrolling.skeleton`.
        prefix: the name of its list of layers.
        inputs: tensors to run it on, by name.

    Raises:
        NotUnderstoodError: it branches on numbers, or its layers pass on more than one tensor.
    """
    torch = importlib.import_module("torch")
    fakes = importlib.import_module("torch._subclasses.fake_tensor")
    exporting = importlib.import_module("torch._export.utils")._compiling_state_context
    notebook = _Notebook(torch, model, prefix)
    layers = list(model.get_submodule(prefix))
    hooks = []
    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(partial(notebook.enter, number), with_kwargs=True))
        hooks.append(layer.register_forward_hook(notebook.leave, with_kwargs=True))
    level = logging.root.manager.disable
    try:
        # torch logs what it raises.
        logging.disable(logging.CRITICAL)
        # Models ask whether they are traced where they would look at numbers otherwise.
        with exporting(), fakes.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), _mode(notebook):
            model(**{name: mode.from_tensor(tensor) for name, tensor in inputs.items()})
    except NotUnderstoodError:
        raise
    except Exception as error:
        raise NotUnderstoodError(NOT_RECORDED(error=f"{type(error).__name__}: {error}".splitlines()[0])) from error
    finally:
        logging.disable(level)
        for hook in hooks:
            hook.remove()
    return _to_recording(notebook.lines, notebook.arguments, len(layers))


class _Notebook:
    """Writes down every operation of a model, layer by layer."""

    def __init__(self, torch: Any, model: Any, prefix: str) -> None:
        self._torch, self._prefix = torch, prefix
        self._names: dict[int, str] = {}
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            self._names.setdefault(id(tensor), name)
        self._layer = _OUTSIDE
        self.lines: dict[int, list[Line]] = {_OUTSIDE: []}
        self.arguments: dict[int, dict[str, Origin]] = {}
        self._origins: dict[int, Origin] = {}
        self._constants: dict[int, Any] = {}
        self._references: list[Any] = []  # an id says which tensor it is for as long as the tensor lives

    def enter(self, number: int, _module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin layer ``number``."""
        self._layer = number
        self.lines[number] = []
        arguments = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        self.arguments[number] = {
            name: self._origins[id(value)] for name, value in arguments.items() if id(value) in self._origins
        }

    def leave(self, *_: Any) -> None:
        """End the layer."""
        self._layer = _OUTSIDE

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and write it down."""
        result = function(*args, **kwargs)
        aten = self._torch.ops.aten
        if function in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            # A number of the program: what it is matters, not where it was written down.
            self._constants[id(result)] = self._describe(args[0])
            self._references.append(result)
            return result
        lines = self.lines[self._layer]
        lines.append((str(function), self._describe(args), self._describe(kwargs)))
        for number, tensor in enumerate(_tensors(self._torch, result)):
            self._origins[id(tensor)] = (self._layer, len(lines) - 1, number)
            self._references.append(tensor)
        return result

    def _describe(self, value: Any) -> Any:
        if isinstance(value, self._torch.Tensor):
            return self._describe_tensor(value)
        if isinstance(value, Mapping):
            return tuple((name, self._describe(element)) for name, element in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(self._describe(element) for element in value)
        return repr(value)

    def _describe_tensor(self, tensor: Any) -> Any:
        key = id(tensor)
        if key in self._origins:
            return ("tensor", self._origins[key])
        if key in self._constants:
            return self._constants[key]
        if key in self._names:
            return ("weight", self._names[key].replace(f"{self._prefix}.{self._layer}.", "layer.", 1))
        self._references.append(tensor)
        return ("constant", str(tensor.dtype), tuple(tensor.shape), _numbers(tensor))


def _mode(notebook: _Notebook) -> Any:
    """Return a mode of torch in which a notebook runs every operation; its class is made here: torch is optional."""
    modes = importlib.import_module("torch.utils._python_dispatch")

    class Recorder(modes.TorchDispatchMode):  # type: ignore[name-defined, misc]
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return notebook.run(func, args, kwargs or {})

    return Recorder()


def _numbers(tensor: Any) -> str:
    fakes = importlib.import_module("torch._subclasses.fake_tensor")
    if isinstance(tensor, fakes.FakeTensor):
        return "unknown"
    with fakes.unset_fake_temporarily():
        return hashlib.sha256(tensor.contiguous().view(-1).numpy().tobytes()).hexdigest()


def _tensors(torch: Any, result: Any) -> Iterator[Any]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for element in result:
            yield from _tensors(torch, element)


def _to_recording(lines: dict[int, list[Line]], arguments: dict[int, dict[str, Origin]], count: int) -> Recording:
    """Say of every tensor whether it is of the same layer, what is passed on, or of the outside."""
    if set(lines) != {_OUTSIDE, *range(count)}:
        raise NotUnderstoodError(OUTSIDE())
    entries = _entries([arguments[n] for n in range(count)])
    layers = [[_relative(line, n, entries[n]) for line in lines[n]] for n in range(count)]
    ends = {origin for line in lines[_OUTSIDE] for origin in _origins(line) if origin[0] != _OUTSIDE}
    if len(ends) > 1 or any(layer != count - 1 for layer, _, _ in ends):
        raise NotUnderstoodError(OUTSIDE())
    end = next(iter(ends), None)
    outputs = [None if origin is None else origin[1:] for origin in (*entries[1:], end)]
    return Recording(layers, outputs, [_relative(line, _OUTSIDE, end) for line in lines[_OUTSIDE]])


def _entries(arguments: list[dict[str, Origin]]) -> list[Origin | None]:
    """Return what each layer gets from the one before: the argument that holds it in all layers."""
    slots = [
        {name for name, origin in by_name.items() if origin[0] == n - 1} for n, by_name in enumerate(arguments) if n
    ]
    slot = min(set.intersection(*slots), default="") if slots else ""
    return [by_name.get(slot) for by_name in arguments]


def _origins(value: Any) -> Iterator[Origin]:
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] == "tensor":
            yield value[1]
        else:
            for element in value:
                yield from _origins(element)


def _relative(value: Any, layer: int, entry: Origin | None) -> Any:
    if not isinstance(value, tuple):
        return value
    if len(value) != 2 or value[0] != "tensor":
        return tuple(_relative(element, layer, entry) for element in value)
    origin: Origin = value[1]
    if origin == entry:
        return ("passed",)
    if origin[0] in (layer, _OUTSIDE):
        return ("here" if origin[0] == layer else "outside", *origin[1:])
    raise NotUnderstoodError(CROSSING(layer=layer))
