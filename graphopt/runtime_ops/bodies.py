"""The bodies of our operators in a model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.runtime_ops.operator import DOMAIN, Body
from graphopt.runtime_ops.operators import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx_ir as ir


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
    _import_domain(model, waiting)
    bodies: dict[ir.OperatorIdentifier, ir.Function] = {}
    while waiting:
        waiting += _add_body(bodies, model, waiting.pop())
    for key in [key for key in model.functions if key[0] == DOMAIN and key not in bodies]:
        del model.functions[key]
    model.functions.update(sorted(bodies.items()))


def _import_domain(model: ir.Model, nodes: Sequence[ir.Node]) -> None:
    """Import the version of the domain that these nodes of it need; no nodes need none."""
    unknown = next((node for node in nodes if node.op_type not in OPERATORS), None)
    if unknown is not None:
        raise InputError(
            f"{DOMAIN} has no operator {unknown.op_type}; it has {', '.join(OPERATORS)}",
            node=unknown.name,
            remedy="a newer graphopt may have it",
        )
    if nodes:
        model.opset_imports[DOMAIN] = max(OPERATORS[node.op_type].version for node in nodes)
    else:
        model.opset_imports.pop(DOMAIN, None)


def _add_body(bodies: dict[ir.OperatorIdentifier, ir.Function], model: ir.Model, node: ir.Node) -> list[ir.Node]:
    """Tell a node its overload, add its body where it is not among ``bodies``, and return our nodes in that body."""
    try:
        node.overload = OPERATORS[node.op_type].overload_of(node)
        if node.op_identifier() in bodies:
            return []
        body = bodies[node.op_identifier()] = _body_in(model, node)
    except ValueError as error:
        raise InputError(f"{DOMAIN}::{node.op_type} has no body for its attributes: {error}", node=node.name) from error
    return [inner for inner in calls_of(body) if inner.domain == DOMAIN]


def _body_in(model: ir.Model, node: ir.Node) -> ir.Function:
    """Return the body of a node: the one that the model has, where nothing changed it, or a new one."""
    operator, opset = OPERATORS[node.op_type], model.opset_imports[""]
    body = model.functions.get(node.op_identifier())
    return operator.body_of(node, opset) if body is None or not operator.is_body(body, node, opset) else body
