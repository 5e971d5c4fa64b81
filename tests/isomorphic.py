"""What two graphs must have in common to be the same: for the tests and for tools/studies/families.py."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import expression_of
from graphopt.verification.up_to_names import without_names


def description(program: ir.Model) -> tuple[bytes, list[str | None], set[str]]:
    """Return a graph with its weights and without names, the names of its nodes in order, and those of its weights.

    The weights of ``program`` are evaluated into memory.
    """
    for value in program.graph.initializers.values():
        expression = expression_of(value.const_value)
        value.const_value = ir.Tensor(np.ascontiguousarray(expression.numpy()), dtype=expression.dtype)
    bare = without_names(ir.to_proto(program)).SerializeToString(deterministic=True)
    return bare, [node.name for node in program.graph], set(program.graph.initializers)
