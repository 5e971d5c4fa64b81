"""Decoders of any depth, built by hand: attention with a cache, gated MLPs, windows in some layers; with no export."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD, INNER = 48, 32, 4, 2, 8, 48
EXPERTS, EXPERTS_PER_TOKEN = 8, 2


def decoder(layers: Sequence[str] | int, *, seed: int = 0) -> ir.Model:
    """Return a decoder with grouped queries, rotary positions, a growing cache and a gated MLP in each layer.

    Args:
        layers: for each layer "local", which reads a window of 4 tokens, "global", which reads all, or "experts", which
            reads all and has 8 MLPs of which a router chooses 2 for each token; a number of layers is of global ones.
        seed: of the weights.
    """
    kinds = ["global"] * layers if isinstance(layers, int) else list(layers)
    random_numbers = np.random.default_rng(seed)
    nodes: list[ir.Node] = []
    weights: list[ir.Value] = []

    def constant(name: str, array: np.ndarray) -> ir.Value:
        weights.append(ir.val(name, const_value=ir.tensor(array, name=name)))
        return weights[-1]

    def weight(name: str, *shape: int) -> ir.Value:
        return constant(name, (random_numbers.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def op(
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        dims: Sequence[object] | None = None,
        **attributes: object,
    ) -> ir.Value:
        return ops(op_type, inputs, name, [dims], **attributes)[0]

    def ops(
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        dims: Sequence[Sequence[object] | None],
        **attributes: object,
    ) -> Sequence[ir.Value]:
        node = ir.node(op_type, inputs, attributes or None, name=name, num_outputs=len(dims))  # type: ignore[arg-type]
        nodes.append(node)
        for number, (value, sizes) in enumerate(zip(node.outputs, dims, strict=True)):
            value.name = f"{name}.out{number or ''}"
            if sizes is not None:  # where masks and positions have whatever types onnxruntime infers
                value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(sizes)  # type: ignore[arg-type]
        return node.outputs

    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "length"])
    positions = ir.val("position_ids", ir.DataType.INT64, ["batch", "length"])
    mask_input = ir.val("attention_mask", ir.DataType.INT64, ["batch", "total"])
    inputs, outputs = [ids, mask_input, positions], []
    hidden = ["batch", "length", WIDTH]

    # shared by all layers: angles of the positions, masks
    angles = op(
        "Mul",
        [
            op("Cast", [op("Unsqueeze", [positions, constant("two", np.array([2]))], "spread")], "floats", to=1),
            constant("frequencies", (0.1 ** np.arange(HEAD // 2)).astype(np.float32)),
        ],
        "angles",
    )
    cos, sin = op("Cos", [angles], "cos"), op("Sin", [angles], "sin")
    total = op("Shape", [mask_input], "total", start=1, end=2)
    length = op("Shape", [ids], "length", start=1, end=2)
    scalar = [op("Squeeze", [value], f"scalar{number}") for number, value in enumerate((total, length))]
    zero, unit = constant("zero", np.array(0)), constant("one", np.array(1))
    keys = op("Range", [zero, scalar[0], unit], "keys")
    queries = op(
        "Unsqueeze",
        [op("Range", [op("Sub", scalar, "past"), scalar[0], unit], "places"), constant("last", np.array([1]))],
        "queries",
    )
    padding = op(
        "Cast", [op("Unsqueeze", [mask_input, constant("axes", np.array([1, 2]))], "spread_mask")], "there", to=9
    )
    causal = op("And", [op("LessOrEqual", [keys, queries], "causal"), padding], "global_mask")
    window_mask = op("Greater", [keys, op("Sub", [queries, constant("window", np.array(4))], "edge")], "near")
    masks = {"global": causal, "local": op("And", [causal, window_mask], "local_mask")}

    x = op("Gather", [weight("table", VOCABULARY, WIDTH), ids], "embedding", hidden, axis=0)
    for number, kind in enumerate(kinds):

        def norm(value: ir.Value, name: str, number: int = number) -> ir.Value:
            gain = random_numbers.uniform(0.5, 1.5, WIDTH).astype(np.float32)
            return op(
                "RMSNormalization", [value, constant(f"{name}{number}.gain", gain)], f"{name}{number}", hidden, axis=-1
            )

        def linear(value: ir.Value, rows: int, columns: int, name: str, number: int = number) -> ir.Value:
            name = f"{name}{number}"
            return op("MatMul", [value, weight(f"{name}.weight", rows, columns)], name, ["batch", "length", columns])

        def heads(value: ir.Value, count: int, name: str, number: int = number) -> ir.Value:
            split = op(
                "Reshape",
                [value, constant(f"{name}{number}.sizes", np.array([0, 0, count, HEAD]))],
                f"split_{name}{number}",
                ["batch", "length", count, HEAD],
            )
            return op(
                "Transpose", [split], f"{name}_heads{number}", ["batch", count, "length", HEAD], perm=[0, 2, 1, 3]
            )

        block_input = norm(x, "input_norm")
        q = heads(linear(block_input, WIDTH, HEADS * HEAD, "q"), HEADS, "q")
        k = heads(linear(block_input, WIDTH, GROUPS * HEAD, "k"), GROUPS, "k")
        v = heads(linear(block_input, WIDTH, GROUPS * HEAD, "v"), GROUPS, "v")
        q, k = (
            op("RotaryEmbedding", [projection, cos, sin], f"{name}_turned{number}", ["batch", count, "length", HEAD])
            for projection, count, name in ((q, HEADS, "q"), (k, GROUPS, "k"))
        )
        cache = []
        for part, value in (("key", k), ("value", v)):
            past = ir.val(f"past_key_values.{number}.{part}", ir.DataType.FLOAT, ["batch", GROUPS, "past", HEAD])
            inputs.append(past)
            cache.append(
                op("Concat", [past, value], f"present_{part}{number}", ["batch", GROUPS, "total", HEAD], axis=2)
            )
            cache[-1].name = f"present.{number}.{part}"
        outputs += cache
        attention_output = op(
            "Attention",
            [q, *cache, masks["local" if kind == "local" else "global"]],
            f"attention{number}",
            ["batch", HEADS, "length", HEAD],
            scale=HEAD**-0.5,
        )
        joined_heads = op(
            "Reshape",
            [
                op(
                    "Transpose",
                    [attention_output],
                    f"tokens{number}",
                    ["batch", "length", HEADS, HEAD],
                    perm=[0, 2, 1, 3],
                ),
                constant(f"joined{number}.sizes", np.array([0, 0, HEADS * HEAD])),
            ],
            f"joined{number}",
            hidden,
        )
        x = op("Add", [x, linear(joined_heads, HEADS * HEAD, WIDTH, "o")], f"attended{number}", hidden)
        block_input = norm(x, "mlp_norm")

        def mlp(value: ir.Value, part: str = "", number: int = number) -> ir.Value:
            inner = ["batch", "length", INNER]
            gate = linear(value, WIDTH, INNER, f"{part}gate")
            silu = op(
                "Mul", [gate, op("Sigmoid", [gate], f"{part}sigmoid{number}", inner)], f"{part}silu{number}", inner
            )
            product = op("Mul", [silu, linear(value, WIDTH, INNER, f"{part}up")], f"{part}gated{number}", inner)
            return linear(product, INNER, WIDTH, f"{part}down")

        def experts(value: ir.Value, number: int = number) -> ir.Value:
            wide, top_dims = ["batch", "length", EXPERTS], ["batch", "length", EXPERTS_PER_TOKEN]
            scores = linear(value, WIDTH, EXPERTS, "router")
            chances = op("Softmax", [scores], f"chances{number}", wide, axis=-1)
            count = constant(f"chosen{number}.count", np.array([EXPERTS_PER_TOKEN]))
            best, top_indices = ops("TopK", [chances, count], f"chosen{number}", [top_dims, top_dims], axis=-1)
            top_indices.dtype = ir.DataType.INT64
            zeros = op("Sub", [chances, chances], f"nothing{number}", wide)
            shares = op("ScatterElements", [zeros, top_indices, best], f"shares{number}", wide, axis=-1)
            share_dims = [["batch", "length", 1]] * EXPERTS
            parts = ops("Split", [shares], f"share{number}", share_dims, axis=-1, num_outputs=EXPERTS)
            total = None
            for expert, share in enumerate(parts):
                expert_output = op(
                    "Mul", [mlp(value, f"expert{expert}."), share], f"expert{expert}.part{number}", hidden
                )
                total = (
                    expert_output
                    if total is None
                    else op("Add", [total, expert_output], f"expert{expert}.sum{number}", hidden)
                )
            assert total is not None
            return total

        x = op("Add", [x, experts(block_input) if kind == "experts" else mlp(block_input)], f"residual{number}", hidden)
    gain = constant("final_norm.gain", random_numbers.uniform(0.5, 1.5, WIDTH).astype(np.float32))
    final = op("RMSNormalization", [x, gain], "final_norm", hidden, axis=-1)
    logits = op("MatMul", [final, weight("head.weight", WIDTH, VOCABULARY)], "head", ["batch", "length", VOCABULARY])
    logits.name = "logits"
    graph = ir.Graph(
        inputs, [logits, *outputs], nodes=nodes, initializers=weights, opset_imports={"": 23}, name="decoder"
    )
    return ir.Model(graph, ir_version=10)


def matrix_product(graph: ir.Graph) -> None:
    """Let a decoder make its angles by a product of matrices, frequencies [1, pairs, 1] times positions."""
    old = next(node for node in graph if node.name == "angles")
    weight, pairs = graph.initializers["frequencies"], HEAD // 2
    assert weight.const_value is not None
    column = ir.val("column", const_value=ir.tensor(weight.const_value.numpy().reshape(1, pairs, 1), name="column"))
    sizes = ir.val("sizes", const_value=ir.tensor(np.array([1, pairs, 1]), name="sizes"))
    for value in (column, sizes):
        graph.initializers[value.name or ""] = value
    spread = ir.node("Expand", [column, sizes], name="spread_out")
    row = ir.node("Transpose", [old.inputs[0]], {"perm": [0, 2, 1]}, name="row")
    outer = ir.node("MatMul", [spread.outputs[0], row.outputs[0]], name="outer")
    back = ir.node("Transpose", [outer.outputs[0]], {"perm": [0, 2, 1]}, name="back")
    for node, dims in (
        (spread, [1, pairs, 1]),
        (row, ["batch", 1, "length"]),
        (outer, ["batch", pairs, "length"]),
        (back, ["batch", "length", pairs]),
    ):
        value = node.outputs[0]
        value.name, value.dtype, value.shape = f"{node.name}.out", ir.DataType.FLOAT, ir.Shape(dims)
    graph.insert_before(old, [spread, row, outer, back])
    old.outputs[0].replace_all_uses_with(back.outputs[0])
    graph.remove(old, safe=True)


def shuffle_order(model: ir.Model, seed: int = 0) -> None:
    """Put the nodes of a graph into another order in which each stands behind what it reads, and its weights too."""
    chance, graph = random.Random(seed), model.graph
    waiting = {node: {v.producer() for v in node.inputs if v is not None} - {None} for node in graph}
    readers: dict[ir.Node, list[ir.Node]] = {node: [] for node in waiting}
    for node, producers in waiting.items():
        for producer in producers:
            readers[producer].append(node)  # type: ignore[index]
    ready, order = [node for node, producers in waiting.items() if not producers], []
    while ready:
        node = ready.pop(chance.randrange(len(ready)))
        order.append(node)
        for reader in readers[node]:
            waiting[reader].discard(node)
            ready += [] if waiting[reader] else [reader]
    graph.remove(order)
    graph.extend(order)
    weights = list(graph.initializers.items())
    chance.shuffle(weights)
    graph.initializers.clear()
    graph.initializers.update(weights)


def shuffle_names(model: ir.Model, seed: int = 0) -> None:
    """Give every node, value, weight, input and output of a graph another name, in place."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    names = [f"n{number}" for number in range(len(values) + len(list(graph)))]
    random.Random(seed).shuffle(names)
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    for item, name in zip([*values, *graph], names, strict=True):
        item.name = name
    for value in initializers:
        graph.initializers[value.name or ""] = value
