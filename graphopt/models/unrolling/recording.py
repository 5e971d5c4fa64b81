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
from dataclasses import dataclass, field
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
        passed: which line and output of each layer is what it passes on.
        outside: the lines of all that is computed around the layers.
    """

    layers: list[list[Line]] = field(default_factory=list)
    passed: list[tuple[int, int] | None] = field(default_factory=list)
    outside: list[Line] = field(default_factory=list)


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
    recorder = _recorder(torch, model, prefix)
    layers = list(model.get_submodule(prefix))
    hooks = []
    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(recorder.entering(number), with_kwargs=True))
        hooks.append(layer.register_forward_hook(recorder.leaving(), with_kwargs=True))
    logged = logging.root.manager.disable
    try:
        # torch logs what it raises.
        logging.disable(logging.CRITICAL)
        # Models ask whether they are traced where they would look at numbers otherwise.
        with exporting(), fakes.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), recorder:
            model(**{name: mode.from_tensor(tensor) for name, tensor in inputs.items()})
    except NotUnderstoodError:
        raise
    except Exception as error:
        raise NotUnderstoodError(NOT_RECORDED(error=f"{type(error).__name__}: {error}".splitlines()[0])) from error
    finally:
        logging.disable(logged)
        for hook in hooks:
            hook.remove()
    return _finished(recorder.lines, recorder.arguments, len(layers))


def _recorder(torch: Any, model: Any, prefix: str) -> Any:
    """Return a mode of torch that writes down every operation; its class is made here, since torch is optional."""
    modes = importlib.import_module("torch.utils._python_dispatch")
    names: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        names.setdefault(id(tensor), name)

    class Recorder(modes.TorchDispatchMode):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = _OUTSIDE
            self.lines: dict[int, list[Line]] = {_OUTSIDE: []}
            self.arguments: dict[int, dict[str, Origin]] = {}
            self.origins: dict[int, Origin] = {}
            self.constants: dict[int, Any] = {}
            self.kept: list[Any] = []  # an id says which tensor it is for as long as the tensor lives

        def entering(self, number: int) -> Any:
            def enter(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
                self.layer = number
                self.lines[number] = []
                given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
                self.arguments[number] = {
                    name: self.origins[id(value)] for name, value in given.items() if id(value) in self.origins
                }

            return enter

        def leaving(self) -> Any:
            def leave(module: Any, args: Any, kwargs: Any, output: Any) -> None:
                self.layer = _OUTSIDE

            return leave

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
                # A number of the program: what it is matters, not where it was written down.
                self.constants[id(made)] = self.written(args[0])
                self.kept.append(made)
                return made
            lines = self.lines[self.layer]
            lines.append((str(func), self.written(args), self.written(kwargs or {})))
            for number, tensor in enumerate(_tensors(torch, made)):
                self.origins[id(tensor)] = (self.layer, len(lines) - 1, number)
                self.kept.append(tensor)
            return made

        def written(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) in self.origins:
                    return ("tensor", self.origins[id(value)])
                if id(value) in self.constants:
                    return self.constants[id(value)]
                if id(value) in names:
                    own = f"{prefix}.{self.layer}."
                    return ("weight", names[id(value)].replace(own, "layer.", 1))
                self.kept.append(value)
                return ("constant", str(value.dtype), tuple(value.shape), _numbers(value))
            if isinstance(value, Mapping):
                return tuple((name, self.written(each)) for name, each in value.items())
            if isinstance(value, (list, tuple)):
                return tuple(self.written(each) for each in value)
            return repr(value)

    return Recorder()


def _numbers(tensor: Any) -> str:
    fakes = importlib.import_module("torch._subclasses.fake_tensor")
    if isinstance(tensor, fakes.FakeTensor):
        return "unknown"
    with fakes.unset_fake_temporarily():
        return hashlib.sha256(tensor.contiguous().view(-1).numpy().tobytes()).hexdigest()


def _tensors(torch: Any, made: Any) -> Iterator[Any]:
    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, (list, tuple)):
        for each in made:
            yield from _tensors(torch, each)


def _finished(lines: dict[int, list[Line]], arguments: dict[int, dict[str, Origin]], count: int) -> Recording:
    """Say of every tensor whether it is of the same layer, what is passed on, or of the outside."""
    if set(lines) != {_OUTSIDE, *range(count)}:
        raise NotUnderstoodError(OUTSIDE())
    made = Recording(passed=[None] * count)
    # The argument by which a layer gets what the one before passes on.
    slots = [{name for name, origin in arguments[n].items() if origin[0] == n - 1} for n in range(1, count)]
    slot = min(set.intersection(*slots), default=None) if slots else None
    for n in range(count):
        passed = arguments[n].get(slot) if slot is not None else None
        if n and passed is not None:
            made.passed[n - 1] = passed[1:]
        made.layers.append([_relative(line, n, passed) for line in lines[n]])
    for line in lines[_OUTSIDE]:
        for layer, *place in _origins(line):
            if layer != _OUTSIDE:
                if layer != count - 1 or made.passed[layer] not in (None, tuple(place)):
                    raise NotUnderstoodError(OUTSIDE())
                made.passed[layer] = (place[0], place[1])
    last = made.passed[-1]
    made.outside = [_relative(line, _OUTSIDE, last and (count - 1, *last)) for line in lines[_OUTSIDE]]
    return made


def _origins(value: Any) -> Iterator[Origin]:
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] == "tensor":
            yield value[1]
        else:
            for each in value:
                yield from _origins(each)


def _relative(value: Any, layer: int, passed: Origin | None) -> Any:
    if not isinstance(value, tuple):
        return value
    if len(value) != 2 or value[0] != "tensor":
        return tuple(_relative(each, layer, passed) for each in value)
    origin: Origin = value[1]
    if origin == passed:
        return ("passed",)
    if origin[0] in (layer, _OUTSIDE):
        return ("here" if origin[0] == layer else "outside", *origin[1:])
    raise NotUnderstoodError(CROSSING(layer=layer))
