"""Caches that are cut to a window grow: a pass like any other, added by itself, checked, recorded and replayed."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

import graphopt
from graphopt.analysis.structure.contrib import (
    CUTS_TO_WINDOW,
    PADDING,
    WINDOWS,
    state_caches,
    stated_windows,
    windowed_nodes,
)
from graphopt.artifact import artifact
from graphopt.artifact.artifact import MODEL
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.errors import InputError, VerificationError
from graphopt.models.export import export
from graphopt.passes.importing.grow_caches import GrowCaches
from graphopt.passes.recipe import load_recipe
from graphopt.tasks.causal_lm.interface import Interface
from tests.contrib_graphs import FLOAT32, Layer, group_query_model, run, tokens
from tests.graphs import relative, run_pass, save

WINDOW = 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A plain file whose only layer cuts its cache to a window, which is less than a probe has tokens."""
    (tmp_path / "plain").mkdir()
    return save(group_query_model(Layer(window=WINDOW), sliding_window_cache=1), tmp_path / "plain")


def test_reading_leaves_the_graph_and_says_how_it_is_fed(file: Path) -> None:
    model = artifact.read(file).model
    assert windowed_nodes(model.graph)
    caches = {f"past_key_values.0.{part}": WINDOW for part in ("key", "value")}
    assert stated_windows(model.metadata_props) == Interface.of_graph(model.graph).windows == caches
    assert {cache.shape for cache in Interface.of_graph(model.graph).empty_past(2).values()} == {(2, 2, WINDOW, 16)}
    assert model.metadata_props[PADDING] == "none"


@pytest.mark.parametrize("window", [1, 3, 50])
def test_logits_stay_and_caches_grow(window: int) -> None:
    model = group_query_model(Layer(window=window), sliding_window_cache=1)
    state_caches(model)
    calls = tokens(1, 7, 2, 1)
    *before, cut, _ = run(model, *calls)
    assert cut.shape[2] == window
    report = run_pass(model, "grow_caches")
    assert [str(change.what) for change in report.changes] == [
        f"its cache was cut to {window} tokens and grows now; the window stays"
    ]
    assert WINDOWS not in model.metadata_props
    assert not windowed_nodes(model.graph)
    *after, grown, _ = run(model, *calls)
    assert grown.shape[2] == 10
    assert max(relative(a, b) for a, b in zip(before, after, strict=True)) < FLOAT32


def test_a_length_that_the_shape_states_is_fed_and_then_dropped() -> None:
    model = group_query_model(Layer(window=WINDOW), sliding_window_cache=1)
    for value in model.graph.inputs:
        if (value.name or "").startswith("past"):
            value.shape = ir.Shape(["batch_size", 2, 8, 16])
    state_caches(model)
    assert set(stated_windows(model.metadata_props).values()) == {8}
    *before, cut, _ = run(model, *tokens(1, 7, 5))
    assert cut.shape[2] == 8
    run_pass(model, "grow_caches")
    *after, grown, _ = run(model, *tokens(1, 7, 5))
    assert grown.shape[2] == 12
    assert max(relative(a, b) for a, b in zip(before, after, strict=True)) < FLOAT32


def test_the_step_is_added_where_it_is_needed_checked_and_replayed(file: Path, tmp_path: Path) -> None:
    manifest = optimize(file, "rotate", tmp_path / "out").manifest
    assert manifest.recipe is not None
    assert [step["step"] for step in manifest.recipe["steps"]][:2] == ["grow_caches", "canonicalize"]
    assert [report.name for report in manifest.passes][:2] == ["grow_caches", "canonicalize"]
    assert (manifest.checks[0].after, manifest.checks[0].status) == ("grow_caches", "measured")
    assert manifest.checks[0].figures["largest_change"] < FLOAT32
    proof = verify(file, tmp_path / "out")
    assert [check.status for check in proof.checks] == ["proved", "proved", "measured"]
    assert (
        load_recipe("rotate").fitting(artifact.read(tmp_path / "out").model.graph) == load_recipe("rotate").with_lower()
    )


def test_a_window_that_is_lost_is_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite = GrowCaches.rewrite

    def careless(self: GrowCaches, model: ir.Model, context: object) -> None:
        rewrite(self, model, context)  # type: ignore[arg-type]
        for node in model.graph:
            node.attributes.pop("local_window_size", None)

    monkeypatch.setattr(GrowCaches, "rewrite", careless)
    with pytest.raises(VerificationError, match="grow_caches is exact, but it moved the logits"):
        optimize(file, "rotate", tmp_path / "out")
    with pytest.raises(VerificationError, match="grow_caches is exact, but it moved the logits"):
        export(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_is_such_a_step_too_and_what_is_made_of_it_is_not(file: Path, tmp_path: Path) -> None:
    manifest = export(file, tmp_path / "exported")
    assert [report.name for report in manifest.passes] == ["grow_caches"]
    assert [(check.after, check.status) for check in manifest.checks] == [("grow_caches", "measured")]
    model = ir.load(tmp_path / "exported" / MODEL)
    assert all(CUTS_TO_WINDOW not in node.attributes for node in model.graph)
    made = optimize(tmp_path / "exported", "rotate", tmp_path / "out").manifest
    assert [report.name for report in made.passes] == ["grow_caches", "canonicalize", "fold_norms", "rotate", "lower"]
    assert verify(tmp_path / "exported", tmp_path / "out", run=False).checks


def test_a_session_refuses_caches_that_were_left_cut(file: Path, tmp_path: Path) -> None:
    opened = artifact.read(file)
    artifact.write(opened, tmp_path / "copy")
    with pytest.raises(InputError, match=r"cut to a window.*past_key_values\.0\.key.*graphopt export"):
        graphopt.load(tmp_path / "copy")


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": "b"}', "3"])
def test_metadata_that_says_something_else_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"graphopt\.windows"):
        stated_windows({WINDOWS: text})


def test_other_models_do_not_get_the_step() -> None:
    model = group_query_model(Layer(window=WINDOW))
    assert load_recipe("rotate").fitting(model.graph) == load_recipe("rotate").with_lower()
