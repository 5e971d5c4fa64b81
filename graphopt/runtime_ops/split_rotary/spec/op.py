"""``ai.graphopt::SplitRotary``, version 1: queries, keys and values of one product, with rotary embeddings.

B rows, T tokens, H heads of queries, K heads of keys and of values, D numbers of a head, of which R are turned.

Inputs, all required:
    x: float or float16 [B, T, (H + 2 K) D]: the heads of queries, those of keys, those of values.
    cos: the type of x, [B, T, R / 2], of each token.
    sin: likewise.

Attributes:
    heads: H, at least 1.
    kv_heads: K, at least 1.
    rotary: R, an even number from 2 to D.
    rotary_interleaved: 1 where a pair is two neighbours, 2 i and 2 i + 1; 0 where it is i and i + R / 2.

Outputs, of the type of x, computed in float32 and rounded once:
    queries: [B, T, H D]. The last D - R numbers of a head stay, and the i-th pair (a, b) of the first R becomes::

        (a cos[i] - b sin[i], a sin[i] + b cos[i])

    keys: [B, T, K D], likewise.
    values: [B, T, K D], as they are.

It is ``Split`` and ONNX's ``RotaryEmbedding`` of two of the parts (Su et al. 2021, "RoFormer", equation 34): one node
where one product makes all three.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.split_rotary.spec.schema import SCHEMA
from graphopt.runtime_ops.tape import number_of

Floats = npt.NDArray[np.floating[Any]]

_INT = ir.AttributeType.INT


def function(opset: int) -> ir.Function:
    """Return the body as a function of the given ONNX opset, 23 or later."""
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    x = inputs[0]
    tape = ir.tape.Tape()
    wide, cos, sin = (tape.op("Cast", [value], {"to": ir.DataType.FLOAT}) for value in inputs)
    heads, kv_heads = number_of(tape, "heads"), number_of(tape, "kv_heads")
    all_heads = tape.op("Concat", [heads, kv_heads, kv_heads], {"axis": 0})
    size = tape.op("Div", [tape.op("Shape", [x], {"start": 2}), tape.op("ReduceSum", [all_heads], {"keepdims": 1})])
    widths = tape.op("Mul", [all_heads, size])
    parts = tape.op_multi_out("Split", [wide, widths], {"axis": -1}, num_outputs=3)
    rotations = {
        "interleaved": ir.RefAttr("interleaved", "rotary_interleaved", _INT),
        "rotary_embedding_dim": ir.RefAttr("rotary_embedding_dim", "rotary", _INT),
    }
    outputs = []
    for part, count in zip(parts, ("heads", "kv_heads", None), strict=True):
        heads_of = {"num_heads": ir.RefAttr("num_heads", count, _INT)} if count else {}
        embedding = tape.op("RotaryEmbedding", [part, cos, sin], rotations | heads_of) if count else part
        outputs.append(tape.op("CastLike", [embedding, x]))
    for value, name in zip(outputs, SCHEMA.output_names, strict=True):
        value.name = name
    graph = ir.Graph(inputs, outputs, nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, graph=graph, attributes=SCHEMA.parameters)


def reference(
    x: Floats, cos: Floats, sin: Floats, heads: int, kv_heads: int, rotary: int, rotary_interleaved: int
) -> tuple[Floats, Floats, Floats]:
    """Return what the operator means, in float64 and then rounded to the type of ``x``.

    Raises:
        ValueError: the shapes or the attributes do not fit one another.
    """
    all_heads = heads + 2 * kv_heads
    if heads < 1 or kv_heads < 1 or x.ndim != 3 or x.shape[-1] % all_heads:
        raise ValueError(f"x must be [B, T, ({heads} + 2 x {kv_heads}) D], and is {list(x.shape)}")
    size = x.shape[-1] // all_heads
    if not 2 <= rotary <= size or rotary % 2 or rotary_interleaved not in (0, 1):
        raise ValueError(f"rotary must be even, from 2 to {size}, and is {rotary}; rotary_interleaved must be 0 or 1")
    for name, factors in (("cos", cos), ("sin", sin)):
        if factors.shape != (*x.shape[:2], rotary // 2):
            raise ValueError(f"{name} must be {[*x.shape[:2], rotary // 2]}, and is {list(factors.shape)}")
    by_head = x.astype(np.float64).reshape(*x.shape[:2], all_heads, size)
    rotary_slices = (
        (slice(0, rotary, 2), slice(1, rotary, 2))
        if rotary_interleaved
        else (
            slice(0, rotary // 2),
            slice(rotary // 2, rotary),
        )
    )
    a, b = (by_head[:, :, : heads + kv_heads, part] for part in rotary_slices)
    wide_cos, wide_sin = (factors.astype(np.float64)[:, :, None] for factors in (cos, sin))
    rotated_heads = by_head.copy()
    with np.errstate(all="ignore"):  # overflow, infinity and NaN are allowed
        rotated_heads[:, :, : heads + kv_heads, rotary_slices[0]] = a * wide_cos - b * wide_sin
        rotated_heads[:, :, : heads + kv_heads, rotary_slices[1]] = a * wide_sin + b * wide_cos
        narrow = rotated_heads.astype(x.dtype)
    ends = (heads, heads + kv_heads)
    queries, keys, values = (
        part.reshape(*x.shape[:2], part.shape[2] * size) for part in np.split(narrow, ends, axis=2)
    )
    return queries, keys, values


SPLIT_ROTARY = Operator(SCHEMA, function, reference)
"""The schema of ``ai.graphopt::SplitRotary``."""
