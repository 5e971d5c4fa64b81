"""What expressions have in common that keep the type and shape of another one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphopt.graph.weights.expression import Expression, Shape

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclasses.dataclass(frozen=True, eq=False)
class SameShape(Expression):
    """An expression with the type and shape of ``source``, evaluated in the same blocks unless it says otherwise."""

    source: Expression

    @property
    def dtype(self) -> ir.DataType:
        """As the original."""
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """As the original."""
        return self.source.shape

    @property
    def whole(self) -> frozenset[int]:
        """As the original."""
        return self.source.whole
