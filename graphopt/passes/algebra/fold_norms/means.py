"""Means of LayerNormalizations move backward, into the weights that write what they normalize."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from graphopt.analysis.axes import Axis, Basis
from graphopt.analysis.bases import find_bases
from graphopt.passes.context import Ledger
from graphopt.weights import Centered, Expression, own, rewrite, weight_of


def fold_means(model: ir.Model, ledger: Ledger) -> None:
    """Center what writes a basis that only LayerNormalizations read, and make these RMSNormalizations."""
    norms = {node.name: node for node in model.graph if node.op_type == "LayerNormalization"}
    if not norms:
        return
    for basis in find_bases(model.graph):
        inside = [node for node in norms.values() if _lies_in(node.inputs[0], basis)]
        if not inside:
            continue
        reason = _reason_to_stay(basis, inside)
        if reason is not None:
            for node in inside:
                ledger.skipped(node, f"it keeps its mean: {reason}")
            continue
        for site in basis.writers:
            weight = own(site.node, site.input)
            assert basis.width is not None
            rewrite(weight, partial(_centered, axis=site.axis, starts=tuple(site.starts), width=basis.width))
            ledger.changed(weight, f"axis {site.axis} centered, for the norms that read basis {basis.name}")
        for node in inside:
            _become_root_mean_square(model.graph, node, ledger)


def _centered(of: Expression, axis: int, starts: tuple[int, ...], width: int) -> Expression:
    return Centered(of, axis % len(of.shape), starts, width)


def _reason_to_stay(basis: Basis, norms: list[ir.Node]) -> str | None:
    for node in norms:
        if not _reduces_last(node):
            return f"{node.name} takes its mean over more than the last axis"
        if any(extra.uses() for extra in node.outputs[1:]):
            return f"something reads the mean or deviation that {node.name} computes"
        if _lies_in(node.outputs[0], basis):
            return f"what {node.name} computes flows back into the basis, with a mean of its own"
    if basis.readers:
        return f"{basis.readers[0].node.name} reads the same basis without a norm, and would see the mean missing"
    names = {node.name for node in norms}
    for pin in basis.pins:
        if pin.node not in names:
            return f"{pin.node} reads the same basis: {pin.reason}"
    if not basis.writers or basis.width is None:
        return "no weight writes what it normalizes"
    return None


def _lies_in(value: ir.Value | None, basis: Basis) -> bool:
    if value is None or value.shape is None:
        return False
    return Axis(value.name or "", len(value.shape) - 1) in basis.axes


def _reduces_last(node: ir.Node) -> bool:
    x = node.inputs[0]
    return x is not None and x.shape is not None and node.attributes.get_int("axis", -1) in (-1, len(x.shape) - 1)


def _become_root_mean_square(graph: ir.Graph, node: ir.Node, ledger: Ledger) -> None:
    gain = weight_of(node, 1)
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    made = ir.node("RMSNormalization", [node.inputs[0], gain], attributes, name=node.name)
    old, new = node.outputs[0], made.outputs[0]
    new.type, new.shape, name = old.type, old.shape, old.name
    graph.insert_before(node, made)
    if bias is not None:
        behind = ir.node("Add", [new, bias], name=f"{node.name}.add_bias")
        graph.insert_before(node, behind)
        new.name, new = f"{name}.unbiased", behind.outputs[0]
        new.type, new.shape = old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    old.name, new.name = f"{name}.replaced", name
    ledger.changed(made, "its mean moved into the weights before it; it is an RMSNormalization now", [node])
