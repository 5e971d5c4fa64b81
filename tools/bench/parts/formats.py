"""Weights rounded to a format in groups, as every engine but ggml is given them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from graphopt.numerics.formats import Format, format_of
from graphopt.quantization.rounding.nearest import round_to_nearest
from tools.bench.parts.problem import Array, Problem

FORMATS = {"fp6": "fp6-e2m3"}
"""The formats of abbreviations in engines' names; any other name is the format's own."""


@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix as codes and scales: W[n, k] = values[codes[n, k]] scales[n, k div group].

    Attributes:
        codes: uint8 [outer, inner].
        scales: float16 [outer, groups].
        format: what a code means.
        group: columns that share a scale.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    format: Format
    group: int

    def product(self, x: Array) -> npt.NDArray[np.float64]:
        """Return x W^T in float64, [rows, outer]."""
        W = self.format.decode(self.codes.T).T.reshape(*self.scales.shape, self.group)
        W *= self.scales[..., None].astype(np.float64)
        y: npt.NDArray[np.float64] = x.astype(np.float64) @ W.reshape(self.codes.shape).T
        return y


def round_weights(problem: Problem, name: str, group: int) -> RoundedMatrix:
    """Return the problem's weights in the format called ``name``, in groups scaled by their largest."""
    return problem.weights.keep((name, group), partial(_round, problem.weights.values, name, group))


def _round(values: npt.NDArray[np.float32], name: str, group: int) -> RoundedMatrix:
    format_ = format_of(FORMATS.get(name, name))
    groups = values.reshape(len(values), -1, group)
    scales = (np.abs(groups).max(axis=2) / np.float32(format_.limit)).astype(np.float16)
    if (format_.joint_columns or 1) > 1:  # its codes go together along the axis of outputs, in graphopt's library
        matrix = round_to_nearest(values.T, format_, group, "extreme", scale_type=np.float16)
        return RoundedMatrix(matrix.codes.T, matrix.scales.T, format_, group)
    codes = format_.encode(groups / scales[..., None].astype(np.float32))
    return RoundedMatrix(codes.reshape(values.shape), scales, format_, group)
