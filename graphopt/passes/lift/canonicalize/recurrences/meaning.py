"""What a step does to a state, if it is a linear recurrence: found by its values.

    S' = (1 - b k k^T) diag(a) S + b k v^T        y = c S'^T q

The state 0 gives b k v^T; for each pair of values of the step that may be k and v it follows which b there must be,
then from other states which a. Values that are a (or its logarithm) and b are looked for; q and c are what makes y.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule

NOT_AFFINE = Rule(
    "canonicalize.recurrence-not-linear", "its state after a step is no linear recurrence of the one before"
)
NO_OPERAND = Rule("canonicalize.recurrence-no-operand", "its step has no value that is the {operand}")
NO_READING = Rule("canonicalize.recurrence-no-reading", "its output is no product of the state with a query")

Array = npt.NDArray[np.float64]
Layout = Literal["keys first", "values first", "vector", "number"]

LAYOUTS: tuple[Layout, ...] = ("keys first", "values first", "vector", "number")
"""How a state may lie: [.., K, V], [.., V, K], [.., K] with V = 1, [..] with K = V = 1."""

_MOST_HEADS = 4  # that operands are looked for with; all take part in the proof
_TOLERANCE = 1e-4
"""Of the largest number. A step runs in float32; the proof that follows is by rounding's own bound."""


@dataclass(frozen=True)
class Operand:
    """A value of the step as a matrix of the recurrence: its axes, less some that have one element.

    Attributes:
        value: ``None`` for has_ones.
        squeezed_axes: the axes that go, counted from the end.
        is_of_heads: whether it has a number for each head, and an axis for it is sums.
        is_logarithm: of a decay: it is one already, where a factor is not.
        is_shared: whether all heads have the same.
        is_whole: whether it has all heads and numbers, and nothing is repeated.
    """

    value: ir.Value | None
    squeezed_axes: tuple[int, ...] = ()
    is_of_heads: bool = False
    is_logarithm: bool = False
    is_shared: bool = False
    is_whole: bool = False


IsPositive = Callable[[ir.Value], bool]


@dataclass(frozen=True)
class Recurrence:
    """What a step means: the operands of ``LinearRecurrence``.

    Attributes:
        layout: of the state.
        lead: how many axes of the state stand before keys and values.
        channels: K.
        width: V.
        decays: numbers of the decay of a head.
        output_axes: of a token's output, behind ``lead``.
    """

    layout: Layout
    lead: int
    channels: int
    width: int
    query: Operand
    key: Operand
    value: Operand
    decay: Operand | None
    decays: int
    beta: Operand | None
    delta: int
    scale: float
    output_axes: tuple[int, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What the operator reads of the step's values."""
        operands = (self.query, self.key, self.value, self.decay, self.beta)
        return tuple(operand for operand in operands if operand is not None)

    def with_values(self, values: Mapping[ir.Value, ir.Value]) -> Recurrence:
        """Return the same of other values."""

        def exchange(operand: Operand) -> Operand:
            return operand if operand.value is None else replace(operand, value=values[operand.value])

        return replace(
            self,
            query=exchange(self.query),
            key=exchange(self.key),
            value=exchange(self.value),
            decay=None if self.decay is None else exchange(self.decay),
            beta=None if self.beta is None else exchange(self.beta),
        )


@dataclass(frozen=True)
class Outcome:
    """What a step gave: state and output, and its values that do not depend on the state."""

    state: npt.NDArray[Any]
    output: npt.NDArray[Any]
    values: Mapping[ir.Value, npt.NDArray[Any]]


Run = Callable[[npt.NDArray[Any]], Outcome]


def matrices(state: npt.NDArray[Any], layout: Layout) -> Array:
    """Return a state as [.., K, V]."""
    match layout:
        case "values first":
            return np.swapaxes(state, -1, -2).astype(np.float64)
        case "vector":
            return state[..., None].astype(np.float64)
        case "number":
            return state[..., None, None].astype(np.float64)
    return state.astype(np.float64)


def _output_axes(shape: tuple[int, ...], lead: tuple[int, ...], width: int) -> tuple[int, ...] | None:
    """Return the axes of an output behind ``lead``, 1 or the width; ``None`` where it does not have that shape."""
    choices: list[tuple[int, ...]] = [(width,), (1, width), (width, 1), *([()] if width == 1 else [])]
    return next((axes for axes in choices if shape == lead + axes), None)


def understand(run: Run, shape: tuple[int, ...], has_positive: IsPositive) -> Recurrence | Fact:
    """Return the recurrence that a step computes, or why it is none.

    Args:
        run: does the step on a state, with tokens that stay the same.
        shape: of the state.
        has_positive: whether a value is never below 0.
    """
    random = np.random.default_rng(0)
    states = [scale * random.standard_normal(shape).astype(np.float32) for scale in (0, 0.1, 1, 10)]
    outcomes = [run(state) for state in states]
    reasons = []
    for layout in LAYOUTS:
        lead = len(shape) - {"vector": 1, "number": 0}.get(layout, 2)
        if not 0 <= lead <= 2 or outcomes[0].state.shape != shape:
            continue
        *heads, _, width = matrices(states[0], layout).shape
        of_output = _output_axes(outcomes[0].output.shape, tuple(heads), width)
        if of_output is None:
            continue
        match = _Matches(states, outcomes, layout, has_positive).match(layout, of_output)
        if isinstance(match, Recurrence):
            return match
        reasons.append(match)
    return next((reason for reason in reasons if reason.code == NO_OPERAND.code), next(iter(reasons), NO_READING()))


class _Matches:
    """Looks for the operands of a recurrence among the values of a step, at some heads.

    Args:
        states: before a step; the first is 0.
        outcomes: of these.
        layout: of states.
        has_positive: whether a value is never below 0.
    """

    def __init__(
        self, states: list[npt.NDArray[Any]], outcomes: list[Outcome], layout: Layout, has_positive: IsPositive
    ) -> None:
        before = np.stack([matrices(state, layout) for state in states])
        after = np.stack([matrices(outcome.state, layout) for outcome in outcomes])
        *self._lead, self._channels, self._width = before.shape[1:]
        count = math.prod(self._lead)
        self._heads = np.unique(np.linspace(0, count - 1, min(count, _MOST_HEADS)).astype(int))
        self._before = before.reshape(len(states), count, *before.shape[-2:])[1:, self._heads]
        self._after = after.reshape(self._before.shape[0] + 1, count, *before.shape[-2:])[:, self._heads]
        outputs = [outcome.output.reshape(count, self._width)[self._heads] for outcome in outcomes]
        self._outputs = np.stack(outputs).astype(np.float64)
        self._values = {value: array for value, array in outcomes[0].values.items() if array.dtype.kind == "f"}
        self._has_positive = has_positive
        self._has_ones = layout in ("vector", "number")

    def match(self, layout: Layout, output_axes: tuple[int, ...]) -> Recurrence | Fact:
        """Return the recurrence, or what it lacks."""
        query = self._query()
        if isinstance(query, Fact):
            return query
        sums = self._after[0]  # b k v^T
        effects = self._after[1:] - sums
        reason: Fact = NOT_AFFINE()
        for (key, k), (value, v) in itertools.product(
            self._operands(self._channels, has_ones=True), self._operands(self._width, has_ones=self._has_ones)
        ):
            outer = k[..., :, None] * v[..., None, :]
            size = (outer * outer).sum((-1, -2))
            b = (outer * sums).sum((-1, -2)) / np.where(size > 0, size, 1)
            if not (size > 0).all() or not _is_close(b[..., None, None] * outer, sums):
                continue
            for delta in (0, 1):
                factors = self._factors(effects, k, b * delta)
                if factors is None:
                    continue
                beta, decay = self._beta(b), self._decay(factors)
                if isinstance(beta, Fact) or isinstance(decay, Fact):
                    reason = beta if isinstance(beta, Fact) else decay if isinstance(decay, Fact) else reason
                    continue
                return Recurrence(
                    layout, len(self._lead), self._channels, self._width, query[0], key, value, *decay, beta, delta,
                    query[1], output_axes,
                )  # fmt: skip
        return reason

    def _factors(self, effects: Array, k: Array, b: Array) -> Array | None:
        """Return a, where states became (1 - b k k^T) diag(a) S, or ``None``.

        The inverse of 1 - b k k^T is 1 + c k k^T, c = b / (1 - b k^T k) (Sherman and Morrison 1950).
        """
        complement = 1 - b * (k * k).sum(-1)
        c = b / np.where(np.abs(complement) > _TOLERANCE, complement, np.inf)
        products = (k[..., :, None] * effects).sum(-2, keepdims=True)
        products_of_factors = effects + c[..., None, None] * k[..., :, None] * products
        size = (self._before * self._before).sum(-1)
        factors = (products_of_factors * self._before).sum(-1) / size
        scales = np.abs(self._before).max((1, 2, 3), keepdims=True)  # a small state counts as much as a large one
        is_linear = _is_close(products_of_factors / scales, factors[0][..., None] * self._before / scales)
        return factors[0] if is_linear else None

    def _query(self) -> tuple[Operand, float] | Fact:
        """Return the query and the scale of outputs; one that is scaled already, where there is one, is exact."""
        matches = []
        for operand, q in self._operands(self._channels, has_ones=True):
            products = np.einsum("nhkv,hk->nhv", self._after, q)
            size = (products * products).sum()
            scale = float((products * self._outputs).sum() / size) if size else 0.0
            if scale and _is_close(scale * products, self._outputs):
                matches.append((operand, 1.0 if abs(scale - 1) < _TOLERANCE else scale))
        return min(matches, key=lambda match: match[1] != 1, default=NO_READING())

    def _decay(self, factors: Array) -> tuple[Operand | None, int] | Fact:
        """Return the decay that makes these factors [heads, K], and how many numbers a head has."""
        if _is_close(factors, np.ones_like(factors)):
            return None, 0
        counts = [1, self._channels] if _is_close(factors, factors[..., :1]) else [self._channels]
        for count, of_logarithms in itertools.product(counts, (True, False)):
            for operand, array in self._operands(count, of_heads=count == 1):
                with np.errstate(over="ignore"):
                    numbers = np.exp(array) if of_logarithms else array
                if not _is_close(numbers, factors[..., :count]):
                    continue
                if of_logarithms or operand.value is None or self._has_positive(operand.value):
                    return replace(operand, is_logarithm=of_logarithms), count
        return NO_OPERAND(operand="decay, and is positive")

    def _beta(self, b: Array) -> Operand | Fact | None:
        """Return the beta of each head, ``None`` where all are 1."""
        if _is_close(b, np.ones_like(b)):
            return None
        candidates = self._operands(1, of_heads=True)
        return next(
            (operand for operand, array in candidates if _is_close(array[..., 0], b)), NO_OPERAND(operand="beta")
        )

    def _operands(
        self, count: int, *, has_ones: bool = False, of_heads: bool = False
    ) -> Iterator[tuple[Operand, Array]]:
        """Yield values of the step as [heads, count], in all the ways that they can be seen so."""
        shape = (*self._lead, count)
        for value, array in self._values.items():
            for axes, is_of_heads in itertools.product(((), (-1,), (-2,), (-2, -1)), (False, True)):
                fits = all(-axis <= array.ndim and array.shape[axis] == 1 for axis in axes)
                if not fits or (is_of_heads and not of_heads) or (len(axes) == 2 and not is_of_heads):
                    continue
                numbers = np.squeeze(array, axes).astype(np.float64)
                numbers = numbers[..., None] if is_of_heads else numbers
                fits = numbers.ndim <= len(shape) and (not numbers.ndim or numbers.shape[-1] == count)
                if not fits or any(a not in (1, b) for a, b in zip(numbers.shape[::-1], shape[::-1], strict=False)):
                    continue
                is_shared = bool(self._lead) and (numbers.ndim < 2 or numbers.shape[-2] == 1)
                is_whole = numbers.shape == shape
                heads = np.broadcast_to(numbers, shape).reshape(-1, count)[self._heads]
                yield Operand(value, axes, is_of_heads, is_shared=is_shared, is_whole=is_whole), heads
        if has_ones:
            yield Operand(None, is_shared=True), np.ones((len(self._heads), count))


_POSITIVE = frozenset(("Exp", "Sigmoid", "Softplus", "Softmax"))
_KEEPS_SIGN = frozenset(
    ("Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Cast", "Gather", "Slice")
)


def is_positive(value: ir.Value, positive: frozenset[ir.Value] = frozenset()) -> bool:
    """Return whether a value is never below 0, by what makes it; ``positive`` are."""
    if value in positive:
        return True
    constant = value.const_value
    if constant is not None:
        return bool((constant.numpy() > 0).all())
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type in _KEEPS_SIGN:
        return node.inputs[0] is not None and is_positive(node.inputs[0], positive)
    if node.op_type in ("Mul", "Add", "Div"):
        return all(operand is not None and is_positive(operand, positive) for operand in node.inputs)
    return node.op_type in _POSITIVE


def _is_close(array: Array, reference: Array) -> bool:
    size = np.abs(reference).max(initial=0)
    return bool(np.isfinite(array).all() and np.abs(array - reference).max(initial=0) <= _TOLERANCE * max(size, 1e-30))
