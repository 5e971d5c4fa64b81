from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from pydantic import ValidationError

from graphopt.analysis.structure.paged_caches import layers_of
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import load
from graphopt.passes.recipe import Recipe
from graphopt.verification.notes import notes_of
from tests.graphs import canonical, relative, run_pass

MakeArtifact = Callable[[str], Path]

# As in tests/passes/cache/test_page_kv.py.
FLOAT32 = 1e-5


def recipe(**options: Any) -> Recipe:
    steps = [{"step": "canonicalize"}, {"step": "sparse_kv", "page": 16, **options}]
    return Recipe.model_validate({"name": "mine", "steps": steps})


def test_policies_by_layer_and_head(llama: ir.Model) -> None:
    report = run_pass(llama, "sparse_kv", layers={0: "dense", 1: ["streaming", "retrieval"]}, budget=5, summary="mean")
    dense, mixed = layers_of(llama.graph)
    assert dense.attributes.policies == (0,)
    assert mixed.attributes.policies == (1, 2)
    assert (mixed.attributes.budget, mixed.attributes.summary, mixed.attributes.sinks) == (5, "mean", 64)
    assert [str(skip.reason) for skip in report.skips] == ["the recipe leaves it dense"]
    names = [value.name for value in llama.graph.inputs]
    assert "past_key_values.1.summaries" in names
    assert "past_key_values.0.summaries" not in names


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({7: "dense"}, "names layer 7, and the caches of the graph are"),
        ({0: ["dense"] * 3}, "3 policies, and it has 2"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: dict[int, Any], message: str, llama: ir.Model) -> None:
    with pytest.raises(InputError, match=message):
        run_pass(llama, "sparse_kv", layers=layers)


def test_a_second_time_and_windows_are_left_alone(llama: ir.Model, make_artifact: MakeArtifact) -> None:
    run_pass(llama, "sparse_kv")
    assert {str(skip.reason) for skip in run_pass(llama, "sparse_kv").skips} == {"its heads have policies already"}
    model = canonical(make_artifact("gemma3"))
    report = run_pass(model, "sparse_kv")
    assert [str(skip.reason) for skip in report.skips] == ["the model's own window of 6 tokens is all that it reads"]
    assert [layer.attributes.policies for layer in layers_of(model.graph)] == [(1,), (2,)]


@pytest.mark.parametrize(
    ("layers", "note"), [({}, "any onnxruntime runs the bodies"), ({0: "dense"}, "1.31 does, 1.24 does not")]
)
def test_it_is_said_where_bodies_do_not_run(layers: dict[int, Any], note: str, llama: ir.Model) -> None:
    run_pass(llama, "sparse_kv", layers=layers)
    assert note in " ".join(map(str, notes_of(llama)))


def test_with_all_pages_retrieval_is_dense(llama_artifact: Path, tmp_path: Path) -> None:
    made = optimize(llama_artifact, recipe(sinks=0, recent=1, budget=8), tmp_path / "out")
    check = next(check for check in made.manifest.checks if check.after == "sparse_kv")
    assert check.figures["largest_change"] < FLOAT32
    ids = np.random.default_rng(0).integers(0, 300, (1, 120))
    expected, found = (load(path).logits(ids) for path in (llama_artifact, tmp_path / "out"))
    assert relative(expected, found) < FLOAT32


def test_sparse_prefill_reads_a_prompt_in_part_and_decodes_densely(llama_artifact: Path, tmp_path: Path) -> None:
    options = {"policy": "sparse_prefill", "query_block": 16, "query_stride": 4, "sinks": 2, "recent": 8}
    report = run_pass(canonical(llama_artifact), "sparse_kv", **options, prefill_mass=0.7)
    changes = " ".join(str(change.what) for change in report.changes)
    assert "besides pages with 0.7 of the attention of a prompt's blocks of 16 tokens, by each 4th" in changes
    optimize(llama_artifact, recipe(**options, prefill_mass=0.7), tmp_path / "out")
    ids = np.random.default_rng(0).integers(0, 300, (1, 120))
    sparse, dense = load(tmp_path / "out"), load(llama_artifact)
    expected = dense.logits(ids)
    assert relative(expected, sparse.logits(ids)) > 1e-3
    steps = Decoder(sparse, 1)
    pieces = [steps.step(ids[:, at : at + 15]) for at in range(0, 120, 15)]
    assert relative(expected, np.concatenate(pieces, axis=1)) < FLOAT32
    optimize(llama_artifact, recipe(**options, prefill_mass=1.0), tmp_path / "all")
    assert relative(expected, load(tmp_path / "all").logits(ids)) < FLOAT32


def test_streaming_is_measured_and_its_cache_stops_growing(llama_artifact: Path, tmp_path: Path) -> None:
    made = optimize(llama_artifact, recipe(policy="streaming", sinks=4, recent=8), tmp_path / "out")
    check = next(check for check in made.manifest.checks if check.after == "sparse_kv")
    assert "behind 44 of context" in str(check.reason)
    assert check.figures["largest_change"] > 1e-3
    session = load(tmp_path / "out")
    decoder, ids = Decoder(session, 1), np.random.default_rng(0).integers(0, 300, (1, 120))
    steps = [decoder.step(ids[:, [column]])[:, -1] for column in range(120)]
    # a page of sinks, and the 8 newest, one new token and a page: 25 tokens in pages of 16
    assert decoder.states.pages == (3, 3)
    # in one call nothing goes round, and every query reads the same: float32 rounding, as of page_kv
    assert relative(session.logits(ids), np.stack(steps, axis=1)) < FLOAT32


def test_options_go_to_the_heads_that_they_are_for(llama: ir.Model) -> None:
    options = {"mass": 0.9, "channels": 8, "compensate": True, "sinks": 4, "recent": 8}
    report = run_pass(llama, "sparse_kv", layers={0: "streaming", 1: ["streaming", "retrieval"]}, budget=0, **options)
    streaming, mixed = (layer.attributes for layer in layers_of(llama.graph))
    assert (streaming.mass, streaming.channels, streaming.compensate, streaming.budget) == (0.0, 0, 1, 0)
    assert (mixed.mass, mixed.channels, mixed.compensate, mixed.budget) == (pytest.approx(0.9), 8, 1, 0)
    size = layers_of(llama.graph)[0].head_size
    widths = [value.shape[3] for value in llama.graph.inputs if value.name.endswith(".summaries") and value.shape]
    assert widths == [2 * size, 4 * size]
    what = [str(change.what) for change in report.changes if "first and" in str(change.what)]
    assert "besides pages with 0.9 of the mass by bounds in the largest 8 channels, and the mean of what" in what[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mass": 0.5, "policy": "streaming"}, "says mass, which is for heads of the policy retrieval, and gives none"),
        ({"channels": 8, "policy": "dense"}, "says channels, which is for heads of the policy retrieval"),
        ({"compensate": True}, "says compensate, which is for heads of the policy streaming"),
        ({"prefill_mass": 0.5, "policy": "sparse_prefill", "query_stride": 7}, "query_block is a multiple of query_st"),
        ({"channels": 17}, "judges pages by 17 channels, and a head has 16"),
    ],
)
def test_options_that_no_head_follows_are_refused(options: dict[str, Any], message: str, llama: ir.Model) -> None:
    with pytest.raises(InputError, match=message):
        run_pass(llama, "sparse_kv", **options)


@pytest.mark.parametrize("options", [{"mass": 0.0}, {"mass": 1.1}, {"channels": 0}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        recipe(**options)


def test_all_the_mass_is_dense(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, recipe(sinks=0, recent=1, budget=0, mass=1.0), tmp_path / "out")
    ids = np.random.default_rng(0).integers(0, 300, (1, 120))
    expected, found = (load(path).logits(ids) for path in (llama_artifact, tmp_path / "out"))
    assert relative(expected, found) < FLOAT32


def test_compensated_streaming_in_any_calls(llama_artifact: Path, tmp_path: Path) -> None:
    options = {"policy": "streaming", "sinks": 4, "recent": 8, "compensate": True}
    made = optimize(llama_artifact, recipe(**options), tmp_path / "out")
    reasons = [str(skip.reason) for step in made.manifest.passes for skip in step.skips]
    assert any("reads a mean of keys at any distance" in reason for reason in reasons)
    session = load(tmp_path / "out")
    assert not any(layer.has_unbounded_positions for layer in session.interface.layers)
    decoder, ids = Decoder(session, 1), np.random.default_rng(0).integers(0, 300, (1, 120))
    steps = [decoder.step(ids[:, [column]])[:, -1] for column in range(120)]
    # a page of sinks, and the 8 newest, one new token, a page and another one, whose summary is the mean
    assert decoder.states.pages == (4, 4)
    in_one = session.logits(ids)
    assert relative(in_one, np.stack(steps, axis=1)) < FLOAT32
    # back to the first length whose pages are all there, and on again
    decoder.rewind(105)
    again = [decoder.step(ids[:, [column]])[:, -1] for column in range(105, 120)]
    # seen 2e-6 of logits of up to 4
    assert relative(in_one, np.concatenate((in_one[:, :105], np.stack(again, axis=1)), axis=1)) < FLOAT32
    with pytest.raises(InputError, match="cannot be rewound"):
        decoder.rewind(102)


def test_pages_of_codes_keep_their_size(llama: ir.Model) -> None:
    run_pass(llama, "quantize_kv", storage="int8", page=32)
    report = run_pass(llama, "sparse_kv", page=16)
    assert {layer.attributes.page for layer in layers_of(llama.graph)} == {32}
    assert "page stays as it is" in str(report.skips[0].reason)
