"""Operators of the domain ``ai.graphopt``: one folder, one operator.

Each folder holds what the operator means (its schema and its body in standard ONNX operators), a NumPy reference
written from the definition, and its kernels. A model carries the body, so it runs in any onnxruntime; where graphopt's
library is registered, the kernel takes the node.

A folder with a part ``spec`` is an operator: ``spec/op.py`` holds it. Nothing else
names it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.runtime_ops.foreign import FOREIGN
from graphopt.runtime_ops.library import library_path
from graphopt.runtime_ops.operator import DOMAIN, Body, Operator
from graphopt.runtime_ops.schema import DECODING, Coordinates, Cost, Port, Role, Schema, Signature
from graphopt.util.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir


OPERATORS: Registry[Operator] = Registry(
    __name__,
    kind="operator",
    name_of=lambda member: member.name if isinstance(member, Operator) else None,
    part="spec.op",
)
"""Every operator by its name, as found in the folders."""


def signature_of(node: ir.Node) -> Signature | None:
    """Return what a node's operator reads and makes; ``None`` for one that is neither ours nor in ``FOREIGN``."""
    if node.domain == DOMAIN:
        return OPERATORS[node.op_type].schema if node.op_type in OPERATORS else None
    return FOREIGN.get((node.domain, node.op_type))


def schema_of(node: ir.Node) -> Schema:
    """Return the schema of a node of ours.

    Raises:
        ValueError: the node is of another domain, or of no operator that we have.
    """
    if node.domain != DOMAIN or node.op_type not in OPERATORS:
        raise ValueError(f"{node.domain}::{node.op_type} is no operator of {DOMAIN}: it has {', '.join(OPERATORS)}")
    return OPERATORS[node.op_type].schema


def port(node: ir.Node, name: str) -> ir.Value | None:
    """Return an input of a node by its name; ``None`` where it is left out.

    Raises:
        ValueError: what the operator of the node reads is not stated, or it has no input of that name.
    """
    signature = signature_of(node)
    if signature is None:
        raise ValueError(f"what {node.domain}::{node.op_type} reads is stated neither by OPERATORS nor by FOREIGN")
    index = signature.index(name)
    return node.inputs[index] if index < len(node.inputs) else None


def ports_of(node: ir.Node, *roles: Role) -> list[ir.Value]:
    """Return the inputs of a node that have one of the roles and are there, in order; none for an unknown operator."""
    signature = signature_of(node)
    if signature is None:
        return []
    values = (value for each, value in zip(signature.inputs, node.inputs, strict=False) if each.role in roles)
    return [value for value in values if value is not None]


def port_at(node: ir.Node, index: int) -> Port | None:
    """Return what an input of a node is; ``None`` where its operator is not known, or has no such input."""
    signature = signature_of(node)
    return None if signature is None else signature.input(index)


def calls_of(part: ir.Graph | ir.Function) -> list[ir.Node]:
    """Return the nodes of a graph or a function that are of no standard operator."""
    return part.calls if isinstance(part, Body) else [node for node in part.all_nodes() if node.domain]


@contextlib.contextmanager
def bodies_aside(model: ir.Model) -> Iterator[None]:
    """Take the bodies of our operators out of a model meanwhile, for a pass of `onnx_ir` that rewrites all functions.

    Models share them, and `verify` compares them with the originals.
    """
    bodies = {key: model.functions.pop(key) for key in list(model.functions) if key[0] == DOMAIN}
    try:
        yield
    finally:
        model.functions.update(bodies)


def declare(model: ir.Model) -> None:
    """Put the body of each of our operators that the graph or another body uses into the model, and import the domain.

    Where an operator has overloads, its nodes are told which. A body that was put in before, and is as it was then,
    stays. Bodies of the domain that no node uses any more are taken out, and the import with the last of them.

    Raises:
        InputError: the graph has a node of the domain that is no operator of ours, or one whose attributes allow no
            body; names it.
    """
    waiting = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    unknown = next((node for node in waiting if node.op_type not in OPERATORS), None)
    if unknown is not None:
        raise InputError(
            f"{DOMAIN} has no operator {unknown.op_type}; it has {', '.join(OPERATORS)}",
            node=unknown.name,
            remedy="a newer graphopt may have it",
        )
    if waiting:
        model.opset_imports[DOMAIN] = max(OPERATORS[node.op_type].version for node in waiting)
    else:
        model.opset_imports.pop(DOMAIN, None)
    opset = model.opset_imports[""]
    bodies: dict[ir.OperatorIdentifier, ir.Function] = {}
    while waiting:
        node = waiting.pop()
        operator = OPERATORS[node.op_type]
        try:
            node.overload = operator.overload_of(node)
            if node.op_identifier() not in bodies:
                body = model.functions.get(node.op_identifier())
                if body is None or not operator.is_body(body, node, opset):
                    body = operator.body_of(node, opset)
                bodies[node.op_identifier()] = body
                waiting += [inner for inner in calls_of(body) if inner.domain == DOMAIN]
        except ValueError as error:
            raise InputError(
                f"{DOMAIN}::{node.op_type} has no body for its attributes: {error}", node=node.name
            ) from error
    for key in [key for key in model.functions if key[0] == DOMAIN and key not in bodies]:
        del model.functions[key]
    model.functions.update(sorted(bodies.items()))


__all__ = [
    "DECODING",
    "DOMAIN",
    "FOREIGN",
    "OPERATORS",
    "Coordinates",
    "Cost",
    "Operator",
    "Port",
    "Role",
    "Schema",
    "Signature",
    "bodies_aside",
    "calls_of",
    "declare",
    "library_path",
    "port",
    "port_at",
    "ports_of",
    "schema_of",
    "signature_of",
]
