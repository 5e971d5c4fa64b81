"""An operator of the domain ``ai.graphopt``: its schema, and what it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from graphopt.runtime_ops.schema import DOMAIN, Cost, Schema, attributes_of

_Key = tuple[Callable[..., ir.Function], int, str]


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
        without_kernel: parts of overloads whose nodes the kernels refuse; a model with such a node runs by bodies.
    """

    schema: Schema
    function: Callable[..., ir.Function]
    reference: Callable[..., Any]
    overload: Callable[..., str] | None = None
    without_kernel: Sequence[str] = ()

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
        if self.schema.takes(len(node.inputs)):
            self.schema.infer(node)
        return node

    def overload_of(self, node: ir.Node) -> str:
        """Return the overload of a node of this operator; "" where one body serves all.

        Raises:
            ValueError: the body depends on attributes, and there is none for these.
        """
        return "" if self.overload is None else self.overload(**attributes_of(node))

    def body_of(self, node: ir.Node, opset: int) -> Body:
        """Return the body of a node of this operator, as a function of the given ONNX opset; models share it.

        Raises:
            ValueError: as :meth:`overload_of`.
        """
        key = (self.function, opset, self.overload_of(node))
        body = _BODIES.get(key)
        if body is None or not body.is_as_made():
            if len(_BODIES) == _MOST_BODIES:
                del _BODIES[next(iter(_BODIES))]
            function = self.function(opset) if self.overload is None else self.function(opset, **attributes_of(node))
            body = _BODIES[key] = Body(function, key)
        return body

    def is_body(self, body: ir.Function, node: ir.Node, opset: int) -> bool:
        """Return whether ``body`` was made by :meth:`body_of` for such a node, and is as it was made.

        One that was read from a file was not: it counts as another even where it is the same.

        Raises:
            ValueError: as :meth:`overload_of`.
        """
        key = (self.function, opset, self.overload_of(node))
        return isinstance(body, Body) and body.made_for == key and body.is_as_made()


class Body(ir.Function):
    """The body of an operator as it was made. Models share it and nothing changes it, so its copy is itself.

    Args:
        made: what it is made of, whose nodes it takes.
        made_for: what makes its operator's bodies, the ONNX opset, and the overload.

    Attributes:
        calls: its nodes that are of no standard operator.
    """

    def __init__(self, function: ir.Function, made_for: _Key) -> None:
        super().__init__(*function.identifier(), graph=function.graph, attributes=function.attributes)
        # `optimize` ends with this pass, which must find nothing to rename.
        graph = ir.Graph([], [], nodes=[], opset_imports=dict(function.opset_imports))
        NameFixPass()(ir.Model(graph, ir_version=10, functions=[self]))
        self.made_for = made_for
        self.calls = [node for node in self.all_nodes() if node.domain]
        self._first_fingerprint = _fingerprint(self)

    def clone(self, deep_copy: bool = False) -> Body:
        """Return itself."""
        del deep_copy
        return self

    def is_as_made(self) -> bool:
        """Return whether nothing was changed in it."""
        return _fingerprint(self) == self._first_fingerprint


def _fingerprint(body: ir.Function) -> list[object]:
    """Return all that a body says: its ports, opsets, metadata, attributes and nodes, in order."""
    facts: list[object] = [body.identifier(), dict(body.opset_imports), list(body.attributes), body.doc_string]
    facts += [dict(body.metadata_props), _ports(body.inputs), _ports(body.outputs)]
    for node in body.all_nodes():
        facts += [node.op_identifier(), node.name, node.doc_string, dict(node.metadata_props)]
        facts += [[value and value.name for value in node.inputs], _ports(node.outputs)]
        for name, attribute in node.attributes.items():
            inner = _graphs_of(attribute)
            facts += [name, [(_ports(graph.inputs), _ports(graph.outputs)) for graph in inner] or id(attribute)]
    return facts


def _graphs_of(attribute: ir.Attr) -> Sequence[ir.Graph]:
    if attribute.is_ref():
        return ()
    if attribute.type == ir.AttributeType.GRAPHS:
        return attribute.as_graphs()
    return (attribute.as_graph(),) if attribute.type == ir.AttributeType.GRAPH else ()


def _ports(values: Sequence[ir.Value]) -> list[object]:
    return [(value.name, value.type, value.shape) for value in values]


# Building a body of 900 nodes takes 0.27 s, and passes ask for the same one again and again.
_BODIES: dict[_Key, Body] = {}
_MOST_BODIES = 32


__all__ = ["DOMAIN", "Body", "Cost", "Operator"]
