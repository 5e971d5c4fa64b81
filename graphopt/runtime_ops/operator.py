"""An operator of the domain ``ai.graphopt``: its schema, and what it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphopt.runtime_ops.schema import DOMAIN, Cost, Schema, attributes_of


@dataclass(frozen=True)
class Operator:
    """One operator of the domain :data:`DOMAIN`.

    Attributes:
        schema: its name, version, ports, attributes, shapes, cost, effect and precision.
        function: makes its body, a model-local function of standard operators of the given ONNX opset; where the
            operator has overloads, from the attributes of a node by name as well.
        reference: what it computes, in NumPy, written from the definition; inputs in order, attributes by name. An
            operator with several outputs returns a tuple.
        overload: where the nodes of its body depend on attributes, names the body for a set of them: the overload of
            the function, and of the nodes that it is for.
    """

    schema: Schema
    function: Callable[..., ir.Function]
    reference: Callable[..., Any]
    overload: Callable[..., str] | None = None

    @property
    def name(self) -> str:
        """Its name in the graph."""
        return self.schema.name

    @property
    def version(self) -> int:
        """The version of its meaning."""
        return self.schema.version

    def cost(self, shapes: Sequence[Sequence[int]]) -> Cost:
        """Return what a call takes, from the shapes of its inputs in order."""
        return self.schema.cost(shapes)

    def node(
        self,
        inputs: Sequence[ir.Value | None] | Mapping[str, ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> ir.Node:
        """Return a node of this operator; types and shapes of its outputs are set where those of its inputs are known.

        Args:
            inputs: in order, or by the names that the schema gives them.
            attributes: by name.
            name: of the node.

        Raises:
            ValueError: there is no input of a name.
        """
        values = self.schema.in_order(inputs) if isinstance(inputs, Mapping) else inputs
        outputs = len(self.schema.outputs)
        node = ir.node(self.name, values, attributes, domain=DOMAIN, version=None, name=name, num_outputs=outputs)
        if len(node.inputs) == len(self.schema.inputs):
            self.schema.infer(node)
        return node

    def overload_of(self, node: ir.Node) -> str:
        """Return the overload of a node of this operator; "" where one body serves all.

        Raises:
            ValueError: the body depends on attributes, and there is none for these.
        """
        return "" if self.overload is None else self.overload(**attributes_of(node))

    def body_of(self, node: ir.Node, opset: int) -> ir.Function:
        """Return the body of a node of this operator, as a function of the given ONNX opset; a new one for each call.

        Raises:
            ValueError: as :meth:`overload_of`.
        """
        key = (self.function, opset, self.overload_of(node))
        if key not in _BODIES:
            if len(_BODIES) == _MOST_BODIES:
                del _BODIES[next(iter(_BODIES))]
            _BODIES[key] = (
                self.function(opset) if self.overload is None else self.function(opset, **attributes_of(node))
            )
        return _BODIES[key].clone()


# Building a body of 900 nodes takes 0.27 s and copying it 0.04 s, and passes ask for the same one again and again.
_BODIES: dict[tuple[Callable[..., ir.Function], int, str], ir.Function] = {}
_MOST_BODIES = 32


__all__ = ["DOMAIN", "Cost", "Operator"]
