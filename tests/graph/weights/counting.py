"""An expression that counts how often it is evaluated, and what else is sent to workers: nothing heavy is imported."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from typing import ClassVar

import onnx_ir as ir

from graphopt.graph.weights import Array, Expression, Region, Shape


@dataclasses.dataclass(frozen=True, eq=False)
class CountingExpression(Expression):
    """As ``source``; each evaluation is counted under ``name``, in this process."""

    source: Expression
    name: str
    counts: ClassVar[Counter[str]] = Counter()

    @property
    def dtype(self) -> ir.DataType:
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def evaluate(self, region: Region) -> Array:
        self.counts[self.name] += 1
        return self.source.evaluate(region)


def loaded_modules() -> list[str]:
    """Return the names of all modules that this process has imported."""
    return list(sys.modules)
