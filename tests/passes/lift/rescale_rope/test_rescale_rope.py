"""Longer contexts by other rotary frequencies: what transformers computes, on a Llama that was exported plain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.ports import MAX_POSITIONS
from graphopt.artifact import artifact
from graphopt.artifact.manifest import read_manifest
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.session import load
from graphopt.passes.lift.rescale_rope.methods import METHODS
from graphopt.passes.recipe import Recipe, load_recipe
from tests import decoders
from tests.families import POSITIONS, VOCABULARY
from tests.graphs import logits_of, relative, run_pass

LENGTH, PAIRS = 2 * POSITIONS, 8
FACTORS = [1.0, 1.1, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
# The bound, relative to the largest logit. Seen: 1e-6, the float32 angles of 256 positions.
TOLERANCE = 1e-5

METHODS_OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"method": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}),
    # By n tokens its base has grown by n / L, where its own factor is 1.
    "ntk": ({"method": "ntk", "factor": LENGTH / POSITIONS}, {"rope_type": "dynamic", "factor": 1.0}),
    "yarn": (
        {"method": "yarn", "factor": 4},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS},
    ),
    "yarn, other ramp and temperature": (
        {"method": "yarn", "factor": 4, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.3},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
            "original_max_position_embeddings": POSITIONS,
        },
    ),
    "llama3": (
        {"method": "llama3", "factor": 8},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": POSITIONS,
        },
    ),
    "longrope": (
        {"method": "longrope", "factor": 4, "factors": FACTORS},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "long_factor": FACTORS,
            "short_factor": [1.0] * PAIRS,
            "original_max_position_embeddings": POSITIONS,
        },
    ),
}


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCABULARY, (1, LENGTH))


@pytest.fixture(scope="module")
def torch_model(llama_folder: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that gives the Llama with other ``rope_parameters``, and other positions in its config."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    plain = model.model.rotary_emb

    def turned(**parameters: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(llama_folder)
        factor = 1 if parameters["rope_type"] == "dynamic" else parameters.get("factor", 1)
        config.max_position_embeddings = int(POSITIONS * factor)
        config.rope_parameters = {"rope_theta": 10_000.0, **parameters}
        model.model.rotary_emb = type(plain)(config)
        return model

    yield turned
    model.model.rotary_emb = plain


def torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor(ids)).logits.numpy())


@pytest.mark.parametrize("case", METHODS_OF_TRANSFORMERS)
def test_the_logits_are_those_of_transformers_with_that_type(
    case: str, llama: ir.Model, torch_model: Callable[..., Any], ids: np.ndarray, tmp_path: Path
) -> None:
    options, parameters = METHODS_OF_TRANSFORMERS[case]
    expected = torch_logits(torch_model(**parameters), ids)
    plain = torch_logits(torch_model(rope_type="default"), ids)
    assert relative(expected, plain) > 100 * TOLERANCE  # or nothing would be shown
    report = run_pass(llama, "rescale_rope", trained=POSITIONS, **options)
    assert report.effect == "lossy"
    assert relative(expected, logits_of(llama, ids, tmp_path)) < TOLERANCE
    assert llama.metadata_props[MAX_POSITIONS] == str(int(POSITIONS * options["factor"]))


@pytest.mark.parametrize("case", ["truncated", "first tokens left alone"])
def test_what_transformers_lacks_is_what_its_model_computes_with_these_angles(
    case: str, llama: ir.Model, torch_model: Callable[..., Any], ids: np.ndarray, tmp_path: Path
) -> None:
    import torch

    model, positions = torch_model(rope_type="default"), np.arange(LENGTH)[:, None]
    w = model.model.rotary_emb.inv_freq.numpy()
    if case == "truncated":
        options: dict[str, Any] = {"method": "truncated", "factor": 2}
        rounds = POSITIONS * w / (2 * np.pi)
        constant = 2 * np.pi / (16 * POSITIONS)
        angles = positions * np.where(rounds >= 1, w, np.where(rounds <= 1 / 8, 0, constant))
    else:
        options = {"method": "longrope", "factor": 2, "factors": FACTORS, "first": 10, "attention_factor": 1}
        angles = np.where(positions < 10, positions * w, positions * w / np.array(FACTORS))
    doubled = torch.tensor(np.concatenate((angles, angles), -1)[None], dtype=torch.float32)
    model.model.rotary_emb.forward = lambda *_, **__: (doubled.cos(), doubled.sin())
    run_pass(llama, "rescale_rope", trained=POSITIONS, **options)
    assert relative(torch_logits(model, ids), logits_of(llama, ids, tmp_path)) < TOLERANCE


@pytest.mark.parametrize("family", ["gpt_neox", "cohere"])
def test_parts_of_heads_and_neighbours_are_rescaled_too(
    family: str, make_artifact: Callable[[str], Path], make_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    import torch
    import transformers

    folder = make_folder(family)
    config = transformers.AutoConfig.from_pretrained(folder)
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}
    config.rope_parameters = {**config.rope_parameters, **parameters}
    config.max_position_embeddings = 4 * POSITIONS
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    ids = np.random.default_rng(4).integers(1, VOCABULARY, (2, LENGTH))
    graph = artifact.read(make_artifact(family)).model
    run_pass(graph, "canonicalize")
    run_pass(graph, "rescale_rope", trained=POSITIONS, factor=4)
    assert relative(torch_logits(model, ids), logits_of(graph, ids, tmp_path)) < TOLERANCE


def test_tables_of_another_exporter_are_rescaled_once_they_are_frequencies(
    make_genai: Callable[..., Path], torch_model: Callable[..., Any], ids: np.ndarray, tmp_path: Path
) -> None:
    """onnxruntime-genai's builder stores cosines and sines of each position; canonicalize finds the frequencies."""
    graph = artifact.read(make_genai("llama")).model
    run_pass(graph, "canonicalize")
    run_pass(graph, "rescale_rope", trained=POSITIONS, factor=4)
    options, parameters = METHODS_OF_TRANSFORMERS["yarn"]
    assert options == {"method": "yarn", "factor": 4}
    expected = torch_logits(torch_model(**parameters), ids)
    assert relative(expected, logits_of(graph, ids, tmp_path)) < TOLERANCE


@pytest.mark.parametrize("first", [0, 3])
def test_angles_by_a_product_of_matrices_are_rescaled_alike(first: int, tmp_path: Path) -> None:
    ids = np.random.default_rng(6).integers(0, decoders.VOCABULARY, (2, 40))
    options = {"method": "longrope", "factor": 2, "factors": [1, 2, 3, 4], "first": first, "attention_factor": 1.2}
    made = []
    for name in ("product", "matrices", "plain"):
        model = decoders.decoder(1)
        if name == "matrices":
            decoders.matrix_product(model.graph)
        if name != "plain":
            run_pass(model, "rescale_rope", trained=20, **options)
        made.append(logits_of(model, ids, tmp_path / name))
    assert relative(made[0], made[1]) < TOLERANCE
    assert relative(made[0], made[2]) > 100 * TOLERANCE


@pytest.mark.parametrize("method", METHODS)
def test_a_factor_of_one_leaves_every_bit(method: str, llama: ir.Model) -> None:
    before = ir.to_proto(llama).SerializeToString(deterministic=True)
    factors = {"factors": [1.0] * PAIRS} if method == "longrope" else {}
    report = run_pass(llama, "rescale_rope", method=method, factor=1, **factors)
    assert (report.effect, report.changes) == ("exact", [])
    assert [skip.reason.figures["factor"] for skip in report.skips] == [1]
    assert ir.to_proto(llama).SerializeToString(deterministic=True) == before


def test_a_factor_of_one_is_proved(llama_artifact: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"name": "mine", "steps": [{"step": "rescale_rope", "factor": 1}]})
    optimize(llama_artifact, recipe, tmp_path / "made")
    manifest = read_manifest(tmp_path / "made")
    assert [(c.after, c.status) for c in manifest.checks if c.name == "certificate"] == [("rescale_rope", "proved")]
    assert manifest.check("logits", after="rescale_rope").figures["largest_change"] == 0
    assert manifest.model.max_positions == POSITIONS


def test_an_artifact_says_how_long_its_sequences_may_be_and_can_be_rescaled_again(
    llama_artifact: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(
        "int4-rtn", ["page_kv", "rescale_rope"], ["rescale_rope.method=ntk", "rescale_rope.factor=2.5"]
    )
    optimize(llama_artifact, recipe, tmp_path / "once", target="ort-cpu:avx512", run=False)
    made = load(tmp_path / "once")
    assert made.max_positions == 320
    assert np.isfinite(made.logits(np.zeros((1, 320), np.int64))).all()
    with pytest.raises(InputError, match="321 tokens is longer than the model's 320 positions"):
        made.logits(np.zeros((1, 321), np.int64))
    proof = verify(llama_artifact, tmp_path / "once", run=False)
    assert [check.status for check in proof.checks if check.name == "replay"] == ["proved"]

    again = Recipe.model_validate({"name": "again", "steps": [{"step": "rescale_rope", "method": "linear"}]})
    optimize(tmp_path / "once", again, tmp_path / "twice", run=False)
    assert load(tmp_path / "twice").max_positions == 640
    weights = [artifact.read(tmp_path / name).model.graph.initializers for name in ("once", "twice")]
    stored = [{name: value.const_value.tobytes() for name, value in each.items()} for each in weights]
    different = {name for name in stored[0].keys() | stored[1].keys() if stored[0].get(name) != stored[1].get(name)}
    assert different == {"model.rotary_emb.inv_freq.rescaled", "model.rotary_emb.inv_freq.rescaled.1"}


def test_onnxruntime_genai_learns_of_it(llama_artifact: Path, tmp_path: Path) -> None:
    recipe = {"name": "mine", "steps": [{"step": "canonicalize"}, {"step": "rescale_rope", "factor": 4}]}
    optimize(llama_artifact, Recipe.model_validate(recipe), tmp_path / "made", run=False, quality_tokens=0)
    config = json.loads((tmp_path / "made" / "genai_config.json").read_text())
    assert config["model"]["context_length"] == config["search"]["max_length"] == 4 * POSITIONS
    # what a session is told where the manifest is gone
    for name in ("manifest.json", "genai_config.json"):
        (tmp_path / "made" / name).unlink()
    assert load(tmp_path / "made").max_positions == 4 * POSITIONS


@pytest.mark.parametrize(
    "options",
    [
        {"method": "yarn", "factor": 4},
        {"method": "longrope", "factor": 2, "factors": FACTORS, "first": 5},
    ],
)
def test_a_model_that_streams_already_is_rescaled_as_the_plain_one_is(
    options: dict[str, Any], llama: ir.Model, tmp_path: Path
) -> None:
    """Its queries have a second form for the first tokens, with angles of their own, in float64."""
    ids = np.random.default_rng(5).integers(0, VOCABULARY, (1, POSITIONS))
    streaming = {"policy": "streaming", "sinks": 8, "recent": 40, "page": 16}
    other = llama.clone()
    run_pass(llama, "sparse_kv", **streaming)
    run_pass(llama, "rescale_rope", trained=POSITIONS, **options)
    run_pass(other, "rescale_rope", trained=POSITIONS, **options)
    report = run_pass(other, "sparse_kv", **streaming)
    assert any(change.what.code == "positions.capped" for change in report.changes) == ("first" not in options)
    if "first" in options:
        # Behind `rescale_rope` the first tokens have angles of their own, and positions stay within the trained ones.
        assert any(skip.reason.code == "positions.bound" for skip in report.skips)
        return
    made = [logits_of(each, ids, tmp_path / name) for each, name in ((llama, "streaming first"), (other, "last"))]
    assert relative(*made) < TOLERANCE
