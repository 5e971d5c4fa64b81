"""Trace a model by a few of its layers, and bind its weights to the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.weights import Expression, Node, WeightTensor, expression_of, nodes_below
from graphopt.models.checkpoint import quiet
from graphopt.models.checkpoint_tensors import Parameter
from graphopt.models.ports import name_ports
from graphopt.models.recurrence import recurrences_as_nodes
from graphopt.models.trace import export_graph, finish, task_of_model, trace
from graphopt.models.unrolling.graph import unroll
from graphopt.models.unrolling.kinds import plan_layers, shorten
from graphopt.models.unrolling.refusals import FEW_LAYERS, RUNNING_VARIANCE, NotUnderstoodError
from graphopt.models.unrolling.relations import Relations
from graphopt.models.unrolling.skeleton import make_skeleton

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphopt.models.loading import LoadedModel
    from graphopt.tasks import Task

ALL_TRACED = Rule("unroll.all-traced", "every layer was traced: {why}")
WITH_WEIGHTS = Rule("unroll.with-weights", "every layer was traced, with all weights in memory: {why}")


# What batch normalization collected in training: the exporter folds it into the weight in front, and says so nowhere.
_VARIANCE = "running_var"


def trace_loaded(checkpoint: LoadedModel, source: str, task: Task | None = None) -> tuple[ir.Model, list[Fact]]:
    """Trace a model by two of its layers of each kind, and bind its weights; where that does not serve, all of it.

    Args:
        checkpoint: the model and its weights by name; the model's parameters are replaced.
        source: where it came from, for messages.
        task: of the graph, where the model has several; by default that of its configuration.

    Returns:
        A graph of opset 23 with the inputs and outputs of its task, and which short ways were not taken, with reasons.

    Raises:
        InputError: the exporter fails on it, or a causal language model has no key-value cache.
        MissingDependencyError: a package that the exporter needs is missing or too old.
    """
    try:
        program, reason = trace_skeleton(checkpoint.model, source, task)
    except NotUnderstoodError as error:
        return trace(checkpoint.runnable(), source, task), [WITH_WEIGHTS(why=error.reason)]
    bind(program, checkpoint.weights)
    return program, [] if reason is None else [ALL_TRACED(why=reason)]


def trace_skeleton(model: Any, source: str, task: Task | None = None) -> tuple[ir.Model, Fact | None]:
    """Trace a model without its weights.

    Args:
        model: a model of transformers, whose parameters may be lazy or on the device ``meta``. They are replaced.
        source: where it came from, for messages.
        task: of the graph, where the model has several; by default that of its configuration.

    Returns:
        A graph as :func:`graphopt.models.trace.trace` makes it, whose constants are expressions over
        :class:`graphopt.models.checkpoint_tensors.Parameter`; and why all layers were traced, unless they were few.

    Raises:
        InputError: the exporter fails on it, or a causal language model has no key-value cache.
        NotUnderstoodError: the exporter computes with parameters in a way that is not known.
    """
    task = task or task_of_model(model)
    variance = next((name for name, _ in model.named_buffers() if name.endswith(_VARIANCE)), None)
    if variance is not None:
        raise NotUnderstoodError(RUNNING_VARIANCE(buffer=variance))
    make_skeleton(model)
    if not task.unrolls:
        program = _export(model, source, task)
        finish(program, model, source, task)
        return program, None
    try:
        with quiet(), recurrences_as_nodes():
            short_plan = plan_layers(model, task.sample(model))
        with shorten(model, short_plan):
            program = _export(model, source, task)
        unroll(program, short_plan)
        reason = None
    except NotUnderstoodError as error:
        program = _export(model, source, task)
        reason = None if error.reason.code == FEW_LAYERS.code else error.reason
    finish(program, model, source, task)
    return program, reason


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
        nodes = nodes_below(expression)
        leaves = [node for node in nodes if isinstance(node, Parameter)]
        if not leaves:
            continue
        bound: dict[Node, Node] = {}
        for leaf in leaves:
            weight = bound[leaf] = weights[leaf.name]
            if (leaf.shape, leaf.dtype) != (weight.shape, weight.dtype):
                raise ValueError(f"{leaf.name} is {weight.dtype}{weight.shape}, not {leaf.dtype}{leaf.shape}")
        value.const_value = WeightTensor(expression.replacing(bound), value.name)


def _export(model: Any, source: str, task: Task) -> ir.Model:
    """Return a graph of all layers that ``model`` has now, its constants as expressions."""
    program = export_graph(model, source, task)
    relations = Relations(model)
    for value in program.graph.initializers.values():
        expression = relations.expression_of(value)
        if any(isinstance(node, Parameter) for node in nodes_below(expression)):
            value.const_value = WeightTensor(expression, value.name)
    name_ports(program.graph, task)
    return program
