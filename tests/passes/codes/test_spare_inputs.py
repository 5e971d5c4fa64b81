"""Inputs that keep 8 bits: which are chosen, what their products read, and that nothing of it is left in the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.analysis.structure.product_codes import coded_nodes, rounding_of
from graphopt.analysis.structure.products import linear_nodes
from graphopt.compile.pipeline import optimize
from graphopt.graph.diagnostics import PassReport
from graphopt.graph.weights import weight_of
from graphopt.ort.runner import Runner
from graphopt.passes import PASSES
from graphopt.passes.codes.quantize_activations import QuantizeActivations
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from graphopt.passes.codes.spare_inputs import INPUT_ROUNDED, INPUT_SPARED, gain_of
from graphopt.passes.context import Statistics, make_context
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.statistics import Calibration
from graphopt.quantization.statistics.moments import Moments, sums_of
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.tasks import task_of
from tests.graphs import residual_model

TEXTS = [np.random.default_rng(3).integers(0, 24, 60 + row) for row in range(3)]


def choose(model: ir.Model, folder: Path, share: float) -> PassReport:
    step, calibration = PASSES["spare_inputs"], Calibration(folder, lambda: TEXTS, Runner())
    shared = make_context(task_of(model.graph), statistics=Statistics(calibration))
    report: PassReport = step(share=share)(model, shared).report  # type: ignore[call-arg]
    return report


def rounded_to(model: ir.Model) -> dict[str, str]:
    """Return what each product with codes rounds its input to, by the name of the product."""
    return {
        node.name or "": "" if rounding is None else rounding.attributes.get_string("activations", "")
        for node in coded_nodes(model.graph)
        for rounding in [rounding_of(node)]
    }


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 1), (0.5, 2), (1.0, 4)])
@pytest.mark.parametrize("scales", ["group", "token"])
def test_a_share_keeps_8_bits_and_the_notes_are_gone(tmp_path: Path, share: float, expected: int, scales: str) -> None:
    model = residual_model(32, 48)
    report = choose(model, tmp_path, share)
    spared = [change.what.figures for change in report.changes]
    others = [skip.reason.figures for skip in report.skips]
    assert {change.what.code for change in report.changes} <= {INPUT_SPARED.code}
    assert {skip.reason.code for skip in report.skips} <= {INPUT_ROUNDED.code}
    assert (len(spared), len(others)) == (expected, 4 - expected)
    assert all(one["error"] >= other["error"] for one in spared for other in others)
    linear = LinearFormat(format="nf4", group=16)
    weights = QuantizeWeights(linear=linear, lm_head=None, embedding=None, activations="float32")
    weights(model)
    QuantizeActivations(bits=4, scales=scales)(model)  # type: ignore[arg-type]
    found = list(rounded_to(model).values())
    assert found.count("int8") == expected
    assert found.count("uint4" if scales == "group" else "int4") == 4 - expected
    assert not any("ai.graphopt.spared" in made.metadata_props for node in model.graph for made in node.outputs)


def test_the_error_is_that_of_rounding_what_the_product_reads(tmp_path: Path) -> None:
    model = residual_model(64, 96)
    figures = [each.what.figures for each in choose(model, tmp_path, 1.0).changes]
    stated = {figure["input"]: figure["error"] for figure in figures}
    nodes = [node for node in linear_nodes(model.graph) if node.inputs[0] is not None and node.inputs[0].name in stated]
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs.extend(values[node.inputs[0].name] for node in nodes if node.inputs[0] is not None)
    with Runner().open_model(copy) as session:
        for node in nodes:
            weight, name = weight_of(node, 1), node.inputs[0].name if node.inputs[0] else ""
            assert weight is not None
            assert weight.const_value is not None
            W = weight.const_value.numpy().astype(np.float64)
            error, made = 0.0, 0.0
            for text in TEXTS:
                x = session.run([name], {"input_ids": text[None]})[0].reshape(-1, len(W))
                error += float(((quarter(x) - x).astype(np.float64) @ W).__pow__(2).sum())
                made += float((x.astype(np.float64) @ W).__pow__(2).sum())
            # errors of the groups of a token are correlated a little, and there are 183 tokens
            assert stated[name] == pytest.approx(error / made, rel=0.25)


def quarter(x: np.ndarray) -> np.ndarray:
    """Return x as 16 codes in groups of 32 with zero points, from the definition."""
    made = np.empty_like(x)
    for row in range(len(x)):
        for start in range(0, x.shape[1], 32):
            part = x[row, start : start + 32]
            low, high = min(0.0, float(part.min())), max(0.0, float(part.max()))
            step = (high - low) / 15 or 1.0
            zero = np.rint(-low / step)
            made[row, start : start + 32] = np.clip(np.rint(part / step), -zero, 15 - zero) * step
    return made


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([1, 31, 32, 33, 100]))
def test_the_noise_is_that_of_the_definition(seed: int, tokens: int, rows: int) -> None:
    x = np.random.default_rng(seed).standard_normal((tokens, rows)).astype(np.float32)
    expected = float(np.square(quarter(x).astype(np.float64) - x).sum())
    # a number halfway between two codes may go either way in float32; both are as far
    assert sums_of(x)[3] == pytest.approx(expected, rel=1e-3, abs=1e-6 * tokens * rows)
    assert sums_of(np.zeros_like(x))[3] == 0


def test_normal_numbers_have_the_noise_that_is_documented_and_spikes_more() -> None:
    random, plain, spiky = np.random.default_rng(0), Moments(64), Moments(64)
    x = random.standard_normal((4000, 64)).astype(np.float32)
    plain.add(x)
    x[:, ::16] *= 20
    spiky.add(x)
    # the figure in the docstring of `noise`; of 4000 x 64 numbers the mean is off by a percent
    assert plain.noise == pytest.approx(0.0065, rel=0.03)
    assert spiky.noise > 1.2 * plain.noise  # far beyond the percent by which either mean is off
    assert Moments(8).noise == 0


def test_a_weight_of_zeros_loses_nothing(tmp_path: Path) -> None:
    model = residual_model(32, 48)
    node = linear_nodes(model.graph)[0]
    weight = weight_of(node, 1)
    assert weight is not None
    assert weight.const_value is not None
    weight.const_value = ir.tensor(np.zeros(weight.const_value.shape.numpy(), np.float32), name=weight.name)
    calibration = Calibration(tmp_path, lambda: TEXTS, Runner())
    assert gain_of([node], calibration.inputs(model, [node])[node]) == 0


def test_the_preset_says_which_inputs_keep_8_bits(llama_artifact: Path, tmp_path: Path) -> None:
    chosen = load_recipe("w4a4").model_copy(update={"calibration": CalibrationOptions(windows=2, window=64)})
    made = optimize(llama_artifact, chosen, tmp_path / "out", target="ort-cpu", force=True, quality_tokens=64)
    report = next(report for report in made.manifest.passes if report.name == "spare_inputs")
    modes = [
        node.attributes.get_string("activations", "") for node in made.model.graph if node.op_type == "MatMulTable"
    ]
    inputs = len(report.changes) + len(report.skips)
    assert len(report.changes) == round(0.3 * inputs) > 0
    assert {"int8", "uint4"} <= set(modes)
