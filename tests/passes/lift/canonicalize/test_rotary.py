from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.ort.session import open_session
from tests.graphs import relative
from tests.passes.lift.canonicalize.common import FLOAT32, canonicalize

Number = Callable[[list[int]], ir.Value]


def test_a_spelled_out_rotary_embedding_becomes_the_standard_op(tmp_path: Path) -> None:
    size = 8

    def turn(tape: ir.tape.Tape, x: ir.Value, angles: ir.Value, number: Number) -> ir.Value:
        both = tape.op("Concat", [angles, angles], {"axis": -1})
        cos, sin = (tape.op("Unsqueeze", [tape.op(function, [both]), number([1])]) for function in ("Cos", "Sin"))
        first, second = (
            tape.op("Slice", [x, number([start]), number([end]), number([3]), number([1])])
            for start, end in ((0, size // 2), (size // 2, 2**63 - 1))
        )
        turned = tape.op("Concat", [tape.op("Neg", [second]), first], {"axis": -1})
        return tape.op("Add", [tape.op("Mul", [x, cos]), tape.op("Mul", [turned, sin])])

    model, before = rotary_model(size, turn, tmp_path / "before")
    canonicalize(model)
    assert sorted(node.op_type for node in model.graph) == ["Cos", "RotaryEmbedding", "Sin"]
    assert relative(before, run_rotary(model, size, tmp_path / "after")) < FLOAT32


def neighbours(
    size: int, *, after: int = 3, shape: list[int | str] | None = None
) -> Callable[[ir.tape.Tape, ir.Value, ir.Value, Number], ir.Value]:
    """Return what spells out a rotary embedding of neighbours as Cohere's export does, or nearly so."""

    def turn(tape: ir.tape.Tape, x: ir.Value, angles: ir.Value, number: Number) -> ir.Value:
        tiled = tape.op("Tile", [tape.op("Unsqueeze", [angles, number([after])]), number([1, 1, 1, 2])])
        doubled = tape.op("Reshape", [tiled, number([0, 0, size])])
        doubled.shape = ir.Shape(["batch", "length", size])
        cos, sin = (tape.op("Unsqueeze", [tape.op(function, [doubled]), number([1])]) for function in ("Cos", "Sin"))
        even, odd = (
            tape.op("Slice", [x, number([start]), number([2**63 - 1]), number([3]), number([2])]) for start in (0, 1)
        )
        pairs = [tape.op("Unsqueeze", [half, number([-1])]) for half in (tape.op("Neg", [odd]), even)]
        turned = tape.op("Reshape", [tape.op("Concat", pairs, {"axis": -1}), number([0, 0, 0, size])])
        turned.shape = ir.Shape(shape or ["batch", 2, "length", size])
        return tape.op("Add", [tape.op("Mul", [x, cos]), tape.op("Mul", [turned, sin])])

    return turn


def test_a_rotary_embedding_of_neighbours_becomes_the_standard_op(tmp_path: Path) -> None:
    model, before = rotary_model(8, neighbours(8), tmp_path / "before")
    canonicalize(model)
    assert sorted(node.op_type for node in model.graph) == ["Cos", "RotaryEmbedding", "Sin"]
    assert relative(before, run_rotary(model, 8, tmp_path / "after")) < FLOAT32


@pytest.mark.parametrize(
    "turn",
    [
        # a name that says the length, where the shape must say it
        neighbours(8, shape=["batch", 2, "other", 8]),
        # neighbours in x, halves in the angles: Tile of [.., 1, size / 2] repeats all of them
        neighbours(8, after=2),
    ],
)
def test_what_only_looks_like_a_rotation_of_neighbours_stays(
    tmp_path: Path, turn: Callable[[ir.tape.Tape, ir.Value, ir.Value, Number], ir.Value]
) -> None:
    model, before = rotary_model(8, turn, tmp_path / "before")
    canonicalize(model)
    assert "RotaryEmbedding" not in {node.op_type for node in model.graph}
    assert relative(before, run_rotary(model, 8, tmp_path / "after")) < FLOAT32


def rotary_model(
    size: int, turn: Callable[[ir.tape.Tape, ir.Value, ir.Value, Number], ir.Value], folder: Path
) -> tuple[ir.Model, np.ndarray]:
    """Return y = turn(x, angles) for x of two heads of ``size``, and what onnxruntime computes of it."""
    x = ir.val("x", ir.DataType.FLOAT, ["batch", 2, "length", size])
    angles = ir.val("angles", ir.DataType.FLOAT, ["batch", "length", size // 2])
    numbers: dict[str, ir.Value] = {}

    def number(values: list[int]) -> ir.Value:
        name = f"number{values}"
        return numbers.setdefault(name, ir.val(name, const_value=ir.tensor(np.array(values, np.int64), name=name)))

    tape = ir.tape.Tape()
    y = turn(tape, x, angles, number)
    for position, node in enumerate(tape.nodes):
        node.name = f"{node.op_type}{position}"
        node.outputs[0].dtype = ir.DataType.FLOAT
    y.name, y.shape = "y", x.shape
    graph = ir.Graph(
        [x, angles], [y], nodes=tape.nodes, initializers=list(numbers.values()), opset_imports={"": 23}, name="rotary"
    )
    model = ir.Model(graph, ir_version=10)
    return model, run_rotary(model, size, folder)


def run_rotary(model: ir.Model, size: int, folder: Path) -> np.ndarray:
    folder.mkdir()
    ir.save(model, folder / "model.onnx")
    random = np.random.default_rng(0)
    feeds = {"x": random.standard_normal((2, 2, 5, size)), "angles": random.uniform(0, 7, (2, 5, size // 2))}
    return open_session(folder / "model.onnx").run(["y"], {k: v.astype(np.float32) for k, v in feeds.items()})[0]
