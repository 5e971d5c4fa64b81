"""Language models of one layer with nodes of onnxruntime's own, as its tools write them, made by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.ort.session import session_of
from graphopt.tasks.causal_lm.interface import Interface

VOCABULARY, POSITIONS = 24, 64
FLOAT32 = 5e-6
"""Of the largest logit: the same sums in another order, and angles by another library's cosine. Seen up to 7e-7."""


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


class _Builder:
    """A graph in the making: logits = head(norm(x + o(y)) + x + o(y)), y = attention of norm(x), x = table[ids]."""

    def __init__(self, seed: int) -> None:
        self.random, self.hidden = np.random.default_rng(seed), 16
        self.ids = ir.val("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        self.mask = ir.val("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
        self.weights: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.x = self.op("Gather", [self.weight("table", VOCABULARY, self.hidden), self.ids], self.hidden)
        gain, norm_attributes = self.gain("gain", self.hidden), {"epsilon": 1e-6, "axis": -1, "stash_type": 1}
        self.normed = self.op("SimplifiedLayerNormalization", [self.x, gain], self.hidden, **norm_attributes)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        self.weights.append(ir.val(name, const_value=ir.tensor(array, name=name)))
        return self.weights[-1]

    def weight(self, name: str, *shape: int) -> ir.Value:
        return self.constant(name, (self.random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def gain(self, name: str, size: int) -> ir.Value:
        return self.constant(name, self.random.uniform(0.5, 1.5, size).astype(np.float32))

    def op(
        self, op_type: str, inputs: list[ir.Value | None], columns: int | None = None, **attributes: object
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or None, domain=str(attributes.pop("domain", "")))  # type: ignore[arg-type]
        self.nodes.append(node)
        value, node.name = node.outputs[0], f"{op_type}.{len(self.nodes)}"
        value.name = f"{op_type}{len(self.nodes)}"
        if columns is not None:
            value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["batch_size", "sequence_length", columns])
        return value

    def linear(self, x: ir.Value, name: str, columns: int) -> ir.Value:
        assert x.shape is not None
        return self.op("MatMul", [x, self.weight(name, int(str(x.shape[-1])), columns)], columns)

    def caches(self, heads: int) -> list[ir.Value]:
        dims = ["batch_size", heads, "past", "kv_cache_dim"]
        return [ir.val(f"past_key_values.0.{part}", ir.DataType.FLOAT, dims) for part in ("key", "value")]

    def attention(
        self, op_type: str, inputs: list[ir.Value | None], attributes: dict[str, object], heads: int, columns: int
    ) -> list[ir.Value]:
        """Return y [batch, length, columns] and the present keys and values of a fused operator."""
        node = ir.node(op_type, inputs, attributes, domain="com.microsoft", num_outputs=3, name="attention")  # type: ignore[arg-type]
        self.nodes.append(node)
        y, *presents = node.outputs
        y.name, y.dtype, y.shape = "y", ir.DataType.FLOAT, ir.Shape(["batch_size", "sequence_length", columns])
        for value, name in zip(presents, ("present.0.key", "present.0.value"), strict=True):
            value.name, value.dtype = name, ir.DataType.FLOAT
            value.shape = ir.Shape(["batch_size", heads, "total_sequence_length", "kv_cache_dim"])
        return [y, *presents]

    def finish(self, y: ir.Value, ports: list[ir.Value], presents: list[ir.Value]) -> ir.Model:
        """Return the model; ``ports`` are its inputs besides tokens and mask."""
        o, gain = self.linear(y, "o", self.hidden), self.gain("last_gain", self.hidden)
        skip = ir.node(
            "SkipSimplifiedLayerNormalization",
            [self.x, o, gain],
            {"epsilon": 1e-6},
            domain="com.microsoft",
            num_outputs=4,
            name="skip",
        )
        self.nodes.append(skip)
        norm_output, _, _, residual = skip.outputs
        for value, name in ((norm_output, "normed"), (residual, "summed")):
            value.name, value.dtype = name, ir.DataType.FLOAT
            value.shape = ir.Shape(["batch_size", "sequence_length", self.hidden])
        # The sum is read too, as the next layer's residual would be.
        logits = self.linear(self.op("Add", [norm_output, residual], self.hidden), "head", VOCABULARY)
        logits.name = "logits"
        graph = ir.Graph(
            [self.ids, self.mask, *ports],
            [logits, *presents],
            nodes=self.nodes,
            initializers=self.weights,
            opset_imports={"": 22, "com.microsoft": 1},
            name="by_hand",
        )
        return ir.Model(graph, ir_version=10)


def group_query_model(layer: Layer, *, seed: int = 0, **attributes: object) -> ir.Model:
    """Return a model of one ``GroupQueryAttention``; opset 22."""
    build, width = _Builder(seed), layer.size
    caches = build.caches(layer.groups)
    unit = build.constant("one", np.array([1], np.int64))
    past_lengths = build.op("Sub", [build.op("ReduceSum", [build.mask, unit], keepdims=0), unit])
    seqlens = build.op("Cast", [past_lengths], to=ir.DataType.INT32)
    second = build.constant("second", np.array(1, np.int64))
    shape = build.op("Shape", [build.mask])
    total = build.op("Cast", [build.op("Gather", [shape, second], axis=0)], to=ir.DataType.INT32)
    sizes = [layer.heads * width, layer.groups * width, layer.groups * width]
    rows: list[ir.Value | None]
    if layer.packed:
        rows = [build.linear(build.normed, "qkv", sum(sizes)), None, None]
    else:
        rows = [build.linear(build.normed, name, columns) for name, columns in zip("qkv", sizes, strict=True)]
    angles: list[ir.Value | None] = [None, None]
    if layer.turned:
        names = ("cos_cache", "sin_cache")
        angles = [build.constant(n, t) for n, t in zip(names, tables(layer.turned // 2), strict=True)]
    norms = [build.gain("q_norm", width), build.gain("k_norm", width)] if layer.normed else [None, None]
    inputs = [*rows, *caches, seqlens, total, *angles, *[None] * 5, *norms]
    node_attributes = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.groups,
        "scale": layer.scale,
        "softcap": layer.softcap,
        "local_window_size": layer.window or -1,
        "do_rotary": int(bool(layer.turned)),
        "rotary_interleaved": int(layer.interleaved),
        **attributes,
    }
    y, *presents = build.attention("GroupQueryAttention", inputs, node_attributes, layer.groups, sizes[0])
    return build.finish(y, caches, presents)


@dataclass(frozen=True)
class MultiHead:
    """What varies between layers of ``MultiHeadAttention``.

    Attributes:
        heads: of queries, keys and values.
        size: of a head.
        value_size: of a head's values, where that is another; then nothing can be cached.
        biased: whether the operator adds the biases of the projections.
        padding: the rank of its mask of padding, 2 [batch, keys] or 3 [batch, queries, keys]; 0 for none.
        added: what is added to scores: a "mask" (causal, and what is padding), a "bias" by distance, or nothing.
        unidirectional: whether the operator hides the keys behind each query.
        scale: 0 for the operator's own.
        cached: whether keys and values of earlier calls are inputs.
    """

    heads: int = 2
    size: int = 16
    value_size: int | None = None
    biased: bool = False
    padding: int = 2
    added: str = ""
    unidirectional: bool = True
    scale: float = 0.0
    cached: bool = True


def multi_head_model(layer: MultiHead, *, seed: int = 0, **attributes: object) -> ir.Model:
    """Return a model of one ``MultiHeadAttention``, as onnxruntime's optimizer writes it; opset 22."""
    build, heads = _Builder(seed), layer.heads
    sizes = [heads * layer.size, heads * layer.size, heads * (layer.value_size or layer.size)]
    caches: list[ir.Value] = build.caches(heads) if layer.cached else []
    rows = [build.linear(build.normed, name, width) for name, width in zip("qkv", sizes, strict=True)]
    zero, unit, axes = (
        build.constant(name, np.array(numbers, np.int64))
        for name, numbers in (("zero", 0), ("one", 1), ("both", [1, 2]))
    )
    second = build.constant("second", np.array([1], np.int64))
    keys, length = (build.op("Gather", [build.op("Shape", [value]), unit], axis=0) for value in (build.mask, build.ids))
    first = build.op("Sub", [keys, length])
    columns = build.op("Range", [zero, keys, unit])
    queries = build.op("Unsqueeze", [build.op("Range", [first, keys, unit]), second])
    distance = build.op("Sub", [columns, queries])  # [length, keys]
    causal = build.op("LessOrEqual", [distance, zero])
    padding = attention_bias = None
    if layer.padding == 2:
        padding = build.op("Cast", [build.mask], to=ir.DataType.INT32)
    elif layer.padding == 3:
        wide = build.op("And", [causal, build.op("Cast", [build.op("Unsqueeze", [build.mask, second])], to=9)])
        padding = build.op("Cast", [wide], to=ir.DataType.INT32)
    if layer.added == "mask":
        visible_keys = build.op("And", [causal, build.op("Cast", [build.op("Unsqueeze", [build.mask, axes])], to=9)])
        numbers = [
            build.constant(f"{number:g}", np.array(number, np.float32)) for number in (0.0, np.finfo(np.float32).min)
        ]
        attention_bias = build.op("Where", [visible_keys, *numbers])
    elif layer.added == "bias":
        distance_bias = build.op(
            "Mul", [build.op("Cast", [distance], to=1), build.constant("slope", np.array(0.1, np.float32))]
        )
        attention_bias = build.op("Unsqueeze", [distance_bias, build.constant("front", np.array([0, 1], np.int64))])
    batch, new, total = "batch_size", "sequence_length", "total_sequence_length"
    for value, dtype, dims in (
        (padding, ir.DataType.INT32, [batch, total] if layer.padding == 2 else [batch, new, total]),
        (attention_bias, ir.DataType.FLOAT, [batch if layer.added == "mask" else 1, 1, new, total]),
    ):
        if value is not None:
            value.dtype, value.shape = dtype, ir.Shape(dims)
    bias = build.weight("bias", sum(sizes)) if layer.biased else None
    node_attributes = {
        "num_heads": heads,
        "unidirectional": int(layer.unidirectional),
        "scale": layer.scale,
        **attributes,
    }
    if not layer.scale:
        del node_attributes["scale"]
    inputs: list[ir.Value | None] = [*rows, bias, padding, attention_bias, *caches]
    y, *presents = build.attention("MultiHeadAttention", inputs, node_attributes, heads, sizes[-1])
    return build.finish(y, caches, presents)


def run(model: ir.Model, calls: list[np.ndarray], masks: list[np.ndarray]) -> list[np.ndarray]:
    """Return the logits of each call, and at the end the caches; one after the other onto the caches."""
    outputs = []
    with session_of(model) as session:
        interface = Interface.of_session(session)
        past = interface.empty_past(len(calls[0]))
        for ids, mask in zip(calls, masks, strict=True):
            feeds = interface.feeds(ids, mask, past, needs_mask=False)
            logits, *present = session.run(["logits", *interface.present], feeds)
            past = dict(zip(interface.past, present, strict=True))
            outputs.append(logits)
    return [*outputs, *past.values()]


def tokens(rows: int, *lengths: int, seed: int = 1) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the random tokens of calls of these lengths, and their masks without padding."""
    random, ends = np.random.default_rng(seed), np.cumsum(lengths)
    return [random.integers(0, VOCABULARY, (rows, n)) for n in lengths], [np.ones((rows, n), np.int64) for n in ends]
