"""Directions that go past a product in floats: the same function, less to round, and thin products are left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.product_codes import coded_nodes
from graphopt.analysis.structure.products import linear_nodes
from graphopt.errors import InputError
from graphopt.graph.diagnostics import PassReport
from graphopt.ort.runner import Runner
from graphopt.passes import PASSES
from graphopt.passes.algebra.split_inputs import BRANCH, LM_HEAD, NO_DIRECTIONS, SPLIT, directions
from graphopt.passes.codes.quantize_weights import THIN
from graphopt.passes.context import Statistics, make_context
from graphopt.quantization.statistics import Calibration
from graphopt.tasks import task_of
from tests.graphs import residual_model, run_pass

TEXTS = [np.random.default_rng(3).integers(0, 24, 30 + row) for row in range(3)]


def split(model: ir.Model, folder: Path, **options: object) -> PassReport:
    step, calibration = PASSES["split_inputs"], Calibration(folder, lambda: TEXTS, Runner())
    shared = make_context(task_of(model.graph), statistics=Statistics(calibration))
    report: PassReport = step(**options)(model, shared).report
    return report


def logits(model: ir.Model) -> np.ndarray:
    with Runner().open_model(model) as session:
        return np.asarray(session.run(["logits"], {"input_ids": TEXTS[0][None]})[0])


def test_the_logits_stay_and_later_steps_leave_the_branch_alone(tmp_path: Path) -> None:
    model = residual_model(32, 24)
    before, products = logits(model), len(linear_nodes(model.graph))
    report = split(model, tmp_path, rank=2, least=1e-6)
    assert {change.what.code for change in report.changes} == {SPLIT.code}
    assert {skip.reason.code for skip in report.skips} == {LM_HEAD.code}
    # float32, through two layers and twice as many products
    assert np.abs(logits(model) - before).max() < 1e-5 * np.abs(before).max()
    skipped = run_pass(model, "quantize_weights").skips
    assert sum(skip.reason.code == THIN.code for skip in skipped) > products
    assert len(coded_nodes(model.graph)) == products
    again = split(model, tmp_path, rank=2)
    assert {skip.reason.code for skip in again.skips} == {BRANCH.code}


def test_what_is_left_lacks_the_directions(tmp_path: Path) -> None:
    model = residual_model(32, 24)
    names = [node.inputs[0].name for node in linear_nodes(model.graph) if node.inputs[0] is not None]
    split(model, tmp_path, rank=3, least=1e-6)
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    wanted = [f"{name}{part}" for name in dict.fromkeys(names[:-1]) for part in ("", ".rest.output")]
    copy.graph.outputs.extend(values[name] for name in wanted)
    with Runner().open_model(copy) as session:
        found = [session.run(wanted, {"input_ids": text[None]}) for text in TEXTS]
    for place in range(0, len(wanted), 2):
        x, rest = (np.concatenate([each[place + part][0] for each in found]) for part in (0, 1))
        energies = np.linalg.eigvalsh(x.T.astype(np.float64) @ x)
        # the iteration may miss a little of directions that are nearly as strong as the next
        assert (rest.astype(np.float64) ** 2).sum() < energies[:-3].sum() * 1.1


def test_inputs_without_a_strong_direction_stay(tmp_path: Path) -> None:
    model = residual_model(32, 24)
    nodes = len(model.graph)
    report = split(model, tmp_path, least=1.0)
    assert {skip.reason.code for skip in report.skips} == {NO_DIRECTIONS.code, LM_HEAD.code}
    assert len(model.graph) == nodes


def test_directions_of_odd_statistics() -> None:
    values, vectors = directions(np.zeros((5, 5), np.float32), 3)
    assert not values.any()
    assert np.array_equal(vectors.T @ vectors, np.eye(3))
    values, vectors = directions(np.diag(np.array([1, 9, 4], np.float32)), 8)
    assert values == pytest.approx([9 / 14, 4 / 14, 1 / 14])
    assert np.abs(vectors - np.eye(3)[:, [1, 2, 0]]).max() < 1e-6
    with pytest.raises(InputError, match="NaN or infinite"):
        directions(np.full((3, 3), np.nan, np.float32), 1)
