"""Time a mixture of experts by `MatMulExperts` beside onnxruntime's `com.microsoft::QMoE`, in one process.

    python tools/bench/experts.py                                  # 64 experts of 2048 x 768, top 8, int4; two minutes
    python tools/bench/experts.py --tokens 1,8,128 --format fp6-e2m3
    python tools/bench/experts.py --experts 8 --hidden 4096 --inner 14336 --top 2
    python tools/bench/experts.py --processor                      # processor time, on a busy machine
    python tools/bench/experts.py --nodes 3                        # also graphopt's in 3 nodes, as for 3 formats

Each engine gets the scores of a router and returns the sum of its experts: it computes choices, weights, gated SiLU and
both products. Weights are the same numbers in blocks of 32. MatMulExperts rounds inputs of products to int8; QMoE does
so at accuracy level 4, and not at its default level. For a format that QMoE does not have, it runs int4. Calls go
through several layers in turn and have tokens of their own, so that weights come from memory and choices differ.
Engines take turns, in a new random order in each round; times are medians, ratios medians of the ratios of each round.
An engine that is off from float64 by more than 2% of the largest number is an error.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.numerics.formats import format_of
from graphopt.runtime_ops import declare, library_path
from graphopt.runtime_ops.instructions import instructions_here
from graphopt.runtime_ops.matmul_experts.spec.op import MATMUL_EXPERTS
from graphopt.runtime_ops.matmul_table.spec.packing import pack, tile

BLOCK = 32
FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
GRAPHOPT, DEFAULT, LEVEL_4 = "MatMulExperts", "QMoE", "QMoE, level 4"

Arrays = dict[str, np.ndarray]


class Layer:
    """Codes and scales of both products of all experts, of a format of tables.

    Args:
        sizes: experts, numbers of a token, numbers of an expert inside.
        table: what the codes mean.
        seed: of the numbers.
    """

    def __init__(self, sizes: tuple[int, int, int], table: np.ndarray, seed: int) -> None:
        experts, hidden, inner = sizes
        numbers = np.random.default_rng(seed)
        self.table, self.inner = table, inner
        self.codes, self.scales = [], []
        for rows, columns in ((hidden, 2 * inner), (inner, hidden)):
            self.codes.append(numbers.integers(0, len(table), (experts, rows, columns), np.uint8))
            size = 1 / (np.abs(table).mean() * rows**0.5)
            scales = numbers.uniform(0.5, 1.5, (experts, rows // BLOCK, columns)) * size
            self.scales.append(scales.astype(np.float16).astype(np.float32))

    def matrix(self, product: int, expert: int) -> np.ndarray:
        """Return the matrix of an expert, float64."""
        row_scales = np.repeat(self.scales[product][expert], BLOCK, axis=0)
        weight: np.ndarray = self.table[self.codes[product][expert]].astype(np.float64) * row_scales
        return weight


def reference(layer: Layer, x: np.ndarray, scores: np.ndarray, top: int) -> np.ndarray:
    """Return the output of a mixture by its definition, float64 [tokens, hidden]."""
    choices = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    shares = np.exp(np.take_along_axis(scores, choices, 1).astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    y = np.zeros(x.shape)
    for expert in np.unique(choices):
        token, slot = np.nonzero(choices == expert)
        gate_and_up = x[token].astype(np.float64) @ layer.matrix(0, expert)
        gate, up = gate_and_up[:, : layer.inner], gate_and_up[:, layer.inner :]
        np.add.at(
            y, token, shares[token, slot][:, None] * ((gate / (1 + np.exp(-gate)) * up) @ layer.matrix(1, expert))
        )
    return y


def graph_of(nodes: list[ir.Node], weights: Arrays, inputs: list[ir.Value], y: ir.Value) -> ir.Model:
    """Return a model of nodes whose initializers are named values."""
    values = {value.name: value for node in nodes for value in node.inputs if value is not None}
    constants = []
    for name, array in weights.items():
        values[name].const_value = ir.tensor(array, name=name)
        constants.append(values[name])
    opsets = {"": 23, "com.microsoft": 1}
    graph = ir.Graph(inputs, [y], nodes=nodes, initializers=constants, opset_imports=opsets, name="mixture")
    model = ir.Model(graph, ir_version=10)
    declare(model)
    return model


def ports(layer: Layer, hidden: int) -> list[ir.Value]:
    """Return the inputs of a mixture: tokens, and the router's score of each expert."""
    return [ir.val("x", FLOAT, ["tokens", hidden]), ir.val("scores", FLOAT, ["tokens", len(layer.codes[0])])]


def graphopt_model(layer: Layer, hidden: int, top: int, bits: int, parts: int = 1) -> ir.Model:
    """Return a mixture in the form of `group_experts`; with several parts, as for experts in several formats."""
    x, scores = ports(layer, hidden)
    nodes: list[ir.Node] = []
    weights: Arrays = {
        "top": np.array([top]),
        "axis": np.array([1]),
        "last": np.array([2]),
        "table": layer.table.astype(np.float32),
        "none": np.zeros((1, 1, 1, 1), np.float16),
        "bias": np.zeros(1, np.float32),
    }
    values = {name: ir.val(name, ir.DataType.from_numpy(array.dtype), array.shape) for name, array in weights.items()}

    def op(op_type: str, *inputs: ir.Value, outputs: int = 1, **attributes: Any) -> list[ir.Value]:
        nodes.append(ir.node(op_type, inputs, attributes, num_outputs=outputs, name=f"{op_type}{len(nodes)}"))
        for number, value in enumerate(nodes[-1].outputs):
            value.name = f"{nodes[-1].name}.{number}"
        return list(nodes[-1].outputs)

    def product(number: int, data: ir.Value, experts: ir.Value) -> ir.Value:
        total = part_of_product(number, 0, data, experts)
        for part in range(1, parts):
            (total,) = op("Add", total, part_of_product(number, part, data, experts))
        total.dtype, total.shape = FLOAT, ir.Shape(["tokens", top, layer.codes[number].shape[2]])
        return total

    def part_of_product(number: int, part: int, data: ir.Value, experts: ir.Value) -> ir.Value:
        """Return the products of every ``parts``-th expert, from ``part`` on, and zeros for the others."""
        rows, columns = layer.codes[number].shape[1:]
        name = f"{number}.{part}"
        stacks = {
            f"codes{name}": np.stack([pack(codes, bits) for codes in layer.codes[number][part::parts]]),
            f"scales{name}": np.stack(
                [tile(scales.astype(np.float16)) for scales in layer.scales[number][part::parts]]
            ),
        }
        indices = np.arange(len(layer.codes[number]))
        if parts > 1:
            stacks[f"places{name}"] = np.where(indices % parts == part, indices // parts, -1)
        weights.update(stacks)
        codes, stacked_scales, *positions = (
            ir.val(name, ir.DataType.from_numpy(array.dtype), array.shape) for name, array in stacks.items()
        )
        if positions:
            shape = experts.shape
            (experts,) = op("Gather", positions[0], experts)
            experts.dtype, experts.shape = INT64, shape
        attributes = {"rows": rows, "columns": columns, "group": BLOCK, "activations": "int8"}
        tensors = [data, codes, stacked_scales, values["table"], values["none"], values["bias"], experts]
        node = MATMUL_EXPERTS.node(tensors, attributes, name=f"product{name}")
        node.outputs[0].name = f"product{name}.y"
        nodes.append(node)
        return node.outputs[0]

    best, choices = op("TopK", scores, values["top"], outputs=2, axis=-1)
    choices.dtype, choices.shape = INT64, ir.Shape(["tokens", top])
    (shares,) = op("Softmax", best, axis=-1)
    gate, up = op("Split", product(0, x, choices), outputs=2, axis=-1, num_outputs=2)
    (gate_product,) = op("Mul", *op("Mul", gate, *op("Sigmoid", gate)), up)
    gate_product.dtype, gate_product.shape = FLOAT, ir.Shape(["tokens", top, layer.inner])
    down = product(1, gate_product, choices)
    (terms,) = op("Mul", down, *op("Unsqueeze", shares, values["last"]))
    (y,) = op("ReduceSum", terms, values["axis"], keepdims=0)
    y.name, y.dtype, y.shape = "y", FLOAT, x.shape
    return graph_of(nodes, weights, [x, scores], y)


def qmoe_model(layer: Layer, hidden: int, top: int, level: int) -> ir.Model:
    """Return a mixture as one node of onnxruntime; codes are those of int4 from -8 to 7."""
    x, scores = ports(layer, hidden)
    weights: Arrays = {}
    for number in range(2):
        codes, scales = (stack.transpose(0, 2, 1) for stack in (layer.codes[number], layer.scales[number]))
        if not number:  # QMoE interleaves the rows of gate and up
            order = np.arange(2 * layer.inner).reshape(2, layer.inner).T.reshape(-1)
            codes, scales = codes[:, order], scales[:, order]
        weights[f"codes{number}"] = np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)
        weights[f"scales{number}"] = np.ascontiguousarray(scales)
    values = [ir.val(name, ir.DataType.from_numpy(array.dtype), array.shape) for name, array in weights.items()]
    attributes: dict[str, Any] = {
        "k": top,
        "activation_type": "swiglu",
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "swiglu_fusion": 1,
        "normalize_routing_weights": 1,
        "expert_weight_bits": 4,
        "block_size": BLOCK,
        "accuracy_level": level,
    }
    inputs = [x, scores, values[0], values[1], None, values[2], values[3]]
    node = ir.node("QMoE", inputs, attributes, domain="com.microsoft", name="mixture")
    y = node.outputs[0]
    y.name, y.dtype, y.shape = "y", FLOAT, x.shape
    return graph_of([node], weights, [x, scores], y)


def session_of(model: ir.Model, threads: int) -> onnxruntime.InferenceSession:
    """Open a mixture."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # another engine's threads are its rivals
    options.register_custom_ops_library(str(library_path()))
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])


def confirm(name: str, y: np.ndarray, reference_y: np.ndarray) -> None:
    """End with an error where an engine computes something else."""
    error = np.abs(y - reference_y).max() / np.abs(reference_y).max()
    if not error < 0.02:
        raise SystemExit(f"{name} is off by {error:.1e} of the largest number")


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of a call.")] = "1,8,128",
    experts: int = 64,
    hidden: int = 2048,
    inner: int = 768,
    top: int = 8,
    format: Annotated[str, typer.Option(help="Of the experts that graphopt multiplies, a table.")] = "int4",
    layers: Annotated[int, typer.Option(help="Mixtures that calls go through in turn.")] = 2,
    rounds: int = 15,
    threads: int = 2,
    nodes: Annotated[int, typer.Option(help="that share the experts of a product, timed beside one, if more")] = 1,
    processor: Annotated[bool, typer.Option(help="time of processors, for machines that are busy")] = False,
) -> None:
    """Print the median time of each engine, and its ratio to MatMulExperts."""
    clock = time.process_time if processor else time.perf_counter
    sizes, chosen_format = (experts, hidden, inner), format_of(format)
    int4 = np.arange(-8, 8, dtype=np.float32)
    table = int4 if format == "int4" else np.array(chosen_format.operands["table"], np.float32)
    stacks = [Layer(sizes, int4, seed) for seed in range(layers)]
    table_layers = stacks if format == "int4" else [Layer(sizes, table, seed) for seed in range(layers)]
    engines = {
        GRAPHOPT: [
            session_of(graphopt_model(layer, hidden, top, chosen_format.bits), threads) for layer in table_layers
        ],
        DEFAULT: [session_of(qmoe_model(layer, hidden, top, 0), threads) for layer in stacks],
        LEVEL_4: [session_of(qmoe_model(layer, hidden, top, 4), threads) for layer in stacks],
    }
    if nodes > 1:
        engines[f"in {nodes} nodes"] = [
            session_of(graphopt_model(layer, hidden, top, chosen_format.bits, nodes), threads) for layer in table_layers
        ]
    print(f"{experts} experts of {hidden} x {inner}, top {top}, {format}; {instructions_here()}, {threads} threads")
    for count in map(int, tokens.split(",")):
        numbers = np.random.default_rng(count)
        calls = [
            {
                "x": numbers.standard_normal((count, hidden)).astype(np.float32),
                "scores": numbers.standard_normal((count, experts)).astype(np.float32),
            }
            for _ in range(layers)
        ]
        for name, sessions in engines.items():
            y = sessions[0].run(None, calls[0])[0]
            confirm(
                name,
                y,
                reference(
                    (stacks if name in (DEFAULT, LEVEL_4) else table_layers)[0], calls[0]["x"], calls[0]["scores"], top
                ),
            )
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds):
            for name in random.sample(list(engines), len(engines)):
                start = clock()
                engines[name][number % layers].run(None, calls[number % layers])
                times[name].append(clock() - start)
        ratios = {
            name: statistics.median(a / b for a, b in zip(times[name], times[GRAPHOPT], strict=True))
            for name in engines
        }
        for name in engines:
            print(f"{count:5} tokens  {name:14} {statistics.median(times[name]) * 1e3:9.3f} ms  {ratios[name]:6.2f} x")


if __name__ == "__main__":
    typer.run(main)
