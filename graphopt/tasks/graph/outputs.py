"""Outputs of two graphs, one by one: relative error, cosine, same class where numbers look like logits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphopt.tasks.base import Floats

MAX_NUMBERS = 1 << 22
"""Numbers of one output that are compared, at most; of a larger one evenly spread ones."""

_IMAGE_RANK = 4
_CLASSES = re.compile(r"logit|prob|class|label|score|softmax", re.IGNORECASE)


@dataclass(frozen=True)
class Output:
    """One output of one run.

    Attributes:
        numbers: of a tensor of numbers, in float64, in its shape.
        is_exact: whether they are integers or truth values, which are equal or not.
    """

    numbers: Floats
    is_exact: bool

    @classmethod
    def of_result(cls, result: Any) -> Output | None:
        """Return what onnxruntime returned for an output; ``None`` for texts, sequences and maps."""
        if not isinstance(result, np.ndarray) or result.dtype.kind not in "fiubV":
            return None
        return cls(result.astype(np.float64), result.dtype.kind in "iub")

    def vector(self, shape: tuple[int, ...] | None = None) -> Floats:
        """Return the numbers that are compared, float64 [numbers].

        Args:
            shape: what the output was like in the graph that this one is compared with. Where the shape is another
                one, what both have is compared, and zeros stand for the rest.
        """
        numbers = self.numbers
        if shape is not None and shape != numbers.shape:
            numbers = np.zeros(shape)
            if self.numbers.ndim == len(shape):
                common = tuple(slice(0, min(sizes)) for sizes in zip(shape, self.numbers.shape, strict=True))
                numbers[common] = self.numbers[common]
        flat = numbers.ravel()
        return flat if flat.size <= MAX_NUMBERS else flat[:: -(-flat.size // MAX_NUMBERS)]


def outputs_of(results: Sequence[Any], names: Sequence[str]) -> dict[str, Output]:
    """Return the outputs that can be compared, by name."""
    outputs = {name: Output.of_result(result) for name, result in zip(names, results, strict=True)}
    return {name: output for name, output in outputs.items() if output is not None and output.numbers.size}


def class_axis(name: str, output: Output) -> int | None:
    """Return the axis of an output that tells classes apart, by the name, or by the shape [rows, classes].

    It is the last one, and the second of four dimensions [batch, classes, height, width]. ``None`` where there is none.
    """
    shape = output.numbers.shape
    is_named = _CLASSES.search(name) is not None and len(shape) > 1
    axis = 1 if len(shape) == _IMAGE_RANK else -1
    return axis if not output.is_exact and (is_named or len(shape) == 2) and shape[axis] > 1 else None


@dataclass(frozen=True)
class Difference:
    """How far an output is from that of another graph, over all samples.

    Attributes:
        cosine: of all numbers of a sample, the mean over samples; 1 where both are zeros.
        relative_error: the length of the difference over that of the output before, the largest of the samples.
        same_class: the share of rows with the same largest number; ``None`` where they are no classes.
        same_numbers: of integers, the share of equal ones; ``None`` for floats.
        has_same_shape: whether the shapes are the same.
    """

    cosine: float
    relative_error: float
    same_class: float | None
    same_numbers: float | None
    has_same_shape: bool


def differences(before: Sequence[Mapping[str, Output]], after: Sequence[Mapping[str, Output]]) -> dict[str, Difference]:
    """Return how far outputs are from those of the graph before, by name; each sequence has an item for a sample."""
    return {name: _difference(name, [run[name] for run in before], after) for name in before[0]}


def _difference(name: str, before: Sequence[Output], runs: Sequence[Mapping[str, Output]]) -> Difference:
    cosines, errors, classes, equal, shapes = [], [], [], [], []
    for old, new in zip(before, (run.get(name) for run in runs), strict=True):
        shape = old.numbers.shape
        first = old.vector()
        second = np.zeros_like(first) if new is None else new.vector(shape)
        shapes.append(new is not None and new.numbers.shape == shape)
        lengths = float(np.linalg.norm(first)), float(np.linalg.norm(second))
        if min(lengths) > 0:
            cosines.append(float(first @ second) / (lengths[0] * lengths[1]))
        else:
            cosines.append(1.0 if lengths[0] == lengths[1] else 0.0)
        gap = float(np.linalg.norm(first - second))
        errors.append(gap / lengths[0] if lengths[0] else (0.0 if gap == 0 else float("inf")))
        if old.is_exact:
            equal.append(float((first == second).mean()))
        elif (axis := class_axis(name, old)) is not None and shapes[-1] and new is not None:
            classes.append(float((old.numbers.argmax(axis) == new.numbers.argmax(axis)).mean()))
    return Difference(
        cosine=float(np.mean(cosines)),
        relative_error=max(errors),
        same_class=float(np.mean(classes)) if classes else None,
        same_numbers=float(np.mean(equal)) if equal else None,
        has_same_shape=all(shapes),
    )


def figures_of(by_name: Mapping[str, Difference]) -> dict[str, float]:
    """Return the figures of a comparison: of the output that moved most, then of each where there are several.

    ``cosine_mean`` is the smallest of the outputs' mean cosines, ``relative_error`` the largest error,
    ``same_class_share`` and ``same_numbers_share`` the smallest shares.
    """
    floats = {name: item for name, item in by_name.items() if item.same_numbers is None} or dict(by_name)
    figures = {
        "cosine_mean": min(item.cosine for item in floats.values()),
        "relative_error": max(item.relative_error for item in floats.values()),
        "outputs": float(len(by_name)),
    }
    figures |= _smallest("same_class_share", (item.same_class for item in by_name.values()))
    figures |= _smallest("same_numbers_share", (item.same_numbers for item in by_name.values()))
    if not all(item.has_same_shape for item in by_name.values()):
        figures["other_shapes"] = float(sum(not item.has_same_shape for item in by_name.values()))
    if len(by_name) > 1:
        for name, item in by_name.items():
            figures[f"cosine of {name}"], figures[f"relative_error of {name}"] = item.cosine, item.relative_error
    return {name: value for name, value in figures.items() if np.isfinite(value)}


def _smallest(name: str, values: Iterator[float | None]) -> dict[str, float]:
    shares = [value for value in values if value is not None]
    return {name: min(shares)} if shares else {}
