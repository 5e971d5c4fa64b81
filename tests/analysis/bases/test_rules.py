"""What ops do to bases, on graphs of a few nodes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.bases.axes import Basis
from graphopt.analysis.bases.search import find_bases
from graphopt.runtime_ops import OPERATORS

FLOAT = ir.DataType.FLOAT


class Graph:
    """A graph that grows node by node from an input [batch, 16]."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.x = ir.val("x", FLOAT, ["batch", 16])
        self.ports: list[ir.Value] = []

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        value = ir.val(name, const_value=ir.tensor(array, name=name))
        self.weights.append(value)
        return value

    def weight(self, name: str, *shape: int) -> ir.Value:
        return self.constant(name, np.random.default_rng(0).standard_normal(shape).astype(np.float32))

    def numbers(self, name: str, *values: int) -> ir.Value:
        return self.constant(name, np.array(values, np.int64))

    def op(self, op_type: str, inputs: list[ir.Value | None], shapes: dict[str, list[object]], **attributes: object):
        node = ir.node(
            op_type, inputs, attributes or None, num_outputs=len(shapes), name=f"{op_type}.{next(iter(shapes))}"
        )
        for value, (name, shape) in zip(node.outputs, shapes.items(), strict=True):
            value.name, value.dtype, value.shape = name, FLOAT, ir.Shape(shape)
        self.nodes.append(node)
        return node.outputs[0] if len(shapes) == 1 else node.outputs

    def linear(self, x: ir.Value, rows: int, columns: int, name: str) -> ir.Value:
        assert x.shape is not None
        return self.op("MatMul", [x, self.weight(f"{name}.weight", rows, columns)], {name: [*x.shape[:-1], columns]})

    def bases(self, *outputs: ir.Value) -> dict[str, Basis]:
        """Return the bases by the last axis of each tensor that lies in them."""
        opsets = {"": 23, "ai.graphopt": 1}
        graph = ir.Graph(
            [self.x, *self.ports], outputs, nodes=self.nodes, initializers=self.weights, opset_imports=opsets
        )
        basis_by_tensor: dict[str, Basis] = {}
        for basis in find_bases(graph):
            for axis in basis.axes:
                value = next((v for n in self.nodes for v in n.outputs if v.name == axis.tensor), None)
                if (
                    value is not None
                    and value.shape is not None
                    and axis.index == len(value.shape) - 1
                    and not axis.part
                ):
                    basis_by_tensor[axis.tensor] = basis
        return basis_by_tensor


def starts(basis: Basis) -> dict[str, tuple[int, ...]]:
    """Return where each weight around ``basis`` holds it."""
    return {site.node.outputs[0].name: site.starts for site in (*basis.writers, *basis.readers)}


def test_heads_are_factors_of_what_projections_write_and_read() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 24, "a")
    heads = g.op("Reshape", [a, g.numbers("s", -1, 3, 8)], {"heads": ["batch", 3, 8]})
    flat = g.op("Reshape", [heads, g.numbers("t", -1, 24)], {"flat": ["batch", 24]})
    # Without anything that looks at the heads the whole axis is still one of factors: its inner one is the basis.
    basis = g.bases(g.linear(flat, 24, 4, "y"))["heads"]
    assert basis.width == 8
    assert not basis.pins
    assert starts(basis) == {"a": (0, 8, 16), "y": (0, 8, 16)}


def test_factors_of_different_sizes_are_cut_to_the_finest() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 24, "a")
    coarse = g.op("Reshape", [a, g.numbers("s", -1, 2, 12)], {"coarse": ["batch", 2, 12]})
    fine = g.op("Reshape", [a, g.numbers("t", -1, 2, 3, 4)], {"fine": ["batch", 2, 3, 4]})
    bases = g.bases(g.linear(coarse, 12, 4, "y"), g.linear(fine, 4, 4, "z"))
    assert bases["fine"].width == 4
    assert starts(bases["fine"]) == {"a": (0, 4, 8, 12, 16, 20), "y": (0, 4, 8), "z": (0,)}


def test_factors_that_do_not_fit_pin_the_whole() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 24, "a")
    narrow = g.op("Reshape", [a, g.numbers("s", -1, 3, 8)], {"one": ["batch", 3, 8]})
    wide = g.op("Reshape", [a, g.numbers("t", -1, 2, 12)], {"other": ["batch", 2, 12]})
    bases = g.bases(g.linear(narrow, 8, 4, "y"), g.linear(wide, 12, 4, "z"))
    assert any("another way" in str(pin.reason) for pin in bases["a"].pins)
    assert any("another way" in str(pin.reason) for pin in bases["one"].pins)


@pytest.mark.parametrize("op_type", ["Split", "Slice"])
def test_parts_of_a_fused_projection_are_bases_of_their_own(op_type: str) -> None:
    g = Graph()
    a = g.linear(g.x, 16, 24, "a")
    if op_type == "Split":
        left, right = g.op("Split", [a, g.numbers("s", 8, 16)], {"left": ["batch", 8], "right": ["batch", 16]}, axis=1)
    else:
        axes = g.numbers("axes", 1)
        left = g.op("Slice", [a, g.numbers("0", 0), g.numbers("8", 8), axes], {"left": ["batch", 8]})
        right = g.op("Slice", [a, g.numbers("b", 8), g.numbers("e", 2**62), axes], {"right": ["batch", 16]})
    relu = g.op("Relu", [left], {"relu": ["batch", 8]})
    bases = g.bases(relu, g.linear(right, 16, 4, "y"))
    assert [pin.node for pin in bases["left"].pins] == ["Relu.relu"]
    assert not bases["right"].pins
    assert starts(bases["right"]) == {"a": (8,), "y": (0,)}


def test_a_strided_slice_is_not_followed() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 8, "a")
    bounds = [g.numbers(name, number) for name, number in (("b", 0), ("e", 8), ("axes", 1), ("steps", 2))]
    even = g.op("Slice", [a, *bounds], {"even": ["batch", 4]})
    bases = g.bases(g.linear(even, 4, 4, "y"))
    assert any("single entries" in str(pin.reason) for pin in bases["a"].pins)


def test_an_axis_whose_parts_are_all_observed_is_whole_again() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 24, "a")
    heads = g.op("Reshape", [a, g.numbers("s", -1, 3, 8)], {"heads": ["batch", 3, 8]})
    relu = g.op("Relu", [heads], {"relu": ["batch", 3, 8]})
    softmax = g.op("Softmax", [relu], {"again": ["batch", 3, 8]})
    flat = g.op("Reshape", [softmax, g.numbers("t", -1, 24)], {"flat": ["batch", 24]})
    bases = g.bases(g.linear(flat, 24, 4, "y"), relu)
    assert bases["a"].width == 24
    assert bases["a"].pins[0].node == "Relu.relu"
    assert bases["a"].pins[0].side == "observed"


def test_products_of_activations_contract_and_pass_on() -> None:
    g = Graph()
    q, k, v = (g.linear(g.x, 16, 8, name) for name in "qkv")
    transpose = g.op("Transpose", [k], {"turned": [8, "batch"]}, perm=[1, 0])
    scores = g.op("MatMul", [q, transpose], {"scores": ["batch", "batch"]})
    mixture = g.op("MatMul", [g.op("Softmax", [scores], {"p": ["batch", "batch"]}), v], {"mixed": ["batch", 8]})
    bases = g.bases(g.linear(mixture, 8, 4, "y"))
    assert bases["q"] is bases["k"]
    assert (bases["q"].role, bases["v"].role) == ("query_key", "value")
    assert bases["v"] is bases["mixed"]
    assert not bases["q"].pins
    assert not bases["v"].pins


def test_a_scale_per_row_passes_and_one_per_column_does_not() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 8, "a")
    gate = g.op("Sigmoid", [g.linear(g.x, 16, 1, "g")], {"gate": ["batch", 1]})
    rows = g.op("Mul", [a, gate], {"rows": ["batch", 8]})
    columns = g.op("Mul", [rows, g.weight("c", 8)], {"columns": ["batch", 8]})
    bases = g.bases(g.linear(columns, 8, 4, "y"))
    assert bases["a"] is bases["rows"]
    assert {(pin.node, pin.side) for pin in bases["rows"].pins} == {("Mul.columns", "observed")}
    assert {(pin.node, pin.side) for pin in bases["columns"].pins} == {("Mul.columns", "made")}


def test_a_number_divided_by_the_stream_pins_it() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 8, "a")
    bases = g.bases(g.op("Div", [g.constant("one", np.array(1, np.float32)), a], {"inverse": ["batch", 8]}))
    assert any(pin.node == "Div.inverse" for pin in bases["a"].pins)


def test_rows_set_to_zero_pass_and_entries_do_not() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 8, "a")
    zero = g.constant("zero", np.array(0, np.float32))
    row = g.op("Greater", [g.linear(g.x, 16, 1, "r"), zero], {"row": ["batch", 1]})
    entry = g.op("Greater", [g.linear(g.x, 16, 8, "e"), zero], {"entry": ["batch", 8]})
    row.dtype = entry.dtype = ir.DataType.BOOL
    rows = g.op("Where", [row, a, zero], {"kept": ["batch", 8]})
    entries = g.op("Where", [entry, rows, zero], {"picked": ["batch", 8]})
    bases = g.bases(g.linear(entries, 8, 4, "y"))
    assert bases["a"] is bases["kept"]
    assert any(pin.node == "Where.picked" for pin in bases["kept"].pins)


def test_rows_picked_summed_and_put_together_pass() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 8, "a")
    rows = g.op("Gather", [a, g.numbers("rows", 0, 1)], {"picked": [2, 8]}, axis=0)
    concat = g.op("Concat", [rows, a], {"both": ["more", 8]}, axis=0)
    total = g.op("ReduceSum", [concat, g.numbers("axes", 0)], {"total": [1, 8]}, keepdims=1)
    bases = g.bases(g.linear(total, 8, 4, "y"))
    assert bases["a"] is bases["total"]
    assert not bases["a"].pins


def test_coordinates_put_beside_others_are_pinned() -> None:
    g = Graph()
    a, b = g.linear(g.x, 16, 8, "a"), g.linear(g.x, 16, 8, "b")
    bases = g.bases(g.linear(g.op("Concat", [a, b], {"ab": ["batch", 16]}, axis=1), 16, 4, "y"))
    assert {pin.side for pin in bases["a"].pins} == {"observed"}
    assert {pin.side for pin in bases["ab"].pins} == {"made"}


def test_what_a_subgraph_reads_is_pinned() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 8, "a")
    inner = ir.node("Identity", [a], name="inner")
    inner.outputs[0].name, inner.outputs[0].dtype, inner.outputs[0].shape = "i", FLOAT, ir.Shape(["batch", 8])
    outer = ir.node("Identity", [a], name="other")
    outer.outputs[0].name, outer.outputs[0].dtype, outer.outputs[0].shape = "o", FLOAT, ir.Shape(["batch", 8])
    branches = {
        "then_branch": ir.Graph([], inner.outputs, nodes=[inner], name="then"),
        "else_branch": ir.Graph([], outer.outputs, nodes=[outer], name="else"),
    }
    choice = g.op("If", [g.constant("yes", np.array(True))], {"chosen": ["batch", 8]}, **branches)
    bases = g.bases(g.linear(a, 8, 4, "y"), choice)
    assert any("a subgraph of If" in str(pin.reason) for pin in bases["a"].pins)


def test_an_op_of_another_domain_pins_all_it_touches() -> None:
    g = Graph()
    a = g.linear(g.x, 16, 8, "a")
    node = ir.node("Whatever", [a], domain="com.example", name="custom")
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "w", FLOAT, ir.Shape(["batch", 8])
    g.nodes.append(node)
    bases = g.bases(g.linear(node.outputs[0], 8, 4, "y"))
    assert {pin.node for pin in (*bases["a"].pins, *bases["w"].pins)} == {"custom"}


def test_a_recurrence_passes_values_head_by_head_and_holds_all_else() -> None:
    g = Graph()
    parts = {name: g.linear(g.x, 16, 16, name) for name in ("q", "k", "v", "g")}
    shape: list[object] = ["batch", 1, 2, 8]
    target = g.numbers("target", -1, 1, 2, 8)
    q, k, v, decay = (g.op("Reshape", [part, target], {f"{name}.heads": shape}) for name, part in parts.items())
    beta = g.constant("beta", np.zeros((1, 1, 2, 0), np.float32))
    state = ir.val("past_key_values.0.recurrent_state", FLOAT, ["batch", 2, 8, 8])
    g.ports.append(state)
    mask = g.numbers("mask")
    node = OPERATORS["LinearRecurrence"].node([q, k, v, decay, beta, mask, state], {"delta": 0, "scale": 1.0}, name="r")
    for output, name, dims in zip(
        node.outputs, ("o", "present.0.recurrent_state"), (shape, ["batch", 2, 8, 8]), strict=True
    ):
        output.name, output.dtype, output.shape = name, FLOAT, ir.Shape(dims)
    g.nodes.append(node)
    flat = g.op("Reshape", [node.outputs[0], g.numbers("flat", -1, 16)], {"flat.o": ["batch", 16]})
    bases = g.bases(g.linear(flat, 16, 4, "y"), node.outputs[1])
    assert bases["o"] is bases["v.heads"] is bases["present.0.recurrent_state"]
    assert not bases["o"].pins
    assert starts(bases["o"]) == {"v": (0, 8), "y": (0, 8)}
    for name in ("q", "k", "g"):
        assert {pin.node for pin in bases[name].pins} == {"r"}
