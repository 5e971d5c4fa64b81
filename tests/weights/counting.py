"""An expression that counts how often it is evaluated."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import ClassVar

import onnx_ir as ir

from graphopt.weights import Array, Expression, Region, Shape


@dataclasses.dataclass(frozen=True, eq=False)
class Counted(Expression):
    """As ``of``; each evaluation is counted under ``name``, in this process."""

    of: Expression
    name: str
    counts: ClassVar[Counter[str]] = Counter()

    @property
    def dtype(self) -> ir.DataType:
        return self.of.dtype

    @property
    def shape(self) -> Shape:
        return self.of.shape

    def evaluate(self, region: Region) -> Array:
        self.counts[self.name] += 1
        return self.of.evaluate(region)
