"""Language models of one layer with the nodes that onnxruntime-genai's builder writes, made by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

VOCABULARY, POSITIONS = 24, 64


@dataclass(frozen=True)
class Layer:
    """What varies between layers of ``GroupQueryAttention``; 0 and ``None`` leave a thing away."""

    heads: int = 4
    groups: int = 2
    size: int = 16
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    packed: bool = True
    turned: int | None = 16
    interleaved: bool = False
    normed: bool = False


def tables(pairs: int, positions: int = POSITIONS, theta: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines float32 [positions, pairs] as torch computes them: angles in float32."""
    frequencies = (1.0 / theta ** (np.arange(pairs, dtype=np.float32) / np.float32(pairs))).astype(np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def group_query_model(layer: Layer, *, seed: int = 0, **attributes: object) -> ir.Model:
    """Return logits = head(norm(x + o(GroupQueryAttention(qkv(norm(x)))))), x = table[ids]; opset 22."""
    random = np.random.default_rng(seed)
    width, hidden = layer.size, 16
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
    mask = ir.val("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
    caches = [
        ir.val(f"past_key_values.0.{part}", ir.DataType.FLOAT, ["batch_size", layer.groups, "past", "kv_cache_dim"])
        for part in ("key", "value")
    ]
    weights: list[ir.Value] = []

    def constant(name: str, array: np.ndarray) -> ir.Value:
        weights.append(ir.val(name, const_value=ir.tensor(array, name=name)))
        return weights[-1]

    def weight(name: str, *shape: int) -> ir.Value:
        return constant(name, (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def gain(name: str, size: int) -> ir.Value:
        return constant(name, random.uniform(0.5, 1.5, size).astype(np.float32))

    tape = ir.tape.Tape()

    def op(op_type: str, inputs: list[ir.Value | None], columns: int | None = None, **more: object) -> ir.Value:
        value = tape.op(op_type, inputs, more or None, domain=str(more.pop("domain", "")))  # type: ignore[arg-type]
        value.name = f"{op_type}{len(tape.nodes)}"
        if columns is not None:
            value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["batch_size", "sequence_length", columns])
        return value

    def linear(x: ir.Value, name: str, columns: int) -> ir.Value:
        assert x.shape is not None
        return op("MatMul", [x, weight(name, int(str(x.shape[-1])), columns)], columns)

    one = constant("one", np.array([1], np.int64))
    counted = op("Sub", [op("ReduceSum", [mask, one], keepdims=0), one])
    seqlens = op("Cast", [counted], to=ir.DataType.INT32)
    second = constant("second", np.array(1, np.int64))
    total = op("Cast", [op("Gather", [op("Shape", [mask]), second], axis=0)], to=ir.DataType.INT32)
    x = op("Gather", [weight("table", VOCABULARY, hidden), ids], hidden)
    normed = op("SimplifiedLayerNormalization", [x, gain("gain", hidden)], hidden, epsilon=1e-6, axis=-1, stash_type=1)
    sizes = [layer.heads * width, layer.groups * width, layer.groups * width]
    rows: list[ir.Value | None]
    if layer.packed:
        rows = [linear(normed, "qkv", sum(sizes)), None, None]
    else:
        rows = [linear(normed, name, columns) for name, columns in zip("qkv", sizes, strict=True)]
    angles: list[ir.Value | None] = [None, None]
    if layer.turned:
        angles = [constant(n, t) for n, t in zip(("cos_cache", "sin_cache"), tables(layer.turned // 2), strict=True)]
    norms = [gain("q_norm", width), gain("k_norm", width)] if layer.normed else [None, None]
    given = [*rows, *caches, seqlens, total, *angles, *[None] * 5, *norms]
    said = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.groups,
        "scale": layer.scale,
        "softcap": layer.softcap,
        "local_window_size": layer.window or -1,
        "do_rotary": int(bool(layer.turned)),
        "rotary_interleaved": int(layer.interleaved),
        **attributes,
    }
    attention = ir.node(
        "GroupQueryAttention",
        given,
        said,
        domain="com.microsoft",
        num_outputs=3,
        name="attention",  # type: ignore[arg-type]
    )
    y, *presents = attention.outputs
    y.name, y.dtype, y.shape = "y", ir.DataType.FLOAT, ir.Shape(["batch_size", "sequence_length", sizes[0]])
    for value, name in zip(presents, ("present.0.key", "present.0.value"), strict=True):
        value.name, value.dtype = name, ir.DataType.FLOAT
        value.shape = ir.Shape(["batch_size", layer.groups, "total_sequence_length", "kv_cache_dim"])
    before, tape = tape, ir.tape.Tape()
    o = linear(y, "o", hidden)
    skip = ir.node(
        "SkipSimplifiedLayerNormalization",
        [x, o, gain("last_gain", hidden)],
        {"epsilon": 1e-6},
        domain="com.microsoft",
        num_outputs=4,
        name="skip",
    )
    normed, _, _, summed = skip.outputs
    for value, name in ((normed, "normed"), (summed, "summed")):
        value.name, value.dtype = name, ir.DataType.FLOAT
        value.shape = ir.Shape(["batch_size", "sequence_length", hidden])
    middle, tape = tape, ir.tape.Tape()
    # The sum is read too, as the next layer's residual would be.
    logits = linear(op("Add", [normed, summed], hidden), "head", VOCABULARY)
    logits.name = "logits"
    nodes = [*before.nodes, attention, *middle.nodes, skip, *tape.nodes]
    for number, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}.{number}"
    graph = ir.Graph(
        [ids, mask, *caches],
        [logits, *presents],
        nodes=nodes,
        initializers=weights,
        opset_imports={"": 22, "com.microsoft": 1},
        name="by_hand",
    )
    return ir.Model(graph, ir_version=10)
