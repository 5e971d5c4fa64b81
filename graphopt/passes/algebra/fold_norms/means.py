"""Means of LayerNormalizations move backward, into the weights that write what they normalize."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.bases.axes import Axis, Basis
from graphopt.analysis.bases.search import find_bases
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import replace
from graphopt.graph.weights import Center, Expression, own_input, rewrite, weight_of

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

AXIS_CENTERED = Rule("fold_norms.centered", "axis {axis} centered, for the norms that read basis {basis}")
MEAN_FOLDED = Rule("fold_norms.mean-folded", "its mean moved into the weights before it; it is an RMSNormalization now")
KEEPS_MEAN = Rule("fold_norms.keeps-mean", "it keeps its mean: {why}")
SPANS_MORE = Rule("fold_norms.spans-more", "{norm} takes its mean over more than the last axis")
MEAN_READ = Rule("fold_norms.mean-read", "something reads the mean or deviation that {norm} computes")
FLOWS_BACK = Rule("fold_norms.flows-back", "what {norm} computes flows back into the basis, with a mean of its own")
READ_WITHOUT_NORM = Rule(
    "fold_norms.read-without-norm", "{reader} reads the same basis without a norm, and would see the mean missing"
)
READ_AS_IT_IS = Rule("fold_norms.read-as-it-is", "{reader} reads the same basis: {why}")
NEVER_WRITTEN = Rule("fold_norms.never-written", "no weight writes what it normalizes")


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
                ledger.skipped(node, KEEPS_MEAN(why=reason))
            continue
        for site in basis.writers:
            weight = own_input(site.node, site.input)
            assert basis.width is not None
            rewrite(weight, partial(_centered_expression, axis=site.axis, starts=tuple(site.starts), width=basis.width))
            ledger.changed(weight, AXIS_CENTERED(axis=site.axis, basis=basis.name))
        for node in inside:
            _become_root_mean_square(node, ledger)


def _centered_expression(expression: Expression, axis: int, starts: tuple[int, ...], width: int) -> Expression:
    return Center(expression, axis % len(expression.shape), starts, width)


def _reason_to_stay(basis: Basis, norms: list[ir.Node]) -> Fact | None:
    for node in norms:
        if not _reduces_last(node):
            return SPANS_MORE(norm=node.name)
        if any(extra.uses() for extra in node.outputs[1:]):
            return MEAN_READ(norm=node.name)
        if _lies_in(node.outputs[0], basis):
            return FLOWS_BACK(norm=node.name)
    if basis.readers:
        return READ_WITHOUT_NORM(reader=basis.readers[0].node.name)
    names = {node.name for node in norms}
    for pin in basis.pins:
        if pin.node not in names:
            return READ_AS_IT_IS(reader=pin.node, why=pin.reason)
    if not basis.writers or basis.width is None:
        return NEVER_WRITTEN()
    return None


def _lies_in(value: ir.Value | None, basis: Basis) -> bool:
    if value is None or value.shape is None:
        return False
    return Axis(value.name or "", len(value.shape) - 1) in basis.axes


def _reduces_last(node: ir.Node) -> bool:
    x = node.inputs[0]
    return x is not None and x.shape is not None and node.attributes.get_int("axis", -1) in (-1, len(x.shape) - 1)


def _become_root_mean_square(node: ir.Node, ledger: Ledger) -> None:
    gain = weight_of(node, 1)
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    norm_node = ir.node("RMSNormalization", [node.inputs[0], gain], attributes, name=node.name)
    new, name = [norm_node], node.outputs[0].name
    if bias is not None:
        norm_node.outputs[0].type, norm_node.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        new.append(ir.node("Add", [norm_node.outputs[0], bias], name=f"{node.name}.add_bias"))
    replace(node, new)
    if bias is not None:
        norm_node.outputs[0].name = f"{name}.unbiased"
    ledger.changed(norm_node, MEAN_FOLDED(), [node])
