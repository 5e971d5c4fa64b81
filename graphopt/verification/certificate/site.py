"""One node of the graph after beside its counterpart before: what a rule is given, and how it says no."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import onnx_ir as ir

from graphopt.verification.certificate.coordinates import Tag
from graphopt.verification.certificate.correspondence import inputs_of
from graphopt.verification.certificate.reasons import SHAPE_UNKNOWN

if TYPE_CHECKING:
    from graphopt.graph.diagnostics import Fact
    from graphopt.verification.certificate.rotations import Rotations

Dims = tuple[int | str | None, ...]
Pair = tuple[ir.TensorProtocol, ir.TensorProtocol]


class RefusalError(Exception):
    """A node does not carry the coordinates at its inputs to coordinates at its outputs.

    Args:
        reason: why not.
        guess: coordinates of the outputs with which to go on, so that the first fault is where the fault is.
        tensor: the tensor at fault.
    """

    def __init__(self, reason: Fact, guess: Sequence[Tag] = (), tensor: str | None = None) -> None:
        super().__init__(str(reason))
        self.reason, self.guess, self.tensor = reason, list(guess), tensor


@dataclass
class Site:
    """What a rule may look at.

    Attributes:
        node: the node of the graph after.
        before: its counterpart.
        tags: the coordinates of each input of ``node``; ``None`` for constants, and for inputs that are not there.
        claims: the coordinates claimed of each output.
        constants: by input, the tensors before and after, for inputs that are constants.
        rotations: what labels mean.
        fuse: checks a fused weight, given its input, the map of its rows and that of its columns.
        fuse_entries: checks a constant that is in other coordinates itself, given its input and its labels.
        fused: the constants that a rule has checked; all others must be what they were.
    """

    node: ir.Node
    before: ir.Node
    tags: list[Tag]
    claims: list[Tag]
    constants: dict[int, Pair]
    rotations: Rotations
    fuse: Callable[[Site, int, Tag, Tag], None]
    fuse_entries: Callable[[Site, int, Tag], None]
    fused_inputs: set[int] = field(default_factory=set)

    def input_dims(self, index: int) -> Dims | None:
        """Return the shape of an input, as the graph before states it."""
        if index in self.constants:
            return tuple(self.constants[index][0].shape.numpy())
        value = self.before.inputs[index]
        return None if value is None else dims_of(value)

    def output_dims(self, index: int = 0) -> Dims:
        """Return the shape of an output, as the graph before states it."""
        dims = dims_of(self.before.outputs[index])
        if dims is None:
            self.refuse(SHAPE_UNKNOWN(tensor=self.before.outputs[index].name))
        return dims

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of an output with 1 for symbolic dimensions."""
        return static(self.output_dims(index))

    def attribute(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        return self.node.attributes.get_int(name, default)

    def name(self, index: int) -> str:
        """Return the name of an input, those of subgraphs included."""
        value = (*inputs_of(self.node), None)[index]
        return "?" if value is None else value.name or "?"

    def tag(self, index: int) -> Tag:
        """Return the coordinates of an input that may not be there."""
        return self.tags[index] if index < len(self.tags) else None

    def refuse(self, reason: Fact, tensor: str | None = None) -> NoReturn:
        """Raise :class:`RefusalError`; guess that coordinates pass from the first input that has the outputs' shape."""
        guess: list[Tag] = []
        for output, claim in zip(self.before.outputs, self.claims, strict=True):
            dims = dims_of(output)
            fitting = (t for t in self.tags if t is not None and dims is not None and t.shape == static(dims))
            guess.append(claim if claim is not None else next(fitting, None))
        raise RefusalError(reason, guess, tensor)


Rule = Callable[[Site], list[Tag]]


def dims_of(value: ir.Value) -> Dims | None:
    """Return the shape of a value: numbers, names, and ``None`` for dimensions without a name."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def static(dims: Dims) -> tuple[int, ...]:
    """Return ``dims`` with 1 for symbolic dimensions."""
    return tuple(dim if isinstance(dim, int) else 1 for dim in dims)


def text_of(dims: Dims | None) -> str:
    """Write a shape down."""
    return "an unknown shape" if dims is None else f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"
