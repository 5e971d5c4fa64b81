"""Recurrences as others write them: graphs of opset 17 by hand, with a `Scan` or a `Loop`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
Dims = Sequence[int | str]


def info(name: str, dims: Dims | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


class Graph:
    """Collects what a recurrence is written of.

    Args:
        state: the shape of its state.
        tokens: the shape of each tensor of tokens, with the axis "T" somewhere.
    """

    def __init__(self, state: Dims, tokens: Mapping[str, Dims]) -> None:
        self.state, self.tokens = state, dict(tokens)
        self.constants: list[onnx.TensorProto] = []
        self.before: list[onnx.NodeProto] = []
        self.step: list[onnx.NodeProto] = []

    def constant(self, name: str, array: np.ndarray) -> None:
        self.constants.append(numpy_helper.from_array(array, name))

    def add(self, op_type: str, inputs: Sequence[str], output: str, **attributes: object) -> None:
        """Write a node of a step."""
        self.step.append(helper.make_node(op_type, inputs, [output], name=f"step.{output}", **attributes))  # type: ignore[arg-type]

    def scan(self, **attributes: Sequence[int]) -> ir.Model:
        """Return the model with a `Scan`: the state S becomes "next", a token gives "y"."""
        names = list(self.tokens)
        tokens = [info(name, [dim for dim in dims if dim != "T"]) for name, dims in self.tokens.items()]
        body = helper.make_graph(
            self.step, "body", [info("S", self.state), *tokens], [info("next", None), info("y", None)]
        )
        outside = ["initial", *(f"all_{name}" for name in names)]
        axes = [list(dims).index("T") for dims in self.tokens.values()]
        node = helper.make_node(
            "Scan", outside, ["final", "ys"], name="scan", body=body, num_scan_inputs=len(names), scan_input_axes=axes,
            **attributes,  # type: ignore[arg-type]
        )  # fmt: skip
        return self._model([node])

    def loop(self, count_of: str) -> ir.Model:
        """Return the same with a `Loop`, which takes tokens by their number."""
        takers = [
            helper.make_node("Gather", [f"all_{name}", "index"], [name], axis=list(dims).index("T"))
            for name, dims in self.tokens.items()
        ]
        goes_on = helper.make_node("Identity", ["on"], ["goes_on"])
        inputs = [info("index", [], TensorProto.INT64), info("on", [], TensorProto.BOOL), info("S", self.state)]
        outputs = [info("goes_on", [], TensorProto.BOOL), info("next", None), info("y", None)]
        body = helper.make_graph([*takers, *self.step, goes_on], "body", inputs, outputs)
        axis = list(self.tokens[count_of]).index("T")
        self.constant("axis_of_tokens", np.array(axis))
        self.constant("true", np.array(True))
        count = [
            helper.make_node("Shape", [f"all_{count_of}"], ["shape"]),
            helper.make_node("Gather", ["shape", "axis_of_tokens"], ["count"]),
        ]
        node = helper.make_node("Loop", ["count", "true", "initial"], ["final", "ys"], name="loop", body=body)
        return self._model([*count, node])

    def _model(self, nodes: Sequence[onnx.NodeProto]) -> ir.Model:
        inputs = [info("initial", self.state), *(info(f"all_{name}", dims) for name, dims in self.tokens.items())]
        made = {name for node in self.before for name in node.output}
        inputs = [port for port in inputs if port.name not in made]
        shapes = [info(name, dims) for name, dims in self.shapes_before().items()]
        known = {port.name for port in inputs}
        inputs += [info(name, None) for node in self.before for name in node.input if name not in known | made]
        graph = helper.make_graph(
            [*self.before, *nodes],
            "foreign",
            inputs,
            [info("ys", None), info("final", None)],
            self.constants,
            value_info=shapes,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        return ir.from_proto(model)

    def shapes_before(self) -> dict[str, Dims]:
        """Return the shapes of tensors that nodes in front of the recurrence make."""
        made = {name for node in self.before for name in node.output}
        return {f"all_{name}": dims for name, dims in self.tokens.items() if f"all_{name}" in made}


def attention(
    *, delta: bool, gated: bool, heads: int = 3, channels: int = 8, width: int = 5, key_heads: int = 0
) -> Graph:
    """Return linear attention: tokens [T, B, H, ..], by matrices, with the decay's exponential in the step."""
    lead: list[int | str] = ["B", heads]
    of_keys: Dims = ["T", "B", key_heads or heads, channels]
    tokens: dict[str, Dims] = {"q": of_keys, "k": of_keys, "v": ["T", *lead, width]}
    if gated:
        tokens["g"] = ["T", *lead]
    if delta:
        tokens["b"] = ["T", *lead, 1]
    graph = Graph([*lead, channels, width], tokens)
    graph.constant("last", np.array([-1]))
    graph.constant("last_two", np.array([-1, -2]))
    graph.constant("one_before", np.array([-2]))
    graph.add("Unsqueeze", ["k", "last"], "k_column")
    state = "S"
    if gated:
        graph.add("Exp", ["g"], "factor")
        graph.add("Unsqueeze", ["factor", "last_two"], "factor_of_matrix")
        graph.add("Mul", ["S", "factor_of_matrix"], "decayed")
        state = "decayed"
    written = "v"
    if delta:
        graph.add("Mul", ["k_column", state], "products")
        graph.add("ReduceSum", ["products", "one_before"], "read", keepdims=0)
        graph.add("Sub", ["v", "read"], "difference")
        graph.add("Mul", ["difference", "b"], "written")
        written = "written"
    graph.add("Unsqueeze", [written, "one_before"], "row")
    graph.add("Mul", ["k_column", "row"], "outer")
    graph.add("Add", [state, "outer"], "next")
    graph.constant("scale", np.array(0.25, np.float32))
    graph.add("Mul", ["q", "scale"], "scaled_q")
    graph.add("Unsqueeze", ["scaled_q", "one_before"], "q_row")
    graph.add("MatMul", ["q_row", "next"], "y_row")
    graph.add("Squeeze", ["y_row", "one_before"], "y")
    return graph
