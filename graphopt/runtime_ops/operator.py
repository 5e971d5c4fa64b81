"""What every operator of the domain ``ai.graphopt`` states about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

DOMAIN = "ai.graphopt"


@dataclass(frozen=True)
class Cost:
    """What one call takes: arithmetic operations, and bytes read and written."""

    operations: int
    bytes: int


@dataclass(frozen=True)
class Operator:
    """One operator of the domain :data:`DOMAIN`.

    Attributes:
        name: its name in the graph.
        version: version of its meaning; a file states the version of the domain that it was made with.
        function: makes its body, a model-local function of standard operators of the given ONNX opset.
        reference: what it computes, in NumPy, written from the definition; inputs in order, attributes by name.
        cost: what a call takes, from the shapes of its inputs.
    """

    name: str
    version: int
    function: Callable[[int], ir.Function]
    reference: Callable[..., npt.NDArray[np.generic]]
    cost: Callable[[Sequence[Sequence[int]]], Cost]

    def node(
        self, inputs: Sequence[ir.Value | None], attributes: dict[str, Any] | None = None, *, name: str | None = None
    ) -> ir.Node:
        """Return a node of this operator."""
        return ir.node(self.name, inputs, attributes, domain=DOMAIN, version=None, name=name)
