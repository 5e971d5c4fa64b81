from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from graphopt import provenance
from graphopt.passes.fold_norms import FoldNorms, FoldNormsOptions
from graphopt.passes.rotate import Rotate, RotateOptions
from tests.graphs import logits, relative, residual_model

# float32: each weight is rounded once more after the rotation, sums of up to 24 terms, 3 layers; seen 5e-7.
FLOAT32 = 5e-6


def rotate(model: ir.Model, **options: object) -> object:
    return Rotate(RotateOptions(**options))(model).report  # type: ignore[arg-type, attr-defined]


def weights(model: ir.Model) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy().copy() for name, value in model.graph.initializers.items()}


@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([4, 6, 12, 16, 20, 24]),
    layers=st.integers(1, 3),
    biased=st.booleans(),
    multiplier=st.sampled_from([None, 3.0]),
    kind=st.sampled_from(["hadamard", "random"]),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_logits_stay_and_every_weight_of_the_residual_moves(
    tmp_path: Path, seed: int, width: int, layers: int, biased: bool, multiplier: float | None, kind: str
) -> None:
    model = residual_model(width, layers=layers, seed=seed, biased=biased, multiplier=multiplier)
    FoldNorms(FoldNormsOptions())(model)
    before, old = logits(model, tmp_path / "before"), weights(model)
    rotate(model, residual=kind, seed=seed)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    moved = {name for name, array in weights(model).items() if not np.array_equal(array, old[name])}
    expected = {"table", "head.weight", *(f"{name}{n}.weight" for name in ("up", "down") for n in range(layers))}
    assert moved == expected | ({f"down{n}.bias" for n in range(layers)} if biased else set())


def test_an_outlier_in_one_coordinate_is_spread_over_all() -> None:
    model = residual_model(width=64, gains=False)
    table = model.graph.initializers["table"].const_value.numpy().copy()
    table[:, 7] *= 100
    model.graph.initializers["table"].const_value = ir.tensor(table, name="table")
    rotate(model)
    after = model.graph.initializers["table"].const_value.numpy()
    peak = lambda array: np.abs(array).max() / np.sqrt((array**2).mean())  # noqa: E731
    # before: one column holds nearly all the energy, peak/rms is near sqrt(64); after: near a Gaussian's extreme
    assert peak(table) > 8
    assert peak(after) < 4


def test_what_is_pinned_stays_with_the_node_that_pins_it(tmp_path: Path) -> None:
    model = residual_model(post_norm=True)
    FoldNorms(FoldNormsOptions())(model)
    old = weights(model)
    report = rotate(model)
    assert not report.changes
    assert any("at post_norm0" in skip.where and "gain of its own" in skip.reason for skip in report.skips)
    assert all(np.array_equal(array, old[name]) for name, array in weights(model).items())


def test_a_tied_head_gets_weights_of_its_own(tmp_path: Path) -> None:
    from graphopt.passes.canonicalize import Canonicalize, CanonicalizeOptions

    model = residual_model(tied=True)
    before = logits(model, tmp_path / "before")
    Canonicalize(CanonicalizeOptions())(model)
    FoldNorms(FoldNormsOptions())(model)
    rotate(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_the_seed_decides_and_is_recorded() -> None:
    models = [residual_model(gains=False) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        rotate(model, seed=seed)
    one, same, other = (weights(model)["table"] for model in models)
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert provenance.history(models[0].graph.initializers["table"])[0] == ["rotate"]


def test_a_width_without_a_hadamard_matrix_is_said(tmp_path: Path) -> None:
    model = residual_model(width=10, gains=False)
    report = rotate(model)
    assert all("random orthogonal 10" in change.what for change in report.changes)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="residual"):
        RotateOptions(residual="diagonal")  # type: ignore[arg-type]


def test_an_exported_llama_keeps_its_logits(llama_canonical: ir.Model, tmp_path: Path) -> None:
    from graphopt.verify import TOLERANCE, Verifier

    verifier = Verifier(tmp_path, {})
    verifier.start(llama_canonical)
    report = rotate(llama_canonical)
    assert len(report.changes) == 5 + 11
    assert verifier.check(llama_canonical, "rotate", "exact").figures["largest_change"] < TOLERANCE
