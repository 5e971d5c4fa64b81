"""Cleanup: one spelling for what exporters spell in several ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
)

from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import replace

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

PRUNING = Rule("canonicalize.pruned", "removed {nodes} constant, identity, repeated or unused node(s)")
INVARIANTS = Rule("canonicalize.invariants", "{states} state(s) that no step changes are read from outside of the Loop")
GEMM_SPLIT = Rule("canonicalize.gemm-split", "Gemm became MatMul and Add")
GEMM_SCALES = Rule("canonicalize.gemm-scales", "Gemm with alpha or beta other than 1")
GEMM_TRANSPOSES = Rule("canonicalize.gemm-transposes", "Gemm that transposes its activation")


def merge_and_prune(model: ir.Model, ledger: Ledger) -> None:
    """Constants become initializers; identities, repeated computations and unused nodes go."""
    before = len(list(model.graph))
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _drop_identities(model)
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)
    count = before - len(list(model.graph))
    if count:
        ledger.report_change("graph", PRUNING(nodes=count))


def _drop_identities(model: ir.Model) -> None:
    """Let what reads an ``Identity`` read its input, in graphs, subgraphs and functions.

    One that makes the output of a graph, or of a branch, stays where its input is a port or a constant, an output of
    that graph already, or a value of a graph outside: each output needs a value of its own.
    """
    for graph in (*model.graphs(), *(function.graph for function in model.functions.values())):
        for node in list(graph):
            if (node.domain, node.op_type) != ("", "Identity") or node.inputs[0] is None:
                continue
            source, output = node.inputs[0], node.outputs[0]
            is_output = output.is_graph_output()
            producer = source.producer()
            if is_output and (producer is None or producer.graph is not node.graph or source.is_graph_output()):
                continue
            if source.type is None:
                source.type = output.type
            if source.shape is None:
                source.shape = output.shape
            output.replace_all_uses_with(source, replace_graph_outputs=True)
            if is_output:
                source.name = output.name
            graph.remove(node, safe=True)


def read_invariants_outside(model: ir.Model, ledger: Ledger) -> None:
    """Let the body of a ``Loop`` read from outside what each step hands on as it is, such as weights of an LSTM.

    before::

        y, w = Loop(count, go_on, y0, w0)      body(i, go_on, y, w): go_on', MatMul(y, w), w

    after::

        y = Loop(count, go_on, y0)             body(i, go_on, y): go_on', MatMul(y, w0)
    """
    for node in list(model.graph.all_nodes()):
        if (node.domain, node.op_type) != ("", "Loop"):
            continue
        body, inputs, outputs = node.attributes["body"].as_graph(), list(node.inputs), list(node.outputs)
        count = 0
        for state in reversed(range(len(inputs) - 2)):
            initial, inner, last = inputs[2 + state], body.inputs[2 + state], _source(body.outputs[1 + state])
            if initial is None or last is not inner or outputs[state].is_graph_output():
                continue
            if any(output is inner for index, output in enumerate(body.outputs) if index != 1 + state):
                continue  # an output of the body has to be a value of the body
            body.outputs.pop(1 + state)
            body.inputs.pop(2 + state)
            inputs.pop(2 + state)
            inner.replace_all_uses_with(initial)
            outputs.pop(state).replace_all_uses_with(initial)
            count += 1
        if not count:
            continue
        loop = ir.node("Loop", inputs, dict(node.attributes), num_outputs=len(outputs), name=node.name)
        replace(node, loop, dict(zip(outputs, loop.outputs, strict=True)))
        ledger.changed(loop, INVARIANTS(states=count))


def _source(value: ir.Value) -> ir.Value:
    """Return what ``value`` is, where it is an identity of something."""
    node = value.producer()
    is_identity = node is not None and (node.domain, node.op_type) == ("", "Identity")
    return node.inputs[0] if is_identity and node.inputs[0] is not None else value  # type: ignore[union-attr]


def split_gemm(model: ir.Model, ledger: Ledger) -> None:
    """``Gemm(x, W, b)`` -> ``Add(MatMul(x, W), b)``, with ``transB`` carried out on the stored weight.

    Left alone, with the reason: a Gemm that scales, or transposes what is computed at run time.
    """
    for node in list(model.graph):
        if node.op_type != "Gemm":
            continue
        attributes = node.attributes
        if attributes.get_float("alpha", 1.0) != 1.0 or attributes.get_float("beta", 1.0) != 1.0:
            ledger.skipped(node, GEMM_SCALES())
            continue
        if attributes.get_int("transA", 0):
            ledger.skipped(node, GEMM_TRANSPOSES())
            continue
        inputs = list(node.inputs)
        right = inputs[1]
        new: list[ir.Node] = []
        if attributes.get_int("transB", 0):
            new.append(ir.node("Transpose", [right], {"perm": [1, 0]}))
            right = new[-1].outputs[0]
        product = ir.node("MatMul", [inputs[0], right], name=node.name)
        product.outputs[0].type, product.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        new.append(product)
        if len(inputs) > 2 and inputs[2] is not None:
            new.append(ir.node("Add", [product.outputs[0], inputs[2]]))
        replace(node, new)
        ledger.changed(product, GEMM_SPLIT(), [node])
