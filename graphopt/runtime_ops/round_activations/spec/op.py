"""``ai.graphopt::RoundActivations``, version 1: what the products behind it round their input to.

Input:
    x: float16 or float [..., K], of rank 1 or more, K >= 1.

Attributes:
    activations: string, ``bfloat16``, ``int4``, ``int8``, ``int16`` or ``uint4``.
    group: int, how many neighbours of a row share a scale, the last group may be shorter; 0: all of a row (a token).
    clip: float above 0, at most 1.

Output:
    y: the type and shape of x, in float32 arithmetic::

        bfloat16   x to the nearest, ties to even; group and clip mean nothing
        int4, int8, int16, with L = 7, 127, 16256:
                   y = q s with m = clip max|x| over a group, s = m / L
                   q = round(x (L / m)), ties to even, from -L to L
        uint4      y = q s with s = w / 15, w = high - low, low = clip min(0, min x), high = clip max(0, max x) over a
                   group, z = round(-low (15 / w)), q = round(x (15 / w)), ties to even, from -z to 15 - z

Where m or w < 1e-30, q is 0. Under an integer type y is NaN where x is not finite, and may then be NaN in all of the
group: the products behind it are NaN either way.

The graph means this rounding: it is what a product computes. It stands
between the phases ``codes`` and ``lower`` in front of ``MatMul`` with dequantized codes. It has no kernel and needs
none: the step ``lower`` makes one product of both, which multiplies the q as integers, and refuses a graph in which a
``RoundActivations`` is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.matmul_table.spec.activations import (
    bfloat16_nodes,
    group_nodes,
    group_rounding_nodes,
    round_group,
    to_bfloat16,
    ungroup_nodes,
)
from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.round_activations.spec.schema import SCHEMA
from graphopt.runtime_ops.tape import branch, choice, ints, number_of

Floats = npt.NDArray[np.floating[Any]]

LEVELS = {"int4": 7, "int8": 127, "int16": 16256, "uint4": 15}
"""The largest code of an activation, by type."""

MODES = ("bfloat16", *LEVELS)
"""What x may be rounded to."""


def function(opset: int) -> ir.Function:
    """Return the body, one for all attributes; which way x is rounded is folded when onnxruntime loads the model."""
    x = ir.Value(name="x")
    tape = ir.tape.Tape()
    wide = tape.op("Cast", [x], {"to": ir.DataType.FLOAT})
    mode = choice(tape, "activations", ir.AttributeType.STRING, MODES)
    of_mode = tape.op("Constant", [], {"value_floats": [float(LEVELS.get(name, 0)) for name in MODES]})
    levels = tape.op("Gather", [of_mode, mode], {"axis": 0})
    clip = tape.op("Constant", [], {"value_float": ir.RefAttr("value_float", "clip", ir.AttributeType.FLOAT)})
    rows = tape.op("Shape", [x], {"start": -1})
    group_of_node = number_of(tape, "group")
    group = tape.op("Where", [tape.op("Equal", [group_of_node, ints(tape, 0)]), rows, group_of_node])

    def in_groups(tape: ir.tape.Tape) -> ir.Value:
        whole, groups = group_nodes(tape, wide, rows, group)
        return ungroup_nodes(tape, group_rounding_nodes(tape, groups, mode, MODES, levels, clip), whole, rows)

    branches = {
        "then_branch": branch("halves", lambda tape: bfloat16_nodes(tape, wide)),
        "else_branch": branch("grouped", in_groups),
    }
    is_bfloat16 = tape.op("Equal", [mode, ints(tape, MODES.index("bfloat16"))])
    y = tape.op("CastLike", [tape.op("If", [is_bfloat16], branches), x])
    y.name = "y"
    graph = ir.Graph([x], [y], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, graph=graph, attributes=SCHEMA.parameters)


def reference(x: Floats, activations: str, group: int, clip: float) -> Floats:
    """Return what the operator means, in float32 and then rounded to the type of ``x``.

    Raises:
        ValueError: there is no such rounding, or ``group`` is negative.
    """
    if activations not in MODES:
        raise ValueError(f"activations are rounded to {', '.join(MODES)}, not to {activations!r}")
    if group < 0:
        raise ValueError(f"a group has {group} numbers")
    row = x.astype(np.float32)
    if activations == "bfloat16":
        return to_bfloat16(row).astype(x.dtype)
    products, size = np.empty(row.shape, np.float32), group or row.shape[-1]
    for start in range(0, row.shape[-1], size):
        columns = slice(start, start + size)
        products[..., columns] = round_group(row[..., columns], activations, clip, LEVELS[activations])
    return products.astype(x.dtype)


ROUND_ACTIVATIONS = Operator(SCHEMA, function, reference)
