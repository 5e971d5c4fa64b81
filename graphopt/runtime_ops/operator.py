"""What every operator of the domain ``ai.graphopt`` states about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

DOMAIN = "ai.graphopt"


@dataclass(frozen=True)
class Cost:
    """What one call takes: arithmetic operations, and bytes read and written."""

    operations: int
    bytes: int


@dataclass(frozen=True)
class Operator:
    """One operator of the domain :data:`DOMAIN`.

    Attributes:
        name: its name in the graph.
        version: version of its meaning; a file states the version of the domain that it was made with.
        function: makes its body, a model-local function of standard operators of the given ONNX opset; where the
            operator has overloads, from the attributes of a node by name as well.
        reference: what it computes, in NumPy, written from the definition; inputs in order, attributes by name. An
            operator with several outputs returns a tuple.
        cost: what a call takes, from the shapes of its inputs.
        overload: where the nodes of its body depend on attributes, names the body for a set of them: the overload of
            the function, and of the nodes that it is for.
    """

    name: str
    version: int
    function: Callable[..., ir.Function]
    reference: Callable[..., Any]
    cost: Callable[[Sequence[Sequence[int]]], Cost]
    overload: Callable[..., str] | None = None

    def node(
        self, inputs: Sequence[ir.Value | None], attributes: dict[str, Any] | None = None, *, name: str | None = None
    ) -> ir.Node:
        """Return a node of this operator."""
        return ir.node(self.name, inputs, attributes, domain=DOMAIN, version=None, name=name)

    def overload_of(self, node: ir.Node) -> str:
        """Return the overload of a node of this operator; "" where one body serves all.

        Raises:
            ValueError: the body depends on attributes, and there is none for these.
        """
        return "" if self.overload is None else self.overload(**_attributes(node))

    def body_of(self, node: ir.Node, opset: int) -> ir.Function:
        """Return the body of a node of this operator, as a function of the given ONNX opset.

        Raises:
            ValueError: as :meth:`overload_of`.
        """
        return self.function(opset) if self.overload is None else self.function(opset, **_attributes(node))


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}
