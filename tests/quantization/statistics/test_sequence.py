"""Statistics of inputs behind products that are rounded already, and matrices that make up for what these lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.products import linear_nodes
from graphopt.errors import InputError
from graphopt.graph.weights import Inline, weight_of
from graphopt.ort.runner import Runner
from graphopt.quantization.rounding.correction import CorrectedMatrix
from graphopt.quantization.statistics import InputStatistics, sequence
from tests.graphs import residual_model
from tests.quantization.statistics.test_collect import calibration, expected, texts


def rounded_weight(node: ir.Node) -> ir.TensorProtocol:
    weight = weight_of(node, 1)
    assert weight is not None
    assert weight.const_value is not None
    return ir.tensor(np.round(weight.const_value.numpy() * 4) / np.float32(4), name=weight.name)


def test_inputs_are_those_behind_rounded_products(tmp_path: Path) -> None:
    model, rows = residual_model(layers=3), texts()
    nodes, order = linear_nodes(model.graph), list[str]()
    before = [node.inputs[1].const_value.numpy().copy() for node in nodes]  # type: ignore[union-attr]

    def round_product(node: ir.Node, statistics: InputStatistics) -> ir.TensorProtocol:
        assert statistics.value == node.inputs[0].name  # type: ignore[union-attr]
        order.append(node.name or "")
        return rounded_weight(node)

    statistics_by_node = calibration(tmp_path, Runner(), texts=rows).inputs_in_sequence(
        model, nodes, "a", round_product
    )
    assert order == [node.name for node in nodes]
    for node, array in zip(nodes, before, strict=True):
        assert np.array_equal(node.inputs[1].const_value.numpy(), array)  # type: ignore[union-attr]
    after = model.clone()
    for node in linear_nodes(after.graph):
        weight_of(node, 1).const_value = rounded_weight(node)  # type: ignore[union-attr]
    for node, inputs in statistics_by_node.items():
        value, shift = node.inputs[0], inputs.shift()
        assert value is not None
        assert shift is not None
        X, Y = expected(model, value, rows), expected(after, value, rows)
        # integers are off by half a step, 1/2046 of the largest number of a vector; so are inputs behind six products
        bound = (1 + 6) * 2 / 2046 * np.abs(Y).max() ** 2
        for result, reference in ((inputs.hessian(), Y.T @ Y), (shift, Y.T @ (X - Y))):
            assert np.abs(result.numpy() - reference / len(Y)).max() <= bound
    assert np.abs(statistics_by_node[nodes[0]].shift().numpy()).max() == 0  # type: ignore[union-attr], nothing is in front of it
    assert np.abs(statistics_by_node[nodes[-1]].shift().numpy()).max() > 0  # type: ignore[union-attr]
    (folder,) = tmp_path.iterdir()
    assert not [file for file in folder.iterdir() if file.is_dir() or file.name.startswith("piece")]


@pytest.mark.parametrize(("in_memory", "checkpoint"), [(1 << 20, 16), (1 << 20, 2), (0, 16)])
def test_what_was_cut_off_goes_on_and_what_is_kept_needs_no_run(
    in_memory: int, checkpoint: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "_IN_MEMORY", in_memory)
    monkeypatch.setattr(sequence, "_CHECKPOINT", checkpoint)
    model = residual_model(layers=2)
    nodes, count = linear_nodes(model.graph), 0

    def stop(node: ir.Node, statistics: InputStatistics) -> ir.TensorProtocol:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return rounded_weight(node)

    def go_on(node: ir.Node, statistics: InputStatistics) -> ir.TensorProtocol:
        return rounded_weight(node)

    whole = calibration(tmp_path / "whole", Runner()).inputs_in_sequence(model, nodes, "a", go_on)
    with pytest.raises(KeyboardInterrupt):
        calibration(tmp_path / "cut", Runner()).inputs_in_sequence(model, nodes, "a", stop)
    # behind what lies on the disk, or the first piece: nothing was handed on there
    # (the original model may be a piece ahead)
    boundaries = {folder.name for folder in tmp_path.rglob("rounded/boundary-*")}
    assert boundaries == ({"boundary-1"} if checkpoint == 2 else set() if in_memory else {"boundary-2"})
    second_run = calibration(tmp_path / "cut", Runner()).inputs_in_sequence(model, nodes, "a", go_on)
    digests = [[(inputs.digest, inputs.shift_digest) for inputs in run.values()] for run in (whole, second_run)]
    assert digests[0] == digests[1]
    third_run = calibration(tmp_path / "cut", None).inputs_in_sequence(model, nodes, "a", go_on)
    assert list(third_run.values()) == list(second_run.values())
    with pytest.raises(InputError, match=r"they are not kept.*graphopt calibrate MODEL"):
        calibration(tmp_path / "cut", None).inputs_in_sequence(model, nodes, "b", go_on)


def test_a_corrected_matrix_is_that_of_least_squares() -> None:
    random = np.random.default_rng(0)
    X, W = random.normal(size=(200, 12)), random.normal(size=(12, 5)).astype(np.float32)
    Y = X @ (np.eye(12) + 0.1 * random.normal(size=(12, 12))) + 0.1 * random.normal(size=(200, 12))
    H, C = Y.T @ Y / 200, Y.T @ (X - Y) / 200

    def corrected_matrix(damping: float) -> np.ndarray:
        parts = (Inline.from_array(array.astype(np.float32)) for array in (H, C))
        return CorrectedMatrix(Inline.from_array(W), *parts, damping).numpy()

    best = np.linalg.lstsq(Y, X @ W, rcond=None)[0]
    # statistics and result are float32
    assert np.abs(corrected_matrix(1e-9) - best).max() < 1e-4
    losses = [np.square(X @ W - Y @ corrected_matrix(damping)).sum() for damping in (1e-9, 0.1, 1.0, 1e9)]
    assert losses == sorted(losses)
    assert losses[-1] == pytest.approx(np.square(X @ W - Y @ W).sum())
    zeros = Inline.from_array(np.zeros((12, 12), np.float32))
    assert np.array_equal(CorrectedMatrix(Inline.from_array(W), zeros, zeros, 0.1).numpy(), W)
