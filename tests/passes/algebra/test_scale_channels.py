"""Scaled channels: the same function, less error of rounding, and what cannot be divided stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.products import linear_nodes
from graphopt.graph.diagnostics import PassReport
from graphopt.graph.weights import weight_of
from graphopt.numerics.formats import format_of
from graphopt.ort.runner import Runner
from graphopt.passes.algebra.scale_channels import (
    CHANNELS_SCALED,
    LEFT_IN_FLOATS,
    NO_BETTER,
    NO_WRITER,
    OTHER_READER,
    WEIGHT_DIVIDED,
    ScaleChannels,
    scales_of,
)
from graphopt.passes.common.formats import LinearFormat
from graphopt.passes.context import Statistics, make_context
from graphopt.quantization.rounding import round_to_nearest
from graphopt.quantization.statistics import Calibration
from graphopt.tasks import task_of
from tests.decoders import VOCABULARY, decoder
from tests.graphs import logits_of, relative, residual_model

TEXTS = [np.random.default_rng(3).integers(0, 24, 60 + row) for row in range(3)]
FORMAT = LinearFormat(format="int3", group=16)


def uneven(model: ir.Model, *, factor: float = 1.5) -> ir.Model:
    """Give the gains of norms sizes that differ, so that some channels count more than others."""
    for node in model.graph:
        gain = weight_of(node, 1) if node.op_type == "RMSNormalization" else None
        if gain is not None and gain.const_value is not None:
            sizes = np.exp(factor * np.random.default_rng(5).standard_normal(gain.const_value.shape.numpy()))
            gain.const_value = ir.tensor(sizes.astype(np.float32), name=gain.name)
    return model


def scale(model: ir.Model, folder: Path, **options: object) -> PassReport:
    calibration = Calibration(folder, lambda: TEXTS, Runner())
    shared = make_context(task_of(model.graph), statistics=Statistics(calibration))
    report: PassReport = ScaleChannels(linear=FORMAT, **options)(model, shared).report  # type: ignore[arg-type]
    return report


def weights(model: ir.Model) -> dict[str, np.ndarray]:
    return {
        node.name or "": weight.const_value.numpy()
        for node in linear_nodes(model.graph)
        if (weight := weight_of(node, 1)) is not None and weight.const_value is not None
    }


def test_the_logits_of_a_gated_decoder_stay(tmp_path: Path) -> None:
    model = uneven(decoder(2))
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, 20))
    before, old = logits_of(model, ids, tmp_path / "before"), weights(model)
    report = scale(model, tmp_path / "statistics")
    assert {change.what.code for change in report.changes} == {CHANNELS_SCALED.code, WEIGHT_DIVIDED.code}
    assert {skip.reason.code for skip in report.skips} <= {LEFT_IN_FLOATS.code, NO_WRITER.code, NO_BETTER.code}
    changed = {name for name, array in weights(model).items() if not np.array_equal(array, old[name])}
    assert any("down" in name for name in changed), changed
    # float32, through two layers: each weight and gain is rounded once more
    assert relative(before, logits_of(model, ids, tmp_path / "after")) < 2e-5


def test_the_error_of_rounding_is_what_the_report_says(tmp_path: Path) -> None:
    model = uneven(residual_model(32, 24))
    nodes = linear_nodes(model.graph)
    calibration = Calibration(tmp_path, lambda: TEXTS, Runner())
    hessians = {node.name: each.hessian().numpy() for node, each in calibration.inputs(model, nodes).items()}
    old, table = weights(model), format_of("int3")
    report = scale(model, tmp_path)
    new = weights(model)

    def error(name: str, matrix: np.ndarray, scales: np.ndarray) -> float:
        rounded = round_to_nearest(matrix, table, 16, "least_squares").dequantize() / scales[:, None]
        lost = old[name].astype(np.float64) - rounded
        return float(np.einsum("kn,kl,ln->", lost, hessians[name].astype(np.float64), lost))

    shares = {
        change.where: change.what.figures["share"]
        for change in report.changes
        if change.what.code == CHANNELS_SCALED.code
    }
    assert shares
    for name, before in old.items():
        place = f"{name}.weight" if f"{name}.weight" in shares else name
        if place in shares:
            scales = np.median(new[name] / np.where(before == 0, 1, before), axis=1)
            share = error(name, new[name], scales) / error(name, before, np.ones(len(before)))
            assert share == pytest.approx(shares[place], rel=0.02)  # weights were rounded to float32 in between
            assert share < 1  # else the pass leaves the weight alone


def test_inputs_of_one_size_stay(tmp_path: Path) -> None:
    ones = np.diag(np.full(4, 2.0, np.float32))
    assert (scales_of(ones, 0.7) == 1).all()
    assert (scales_of(np.zeros((4, 4), np.float32), 0.7) == 1).all()
    sizes = np.diag(np.array([1, 4, 16, 0], np.float32))
    # roots 1, 2, 4 and the least of them for what was always 0, with 2 in the middle
    assert scales_of(sizes, 1.0) == pytest.approx([0.5, 1, 2, 0.5])
    assert scales_of(sizes, 0.5) == pytest.approx(np.sqrt([0.5, 1, 2, 0.5]))


def test_what_cannot_be_divided_stays(tmp_path: Path) -> None:
    model = residual_model(32, 24)
    (read,) = {node.inputs[0] for node in linear_nodes(model.graph)[:1]}
    assert read is not None
    model.graph.outputs.append(read)
    before = weights(model)
    report = scale(model, tmp_path)
    assert OTHER_READER.code in {skip.reason.code for skip in report.skips}
    first = linear_nodes(model.graph)[0].name or ""
    assert np.array_equal(weights(model)[first], before[first])
    report = scale(residual_model(32, 24, layer_norm=True), tmp_path)
    assert {skip.reason.code for skip in report.skips} == {NO_WRITER.code, LEFT_IN_FLOATS.code}
