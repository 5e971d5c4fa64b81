"""A model is traced by two layers of each kind, and its weights are bound to the graph by name; none is read.

    skeleton.py    a model whose parameters take no memory
    recording.py   what each layer computes, operation by operation
    kinds.py       which layers are of one kind; the model with two of each
    relations.py   how each constant of the graph is made of parameters
    places.py      which node belongs to which layer, and what layers pass on
    graph.py       the graph of a few layers becomes that of all
    symbols.py     dimensions that only one layer knows
    understood.py  what keeps a model from that, as facts

Tracing takes minutes for a model of thirty layers, nearly all of which are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from graphopt.facts import Fact, Rule
from graphopt.models.checkpoint import quiet
from graphopt.models.ports import name_ports
from graphopt.models.trace import export_graph, finish, sample_of
from graphopt.models.unrolling.graph import unroll
from graphopt.models.unrolling.kinds import plan, shortened
from graphopt.models.unrolling.relations import Parameter, Relations
from graphopt.models.unrolling.skeleton import make_skeleton
from graphopt.models.unrolling.understood import NotUnderstoodError
from graphopt.weights import Expression, WeightTensor, expression_of, nodes_below

ALL_TRACED = Rule("unroll.all-traced", "every layer was traced: {why}")


def trace_skeleton(model: Any, source: str) -> tuple[ir.Model, Fact | None]:
    """Trace a model without its weights.

    Args:
        model: a model of transformers, whose parameters may be lazy or on the device ``meta``. They are replaced.
        source: where it came from, for messages.

    Returns:
        A graph as :func:`graphopt.models.trace.trace` makes it, whose constants are expressions over
        :class:`graphopt.models.unrolling.relations.Parameter`; and why all layers were traced, if they were.

    Raises:
        InputError: the exporter fails on it, or a causal language model has no key-value cache.
        NotUnderstoodError: the exporter computes with parameters in a way that is not known.
    """
    make_skeleton(model)
    try:
        with quiet():
            made = plan(model, sample_of(model))
        with shortened(model, made):
            program = _exported(model, source)
        unroll(program, made)
        why = None
    except NotUnderstoodError as error:
        program = _exported(model, source)
        why = ALL_TRACED(why=error.reason)
    finish(program, model, source)
    return program, why


def bind(program: ir.Model, weights: Mapping[str, Expression]) -> None:
    """Put the weights into the graph, in place.

    Args:
        program: as from :func:`trace_skeleton`.
        weights: what each parameter of the model is, by name; those that are tied have one of their names at least.

    Raises:
        ValueError: a parameter is missing, or is of another type or shape.
    """
    for value in program.graph.initializers.values():
        expression = expression_of(value.const_value)
        leaves = {node: weights[node.name] for node in nodes_below(expression) if isinstance(node, Parameter)}
        for leaf, weight in leaves.items():
            if (leaf.shape, leaf.dtype) != (weight.shape, weight.dtype):
                raise ValueError(f"{leaf.name} is {weight.dtype}{weight.shape}, expected {leaf.dtype}{leaf.shape}")
        if leaves:
            bound = leaves[expression] if isinstance(expression, Parameter) else expression.replacing(dict(leaves))
            value.const_value = WeightTensor(bound, value.name)


def _exported(model: Any, source: str) -> ir.Model:
    """Return a graph of all layers that ``model`` has now, its constants as expressions."""
    program = export_graph(model, source)
    relations = Relations(model)
    for value in program.graph.initializers.values():
        expression = relations.of(value)
        if any(isinstance(node, Parameter) for node in nodes_below(expression)):
            value.const_value = WeightTensor(expression, value.name)
    name_ports(program.graph)
    return program
