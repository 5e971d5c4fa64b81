"""Graphs before and after a rotation, the latter made here by plain matrix products: what the checker is tried on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphopt.graph.diagnostics import Finding
from graphopt.numerics.rotations.claims import Claims, RotationClaim, TensorClaim
from graphopt.numerics.rotations.hadamard import hadamard
from graphopt.numerics.rotations.orthogonal import RandomRotation, signs
from graphopt.verification.certificate.report import Certificate
from tests.graphs import VOCABULARY, Builder, residual_model

Matrix = NDArray[np.float64]

RESIDUAL = RotationClaim(kind="hadamard", width=16, factors=(4, 4), seed=3)
KEY = RotationClaim(kind="hadamard", width=4, factors=(2, 2))
VALUE = RotationClaim(kind="random", width=4, seed=5)


HADAMARDS = {12: (12,), 16: (4, 4), 20: (20,), 24: (12, 2)}


def rotation_of(width: int, kind: str, seed: int) -> RotationClaim:
    if kind == "random":
        return RotationClaim(kind="random", width=width, seed=seed)
    return RotationClaim(kind="hadamard", width=width, factors=HADAMARDS[width], seed=seed)


def dense(claim: RotationClaim) -> Matrix:
    """Return Q of a claim, from its definition."""
    if claim.kind == "random":
        assert claim.seed is not None
        return np.asarray(RandomRotation(claim.width, claim.seed).matrix)
    matrix = np.ones((1, 1))
    for factor in claim.factors:
        matrix = np.kron(matrix, hadamard(factor).astype(np.float64))
    matrix = np.kron(np.eye(claim.width // len(matrix)), matrix / np.sqrt(len(matrix)))
    return matrix if claim.seed is None else signs(claim.width, claim.seed)[:, None] * matrix


def edit(model: ir.Model, name: str, function: Callable[[Matrix], Matrix]) -> None:
    """Replace a weight by ``function`` of it, rounded to its type."""
    value = model.graph.initializers[name]
    assert value.const_value is not None
    old = value.const_value.numpy()
    value.const_value = ir.tensor(function(old.astype(np.float64)).astype(old.dtype), name=name)


def first_fault(certificate: Certificate) -> Finding:
    """Return the first finding that failed."""
    assert certificate.status == "failed"
    return next(finding for finding in certificate.findings if finding.status == "failed")


def node(model: ir.Model, name: str) -> ir.Node:
    """Return the node called ``name``."""
    return next(node for node in model.graph if node.name == name)


def claim(tensor: str, rotation: str, axis: int = -1, **extent: int) -> TensorClaim:
    return TensorClaim(tensor=tensor, axis=axis, rotation=rotation, **extent)


def without(claims: Claims, tensor: str) -> Claims:
    """Return ``claims`` without those of one tensor."""
    return claims.model_copy(update={"tensors": tuple(c for c in claims.tensors if c.tensor != tensor)})


def rotated_residual(
    rotation: RotationClaim = RESIDUAL, *, layers: int = 2, inner: int = 12, **options: object
) -> tuple[ir.Model, ir.Model, Claims]:
    """Return a residual model, the same with its residual stream rotated, and the claims."""
    before, after = (
        residual_model(rotation.width, inner, layers, **{"gains": False, **options})  # type: ignore[arg-type]
        for _ in range(2)
    )
    Q = dense(rotation)
    writers = {"table": "embedding.out"} | {f"down{n}.weight": f"down{n}.out" for n in range(layers)}
    for name in writers:
        edit(after, name, lambda W: W @ Q)
    for name in [*(f"up{n}.weight" for n in range(layers)), "head.weight"]:
        edit(after, name, lambda W: Q.T @ W)
    if options.get("biases"):
        for n in range(layers):
            edit(after, f"down{n}.bias", lambda b: b @ Q)
    return before, after, Claims(rotations={"r": rotation}, tensors=tuple(claim(t, "r") for t in writers.values()))


HEADS, GROUPS, WIDTH, HIDDEN, INNER = 4, 2, 4, 16, 12
PACKED_COLUMNS = (HEADS + 2 * GROUPS) * WIDTH
STARTS = {"query": 0, "key": HEADS * WIDTH, "value": (HEADS + GROUPS) * WIDTH}


def attention_model(*, groups: int = GROUPS) -> ir.Model:
    """Return one layer: packed projection, grouped-query attention with a cache, and an MLP with a gate.

    The names of nodes: embedding, norm, packed, packed.bias, split, query, query.heads, ..., attention, joined,
    output, residual, norm2, up, gate, gated, down, residual2, final, head.
    """
    build = Builder(np.random.default_rng(1), [], [])
    heads = {"query": HEADS, "key": groups, "value": groups}
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "length"])
    past = {
        role: ir.val(f"past_key_values.0.{role}", ir.DataType.FLOAT, ["batch", groups, "past", WIDTH])
        for role in ("key", "value")
    }
    unit_gain = build.constant("ones", np.ones(HIDDEN, np.float32))

    def op(op_type: str, inputs: list[ir.Value | None], shape: list[int | str], name: str, **attrs: object) -> ir.Value:
        value = build.op(op_type, inputs, None, name, **attrs)
        value.shape = ir.Shape(shape)
        return value

    def linear(x: ir.Value, rows: int, columns: int, name: str) -> ir.Value:
        return build.op("MatMul", [x, build.weight(f"{name}.weight", rows, columns)], columns, name)

    x = build.op("Gather", [build.weight("table", VOCABULARY, HIDDEN), ids], HIDDEN, "embedding", axis=0)
    norm_output = build.op("RMSNormalization", [x, unit_gain], HIDDEN, "norm", axis=-1)
    total = (HEADS + 2 * groups) * WIDTH
    projection = linear(norm_output, HIDDEN, total, "packed")
    projection = build.op("Add", [projection, build.weight("packed.bias", total)], total, "biased")
    sizes = build.constant("sizes", np.array([count * WIDTH for count in heads.values()], np.int64))
    split = ir.node("Split", [projection, sizes], {"axis": -1}, num_outputs=3, name="split")
    build.nodes.append(split)
    parts = {}
    for (role, count), part in zip(heads.items(), split.outputs, strict=True):
        part.name, part.dtype = f"{role}.part", ir.DataType.FLOAT
        part.shape = ir.Shape(["batch", "length", count * WIDTH])
        shape = build.constant(f"{role}.shape", np.array([0, 0, count, WIDTH], np.int64))
        split_heads = op("Reshape", [part, shape], ["batch", "length", count, WIDTH], role)
        head_dims: list[int | str] = ["batch", count, "length", WIDTH]
        parts[role] = op("Transpose", [split_heads], head_dims, f"{role}.heads", perm=[0, 2, 1, 3])
    attention = ir.node(
        "Attention",
        [parts["query"], parts["key"], parts["value"], None, past["key"], past["value"]],
        {"is_causal": 1},
        num_outputs=3,
        name="attention",
    )
    build.nodes.append(attention)
    for output, name, count, length in zip(
        attention.outputs,
        ["attention.out", "present.0.key", "present.0.value"],
        [HEADS, groups, groups],
        ["length", "past+length", "past+length"],
        strict=True,
    ):
        output.name, output.dtype, output.shape = name, ir.DataType.FLOAT, ir.Shape(["batch", count, length, WIDTH])
    y = op("Transpose", [attention.outputs[0]], ["batch", "length", HEADS, WIDTH], "back", perm=[0, 2, 1, 3])
    y = build.op("Reshape", [y, build.constant("joined.shape", np.array([0, 0, -1], np.int64))], HIDDEN, "joined")
    x = build.op("Add", [x, linear(y, HIDDEN, HIDDEN, "output")], HIDDEN, "residual")
    norm_output = build.op("RMSNormalization", [x, unit_gain], HIDDEN, "norm2", axis=-1)
    up = linear(norm_output, HIDDEN, INNER, "up")
    product = build.op("Mul", [up, build.op("Sigmoid", [up], INNER, "gate")], INNER, "gated")
    x = build.op("Add", [x, linear(product, INNER, HIDDEN, "down")], HIDDEN, "residual2")
    logits = linear(build.op("RMSNormalization", [x, unit_gain], HIDDEN, "final", axis=-1), HIDDEN, VOCABULARY, "head")
    logits.name = "logits"
    outputs = [logits, *attention.outputs[1:]]
    graph = ir.Graph(
        [ids, *past.values()],
        outputs,
        nodes=build.nodes,
        initializers=build.weights,
        opset_imports={"": 23},
        name="attention",
    )
    return ir.Model(graph, ir_version=10)


def insert_hadamard(model: ir.Model, name: str, left: int, right: int, new: str) -> ir.Node:
    """Put a Hadamard node behind the node called ``name``, in front of all its readers."""
    source = node(model, name)
    value = source.outputs[0]
    matrices = []
    for side, order in (("left", left), ("right", right)):
        matrix = ir.val(f"{new}.{side}", const_value=ir.tensor(hadamard(order).copy(), name=f"{new}.{side}"))
        model.graph.initializers[f"{new}.{side}"] = matrix
        matrices.append(matrix)
    rotation_node = ir.node("Hadamard", [value, *matrices], domain="ai.graphopt", name=new)
    rotation_node.outputs[0].name = f"{new}.out"
    value.replace_all_uses_with(rotation_node.outputs[0])
    rotation_node.replace_input_with(0, value)
    model.graph.insert_after(source, rotation_node)
    model.opset_imports["ai.graphopt"] = 1
    return rotation_node


def rotated_attention(*, online: bool = True) -> tuple[ir.Model, ir.Model, Claims]:
    """Return :func:`attention_model`, the same with all that can be rotated rotated, and the claims.

    The residual stream and the values are rotated by weights; ``online``, queries, keys and the MLP's inside too, by
    Hadamard nodes.
    """
    before, after = attention_model(), attention_model()
    Q, R = dense(RESIDUAL), dense(VALUE)
    per_head = np.eye(PACKED_COLUMNS)
    values = slice(STARTS["value"], None)
    per_head[values, values] = np.kron(np.eye(GROUPS), R)
    edit(after, "table", lambda W: W @ Q)
    edit(after, "packed.weight", lambda W: Q.T @ W @ per_head)
    edit(after, "packed.bias", lambda b: b @ per_head)
    edit(after, "output.weight", lambda W: np.kron(np.eye(HEADS), R).T @ W @ Q)
    edit(after, "up.weight", lambda W: Q.T @ W)
    edit(after, "head.weight", lambda W: Q.T @ W)
    inside = np.kron(np.eye(1), hadamard(12)) / np.sqrt(12) if online else np.eye(INNER)
    edit(after, "down.weight", lambda W: inside.T @ W @ Q)
    tensors = [claim(f"{name}.out", "residual") for name in ("embedding", "output", "down")]
    tensors.append(claim("packed.out", "value", start=STARTS["value"], copies=GROUPS, stride=WIDTH))
    tensors.append(claim("past_key_values.0.value", "value", 3))
    if online:
        for role in ("query", "key"):
            insert_hadamard(after, f"{role}.heads", 2, 2, f"{role}.turned")
        insert_hadamard(after, "gated", 12, 1, "gated.turned")
        tensors.append(claim("past_key_values.0.key", "key", 3))
    rotations = {"residual": RESIDUAL, "value": VALUE, "key": KEY}
    return before, after, Claims(rotations=rotations, tensors=tuple(tensors))


def interleaved_model() -> ir.Model:
    """Return attention over three heads of 12, projected by one weight of columns [heads, (query, key, value), 12]."""
    random = np.random.default_rng(0)
    build = Builder(random, [], [])

    def op(op_type: str, inputs: list[ir.Value], shape: list[int | str], name: str, **attributes: object) -> ir.Value:
        value = build.op(op_type, list(inputs), None, name, **attributes)
        value.shape = ir.Shape(shape)
        return value

    def numbers(name: str, *array: int) -> ir.Value:
        return build.constant(name, np.array(array))

    x = ir.val("x", ir.DataType.FLOAT, ["b", "l", 8])
    y = op("MatMul", [x, build.weight("packed.weight", 8, 108)], ["b", "l", 108], "packed")
    y = op("Reshape", [y, numbers("folded.shape", 0, 0, 3, 3, 12)], ["b", "l", 3, 3, 12], "folded")
    y = op("Transpose", [y], ["b", 3, 3, "l", 12], "turned", perm=[0, 2, 3, 1, 4])
    split = ir.node("Split", [y], {"axis": 2, "num_outputs": 3}, num_outputs=3, name="split")
    build.nodes.append(split)
    parts, axes = [], numbers("axes", 2)
    for index, part in enumerate(split.outputs):
        part.name, part.dtype, part.shape = f"split.{index}", ir.DataType.FLOAT, ir.Shape(["b", 3, 1, "l", 12])
        parts.append(op("Squeeze", [part, axes], ["b", 3, "l", 12], f"part{index}"))
    y = op("Attention", parts, ["b", 3, "l", 12], "attention")
    y = op("Transpose", [y], ["b", "l", 3, 12], "back", perm=[0, 2, 1, 3])
    y = op("Reshape", [y, numbers("joined.shape", 0, 0, 36)], ["b", "l", 36], "joined")
    y = op("MatMul", [y, build.weight("output.weight", 36, 8)], ["b", "l", 8], "output")
    graph = ir.Graph(
        [x], [y], nodes=build.nodes, initializers=build.weights, opset_imports={"": 23}, name="interleaved"
    )
    return ir.Model(graph, ir_version=10)
