"""Every operator that we know, ours and those of others, and what the inputs of its nodes are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.runtime_ops.foreign import FOREIGN
from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.util.registry import Registry

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.runtime_ops.schema import Port, Role, Schema, Signature

OPERATORS: Registry[Operator] = Registry(
    "graphopt.runtime_ops",
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
    values = (
        value for input_port, value in zip(signature.inputs, node.inputs, strict=False) if input_port.role in roles
    )
    return [value for value in values if value is not None]


def port_at(node: ir.Node, index: int) -> Port | None:
    """Return what an input of a node is; ``None`` where its operator is not known, or has no such input."""
    signature = signature_of(node)
    return None if signature is None else signature.input(index)
