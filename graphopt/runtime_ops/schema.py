"""How an operator is described: its ports by name and role, its attributes, shapes, cost, effect and precision.

Whoever needs one of these facts asks the schema of a node's operator; nobody else counts inputs. A :class:`Signature`
says what is read where, for operators of any domain; a :class:`Schema` is all that an operator of ours states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DOMAIN = "ai.graphopt"

Dims = tuple[Any, ...]
"""The dimensions of a tensor: numbers, and whatever stands for those that a graph leaves open."""


class Role(Enum):
    """What an input or output is for."""

    DATA = "activations, computed at run time"
    CODES = "codes of a weight"
    SCALES = "what codes are multiplied by"
    ZERO_POINTS = "what is subtracted from codes or their values, or added behind their scales"
    TABLE = "the values that codes stand for"
    BIAS = "numbers that are added to a product"
    MATRIX = "a small constant matrix, such as a rotation"
    GROUPS = "which group of scales a row of a weight belongs to"
    INDICES = "which rows to take"
    LENGTH = "numbers of tokens"
    SINKS = "logits without a value that take part in a softmax"
    STATE = "a part of a cache, which comes back as an output"


DECODING = frozenset({Role.SCALES, Role.ZERO_POINTS, Role.TABLE, Role.GROUPS})
"""What turns codes into numbers."""


class Coordinates(Enum):
    """What an operator does to the coordinates of its data, as :mod:`graphopt.analysis.bases.rules` treats it."""

    OBSERVES = "looks at single coordinates: their basis has to stay"
    ROTATES = "turns the last axis by an orthogonal map"
    ROUNDS = "rounds its data, which codes behind it were chosen for"
    DECODES = "makes a weight of codes, which were chosen for these coordinates"
    WEIGHS = "sums up whole values, which all else weighs: coordinates of values pass, those of all else stay"
    MULTIPLIES = "multiplies by codes, which were chosen for these coordinates of data and result"


@dataclass(frozen=True)
class Cost:
    """What one call takes: arithmetic operations, and bytes read and written."""

    operations: int
    bytes: int


@dataclass(frozen=True)
class Port:
    """An input or an output.

    Attributes:
        name: as the documentation of the operator calls it.
        role: what it is for.
        types: what it may hold; empty for any type.
        same_type_as: the input whose type it has; ``None`` where it has a type of its own.
        placeholder: elements of the tensor that says "absent", where there is one: inputs of ours are never left out,
            as bodies for older opsets could not ask whether one is there.
        is_trailing: whether a node may end before it: it is among the last inputs, and an attribute says whether it is
            there.
        columns: the axis that counts columns of a product, in whole tiles; tensors are joined along it where products
            are merged.
        bits: of codes that are packed into bytes, how many each takes, from the shape of the tensor and the attributes
            of the node; ``None`` where each code is an element of the tensor.
    """

    name: str
    role: Role
    types: tuple[ir.DataType, ...] = ()
    same_type_as: str | None = None
    placeholder: int | None = None
    is_trailing: bool = False
    columns: int | None = None
    bits: Callable[[Dims, Mapping[str, Any]], int] | None = None

    def is_absent(self, value: ir.Value | None) -> bool:
        """Return whether ``value`` says that this input is absent."""
        if value is None:
            return True
        if self.placeholder is None or value.shape is None:
            return False
        sizes = [size for size in value.shape if isinstance(size, int)]
        if 0 in sizes:
            return self.placeholder == 0
        return len(sizes) == len(value.shape) and prod(sizes) == self.placeholder

    def type_from(self, inputs: Mapping[str, ir.Value | None]) -> ir.DataType | None:
        """Return the type that an output has beside these inputs; ``None`` where that is not known."""
        if self.same_type_as is None:
            return self.types[0] if len(self.types) == 1 else None
        value = inputs.get(self.same_type_as)
        return None if value is None else value.dtype


def as_given(attributes: Mapping[str, Any]) -> str | None:
    """Return ``None``: the operator computes with its data as they are."""
    del attributes
    return None


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What an operator reads and makes.

    Attributes:
        domain: of the operator.
        name: its type in the graph.
        inputs: in order.
        outputs: in order.
        coordinates: what it does to the coordinates of its data.
        precision: what it rounds its data to, from its attributes, in the words of a report; ``None`` for nothing.
    """

    domain: str = DOMAIN
    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    coordinates: Coordinates = Coordinates.OBSERVES
    precision: Callable[[Mapping[str, Any]], str | None] = as_given

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, in order."""
        return tuple(port.name for port in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs, in order."""
        return tuple(port.name for port in self.outputs)

    @property
    def data(self) -> Port | None:
        """The first input of activations, whose type the result has; ``None`` where there is none."""
        return next((port for port in self.inputs if port.role is Role.DATA), None)

    @property
    def is_product(self) -> bool:
        """Whether it multiplies activations by a matrix of codes."""
        return self.coordinates is Coordinates.MULTIPLIES

    def index(self, name: str) -> int:
        """Return the place of an input.

        Raises:
            ValueError: there is no input of that name.
        """
        if name not in self.input_names:
            raise ValueError(f"{self.name} has no input {name}; it has {', '.join(self.input_names)}")
        return self.input_names.index(name)

    def output_index(self, name: str) -> int:
        """Return the place of an output.

        Raises:
            ValueError: there is no output of that name.
        """
        if name not in self.output_names:
            raise ValueError(f"{self.name} has no output {name}; it has {', '.join(self.output_names)}")
        return self.output_names.index(name)

    def of_role(self, *roles: Role) -> tuple[str, ...]:
        """Return the names of the inputs with one of these roles, in order."""
        return tuple(port.name for port in self.inputs if port.role in roles)

    def input(self, index: int) -> Port | None:
        """Return the input in a place; ``None`` where the signature has none."""
        return self.inputs[index] if index < len(self.inputs) else None

    def takes(self, count: int) -> bool:
        """Return whether a node may have so many inputs."""
        return count <= len(self.inputs) and all(port.is_trailing for port in self.inputs[count:])

    def follows_data(self, port: Port | None) -> bool:
        """Return whether a port has the type of the activations, whatever that is."""
        return port is not None and self.data is not None and (port is self.data or port.same_type_as == self.data.name)

    def in_order(self, values: Mapping[str, ir.Value | None]) -> list[ir.Value | None]:
        """Return inputs that are given by name in order; those that are not given are left out, as ``None``.

        Inputs at the end that nodes may do without are not in it where they are not given.

        Raises:
            ValueError: there is no input of a name.
        """
        for name in values:
            self.index(name)
        ports = [port for port in self.inputs if not port.is_trailing or port.name in values]
        return [values.get(port.name) for port in ports]


@dataclass(frozen=True, kw_only=True)
class Schema(Signature):
    """All that an operator of ours states about a node.

    Attributes:
        version: of its meaning; a file states the version of the domain that it was made with.
        attributes: the type of each attribute, in the order of its body's parameters.
        optional: the type of each attribute that a node may leave out, behind the others; a body that reads one is an
            overload.
        shapes: the shapes of all outputs, from those of the inputs and the attributes, each by name.
        cost: what a call takes, from the shapes of its inputs in order.
    """

    version: int
    attributes: Mapping[str, ir.AttributeType]
    shapes: Callable[[Mapping[str, Dims], Mapping[str, Any]], Sequence[Dims]]
    cost: Callable[[Sequence[Sequence[int]]], Cost]
    optional: Mapping[str, ir.AttributeType] = field(default_factory=dict)

    @property
    def parameters(self) -> list[ir.Attr]:
        """The attributes that no node leaves out, as a function declares them."""
        return [ir.Attr(name, kind, None) for name, kind in self.attributes.items()]

    def parameters_for(self, overload: str) -> list[ir.Attr]:
        """Return what the body of an overload declares: also the optional attributes that it is named after."""
        optional = [ir.Attr(name, self.optional[name], None) for name in overload.split("_") if name in self.optional]
        return [*self.parameters, *optional]

    def infer(self, node: ir.Node) -> None:
        """Set types and shapes of the outputs of ``node`` where those of its inputs are known."""
        values = dict(zip(self.input_names, node.inputs, strict=False))
        for port, output in zip(self.outputs, node.outputs, strict=False):
            dtype = port.type_from(values)
            if dtype is not None:
                output.type = ir.TensorType(dtype)  # copies of a graph share types: none is edited
        shapes_by_name = {name: tuple(value.shape) for name, value in values.items() if value and value.shape}
        if all(port.is_trailing or port.name in shapes_by_name for port in self.inputs):
            shapes = self.shapes(shapes_by_name, attributes_of(node))
            for output, dims in zip(node.outputs, shapes, strict=False):
                output.shape = ir.Shape(dims)


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of a node by name."""
    return {name: attribute.value for name, attribute in node.attributes.items()}
