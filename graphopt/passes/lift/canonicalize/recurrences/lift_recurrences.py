"""A `Scan` or `Loop` whose step is a linear recurrence becomes ``ai.graphopt::LinearRecurrence``.

before::

    S, o = Scan(S0, q, k, v, g)       {S = Exp(g) S + k v^T;  o = q^T S}                one step for each token

after::

    o, S = LinearRecurrence(q, k, v, g, beta, mask, S0; delta, scale)                   Reshape around it

Tokens stand first, [T, B, H, n], and the operator has rows first, [B, T, H, n]. Rows share nothing, as heads do, so B
rows of H heads are one row of B H heads, [1, T, B H, n]: the same numbers in the same order, and nothing is transposed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, free_name, replace, shared_constant
from graphopt.passes.lift.canonicalize.recurrences.meaning import Operand, Recurrence, is_positive, understand
from graphopt.passes.lift.canonicalize.recurrences.run import NotRunError, Sessions, Step, part_of_steps
from graphopt.passes.lift.canonicalize.recurrences.sequences import Sequences
from graphopt.passes.lift.canonicalize.recurrences.steps import Steps, steps_of
from graphopt.runtime_ops import OPERATORS, declare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.ort.runner import Runner
    from graphopt.passes.context import Context

RECURRENCE_LIFT = Rule(
    "canonicalize.recurrence-lifted", "a {op} whose step is a linear recurrence ({rule}) became LinearRecurrence"
)
NO_RECURRENCE = Rule("canonicalize.no-recurrence", "a {op} that is no linear recurrence: {why}")
SHAPE_UNKNOWN = Rule("canonicalize.recurrence-shape-unknown", "the graph does not state the shape of {tensor}")
NOT_FLOAT = Rule("canonicalize.recurrence-not-float", "{tensor} is {dtype}, and only float is taken")
NOT_RUN = Rule("canonicalize.recurrence-not-run", "onnxruntime cannot run its step on its own ({error})")
DIFFERS = Rule(
    "canonicalize.recurrence-differs", "the operator is off by {off} of the largest number, more than rounding explains"
)

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def lift_recurrences(model: ir.Model, context: Context) -> bool:
    """Lift every recurrence of the graph; return whether there was any."""
    is_changed, ledger = False, context.ledger
    for node in [node for node in model.graph if not node.domain and node.op_type in ("Scan", "Loop")]:
        _separate_outputs(node.attributes["body"].as_graph())
        steps = steps_of(node)
        match = steps if isinstance(steps, Fact) else _prove(steps, context.runner)
        if isinstance(match, Fact):
            ledger.skipped(node, NO_RECURRENCE(op=node.op_type, why=match))
            continue
        assert isinstance(steps, Steps)
        recurrence, ranks = match
        rule = ("gated " if recurrence.decay else "") + ("delta rule" if recurrence.delta else "sum")
        new = _replace(model.graph, steps, recurrence, ranks)
        ledger.changed(new, RECURRENCE_LIFT(op=node.op_type, rule=rule), [node])
        is_changed = True
    return is_changed


def _separate_outputs(body: ir.Graph) -> None:
    """Give each output of a body a value of its own: onnxruntime fills one of two that are the same."""
    for index, value in enumerate(body.outputs):
        if value in body.outputs[:index]:
            copy = ir.node("Identity", [value], name=f"{value.name}.copy{index}")
            copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = copy.name, value.type, value.shape
            body.append(copy)
            body.outputs[index] = copy.outputs[0]


def _prove(steps: Steps, runner: Runner) -> tuple[Recurrence, dict[ir.Value, int]] | Fact:
    """Return the recurrence that the steps are, and the ranks of their values, or why they are none."""
    for value in (steps.initial, *(tokens.outside for tokens in steps.tokens)):
        if value.shape is None or any(isinstance(dim, ir.SymbolicDim) and dim.value is None for dim in value.shape):
            return SHAPE_UNKNOWN(tensor=value.name)
        if value.dtype != _FLOAT:
            return NOT_FLOAT(tensor=value.name, dtype="unknown" if value.dtype is None else value.dtype.name)
    try:
        with Sessions(runner) as sessions:
            step = Step(steps, sessions)
            match = understand(step.run, step.shape, lambda value: is_positive(value, step.positive))
            if isinstance(match, Fact):
                return match
            ranks = {value: array.ndim for value, array in step.values.items()}
            reason = _why_unsound(steps, match, ranks, sessions)
    except NotRunError as error:
        return NOT_RUN(error=str(error).splitlines()[0])
    return (match, ranks) if reason is None else reason


def _why_unsound(
    steps: Steps, recurrence: Recurrence, ranks: Mapping[ir.Value, int], sessions: Sessions
) -> Fact | None:
    """Return how far the operator is from the steps on random tokens, where rounding does not explain it."""
    sequences = Sequences(steps, None, ranks)
    for operand in recurrence.operands:
        reason = sequences.why_not(operand.value) if operand.value is not None else None
        if reason is not None:
            return reason
    part, feeds, length = part_of_steps(steps)
    references = sessions.run(part, feeds)
    copy = steps_of(next(iter(part.graph)), is_part=True)
    assert isinstance(copy, Steps)
    copies = dict(zip(steps.values, copy.values, strict=True))
    _replace(part.graph, copy, recurrence.with_values(copies), {copies[value]: rank for value, rank in ranks.items()})
    declare(part)
    eps = float(np.finfo(np.float32).eps)
    limit = 16 * eps * math.sqrt(recurrence.channels + 8) * length
    for result, reference in zip(sessions.run(part, feeds), references, strict=True):
        distance = float(np.abs(result - reference).max(initial=0)) / max(
            float(np.abs(reference).max(initial=0)), 1e-30
        )
        if result.shape != reference.shape or not distance <= limit:
            return DIFFERS(off=f"{distance:.1e}")
    return None


class _Builder:
    """Makes the nodes around ``LinearRecurrence``.

    Args:
        graph: of the recurrence.
        steps: the recurrence as it was.
        recurrence: what it means.
        ranks: of the values of a step.
    """

    def __init__(self, graph: ir.Graph, steps: Steps, recurrence: Recurrence, ranks: Mapping[ir.Value, int]) -> None:
        self._steps, self._recurrence = steps, recurrence
        self.insert = Inserter(graph, steps.node, free_name(graph, f"{steps.node.name or 'scan'}.recurrence"))
        self._sequences = Sequences(steps, self.insert, ranks)
        tokens = steps.tokens[0]
        self._tokens = self._dims(tokens.outside, tokens.axis, tokens.axis + 1)
        self._lead = [self._dims(steps.initial, axis, axis + 1) for axis in range(recurrence.lead)]

    def op(
        self, op_type: str, inputs: list[ir.Value | None], dtype: ir.DataType = _FLOAT, **attributes: object
    ) -> ir.Value:
        """Return what a new node makes."""
        number = len(self.insert.nodes)
        return self.insert.op(op_type, inputs, None, dtype, f"{op_type}.{number}", **attributes)

    def operand(self, operand: Operand, count: int, *, is_shared: bool = False) -> ir.Value:
        """Return an operand as [1, T, B heads, count]; of one head in each row where all share it."""
        lead = [*self._lead[:-1], self.insert.integers([1])] if is_shared and self._lead else self._lead
        shape = self._concat([self._tokens, *lead, self.insert.integers([count])])
        if operand.value is None:
            sequence: ir.Value = shared_constant(self.insert.graph, "recurrence.one", np.ones((), np.float32))
        else:
            sequence = self._sequences.sequence_of(operand.value)
            if operand.squeezed_axes:
                sequence = self.op("Squeeze", [sequence, self.insert.integers(list(operand.squeezed_axes))])
            if operand.is_of_heads:
                sequence = self.op("Unsqueeze", [sequence, self.insert.integers([-1])])
            rank = self._sequences.rank(operand.value) - len(operand.squeezed_axes) + operand.is_of_heads
            if self._sequences.has_tokens(operand.value):
                sequence = self._sequences.align(sequence, self._recurrence.lead + 1 - rank)
        is_sequence = operand.value is not None and self._sequences.has_tokens(operand.value)
        if not (operand.is_whole and is_sequence):
            sequence = self.op("Expand", [sequence, shape])
        return self.op("Reshape", [sequence, self._as_one_row(count)])

    def decay(self) -> ir.Value:
        """Return the logarithm of factors, or nothing of each head."""
        decay = self._recurrence.decay
        if decay is None:
            return self.placeholder(_FLOAT)
        numbers = self.operand(decay, self._recurrence.decays)
        return numbers if decay.is_logarithm else self.op("Log", [numbers])

    def placeholder(self, dtype: ir.DataType) -> ir.Value:
        """Return a placeholder: [1, T, B H, 0] of floats, [1, 0] of integers."""
        zero, row = self.insert.integers([0]), self.insert.integers([1])
        dims = [row, self._tokens, self._heads(), zero] if dtype == _FLOAT else [row, zero]
        fill = ir.tensor(np.zeros(1, dtype.numpy()))
        return self.op("ConstantOfShape", [self._concat(dims)], dtype, value=fill)

    def state(self) -> ir.Value:
        """Return the state before the first token as [1, B H, K, V]."""
        state, recurrence = self._steps.initial, self._recurrence
        if recurrence.layout == "values first":
            state = self._swap_axes(state, recurrence.lead + 2)
        sizes = self.insert.integers([1, -1, recurrence.channels, recurrence.width])
        return self.op("Reshape", [state, sizes])

    def final(self, new_state: ir.Value) -> ir.Value:
        """Return the state behind the last token as it was."""
        if self._recurrence.layout == "values first":
            new_state = self._swap_axes(new_state, 4)
        return self.op("Reshape", [new_state, self._dims(self._steps.initial, 0, None)])

    def sequence(self, output: ir.Value, axes: tuple[int, ...]) -> ir.Value:
        """Return outputs [1, T, B H, V] as they were."""
        axes_of_vectors = [self.insert.integers([axis]) for axis in axes]
        sequence = self.op("Reshape", [output, self._concat([self._tokens, *self._lead, *axes_of_vectors])])
        axis, rank = self._steps.output_axis, 1 + len(self._lead) + len(axes)
        axis = axis + rank if axis < 0 else axis
        if not axis:
            return sequence
        order = list(range(1, rank))
        order.insert(axis, 0)
        return self.op("Transpose", [sequence], perm=order)

    def _as_one_row(self, count: int) -> ir.Value:
        """Return the shape [1, T, B H, count] of a sequence, whatever its heads."""
        row, heads = self.insert.integers([1]), self.insert.integers([-1])
        return self._concat([row, self._tokens, heads, self.insert.integers([count])])

    def _heads(self) -> ir.Value:
        """Return B H, int64 [1]."""
        if not self._lead:
            return self.insert.integers([1])
        return self.op("ReduceProd", [self._concat(self._lead)], _INT64, keepdims=1)

    def _swap_axes(self, tensor: ir.Value, rank: int) -> ir.Value:
        return self.op("Transpose", [tensor], perm=[*range(rank - 2), rank - 1, rank - 2])

    def _dims(self, tensor: ir.Value, start: int, end: int | None) -> ir.Value:
        limits = {"start": start} | ({} if end is None else {"end": end})
        return self.op("Shape", [tensor], _INT64, **limits)

    def _concat(self, dims: list[ir.Value]) -> ir.Value:
        return self.op("Concat", [*dims], _INT64, axis=0)


def _replace(graph: ir.Graph, steps: Steps, recurrence: Recurrence, ranks: Mapping[ir.Value, int]) -> ir.Node:
    """Put ``LinearRecurrence`` where the steps stand; return it."""
    build, K, V = _Builder(graph, steps, recurrence, ranks), recurrence.channels, recurrence.width
    is_shared = recurrence.query.is_shared and recurrence.key.is_shared
    beta = recurrence.beta
    inputs = {
        "query": build.operand(recurrence.query, K, is_shared=is_shared),
        "key": build.operand(recurrence.key, K, is_shared=is_shared),
        "value": build.operand(recurrence.value, V),
        "decay": build.decay(),
        "beta": build.placeholder(_FLOAT) if beta is None else build.operand(beta, 1),
        "mask": build.placeholder(_INT64),
        "state": build.state(),
    }
    attributes = {"delta": recurrence.delta, "scale": recurrence.scale}
    stem = free_name(graph, f"{steps.node.name or 'scan'}.LinearRecurrence")
    node = OPERATORS["LinearRecurrence"].node(inputs, attributes, name=stem)
    output, new_state = node.outputs
    output.name, new_state.name = f"{stem}.output", f"{stem}.new_state"
    output.dtype = new_state.dtype = _FLOAT
    graph.insert_before(steps.node, node)
    outputs = {steps.final: build.final(new_state), steps.sequence: build.sequence(output, recurrence.output_axes)}
    replace(steps.node, [*build.insert.nodes, node], outputs)
    return node
