from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from pydantic import ValidationError

from graphopt.analysis.structure.paged_caches import kv_nodes, layer_of, layers_of
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.generation import generate
from graphopt.inference.session import Session, load
from graphopt.passes.recipe import Recipe
from graphopt.quality.evaluation import evaluate
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.util.stdlib_text import held_out_text
from tests.graphs import canonical, run_pass

MakeArtifact = Callable[[str], Path]


def recipe(*steps: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "mine", "steps": [{"step": "canonicalize"}, *steps]})


@pytest.mark.parametrize(
    ("storage", "dtype", "width", "states"),
    [
        ("float16", ir.DataType.FLOAT16, 32 * 16, ["keys", "values"]),
        ("bfloat16", ir.DataType.BFLOAT16, 32 * 16, ["keys", "values"]),
        ("float8", ir.DataType.FLOAT8E4M3FN, 32 * 16, ["keys", "values"]),
        ("int8", ir.DataType.UINT8, 32 * 16, ["keys", "values", "scales", "recent"]),
        ("int4", ir.DataType.UINT8, 32 * 8, ["keys", "values", "scales", "recent"]),
        ("int6", ir.DataType.UINT8, 32 * 12, ["keys", "values", "scales", "recent"]),
        ("int2", ir.DataType.UINT8, 32 * 4, ["keys", "values", "scales", "recent"]),
    ],
)
def test_ports_follow_the_storage(
    storage: str, dtype: ir.DataType, width: int, states: list[str], llama: ir.Model
) -> None:
    report = run_pass(llama, "quantize_kv", storage=storage, page=32, sink_pages=2, recent_pages=3)
    assert not report.skips
    ports = {value.name: value for value in (*llama.graph.inputs, *llama.graph.outputs)}
    for side in ("past_key_values", "present"):
        assert [name for name in ports if str(name).startswith(f"{side}.1")] == [f"{side}.1.{name}" for name in states]
        for name in ("keys", "values"):
            value = ports[f"{side}.1.{name}"]
            assert value.dtype == dtype
            assert value.shape is not None
            assert [value.shape[1], value.shape[3]] == [2, width]
    if "recent" in states:
        shape = ports["past_key_values.0.recent"].shape
        assert shape is not None
        assert list(shape)[1:] == [2, 2 + 3 + 1, 2 * 32 * 16]


def test_the_model_that_was_copied_keeps_its_types(llama: ir.Model) -> None:
    """`verify` runs the recipe on a copy, then the model before: copies share what says the type of a value."""
    run_pass(llama, "page_kv")

    def types() -> list[ir.DataType | None]:
        return [value.dtype for value in (*llama.graph.inputs, *llama.graph.outputs)]

    before, copy = types(), llama.clone()
    run_pass(copy, "quantize_kv", storage="int4")
    assert types() == before
    assert [value.dtype for value in (*copy.graph.inputs, *copy.graph.outputs)] != before


def test_values_may_have_codes_of_their_own(llama: ir.Model) -> None:
    report = run_pass(llama, "quantize_kv", storage="int8", value_storage="int6", page=32)
    assert "its cache is stored as int8 keys and int6 values in pages of 32" in str(report.changes[-1].what)
    shapes = {value.name: value.shape for value in llama.graph.inputs}
    keys, values = (shapes[f"past_key_values.0.{part}"] for part in ("keys", "values"))
    assert keys is not None
    assert values is not None
    assert (keys[3], values[3]) == (32 * 16, 32 * 12)


def test_values_that_are_stored_as_keys_are_need_no_name(llama: ir.Model) -> None:
    run_pass(llama, "quantize_kv", storage="int4", value_storage="int4")
    assert {layer.attributes.value_storage for layer in layers_of(llama.graph)} == {""}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"storage": "float16", "value_storage": "int6"},
            "keys as float16 and values as int6: .* have one type",
        ),
        (
            {"storage": "int8", "value_storage": "int3", "page": 16},
            "int8 keys and int3 values packs 32 numbers",
        ),
    ],
)
def test_values_that_do_not_fit_keys_are_refused(options: dict[str, Any], message: str, llama: ir.Model) -> None:
    with pytest.raises(InputError, match=message):
        run_pass(llama, "quantize_kv", **options)


def test_layers_have_storages_of_their_own(llama: ir.Model) -> None:
    report = run_pass(llama, "quantize_kv", storage="int4", page=32, layers={0: ("int2", "int4"), 1: "float32"})
    first, second = layers_of(llama.graph)
    assert (first.attributes.storage, first.attributes.value_storage) == ("int2", "int4")
    assert (first.attributes.clip, first.attributes.token_factors) == (np.float32(0.9), 1)
    assert second.attributes.storage == "float32"
    assert [str(skip.reason) for skip in report.skips] == ["the recipe leaves its cache in floats"]


def test_a_layer_may_be_all_that_has_codes(llama: ir.Model) -> None:
    run_pass(llama, "quantize_kv", storage="float16", layers={1: "int2"}, clip=0.8)
    first, second = (layer.attributes for layer in layers_of(llama.graph))
    assert (first.storage, first.clip, first.token_factors, first.sink_pages) == ("float16", 1, 0, 0)
    assert (second.storage, second.clip, second.token_factors, second.sink_pages) == ("int2", np.float32(0.8), 1, 1)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({7: "int4"}, r"the step quantize_kv names layer 7, and the caches of the graph are \[0, 1\]"),
        ({0: "int5"}, "a cache is stored as float16, bfloat16"),
        ({0: ("int4", "float16")}, "values that are stored in another way than keys are int8"),
    ],
)
def test_layers_that_cannot_be_are_refused(layers: dict[int, Any], message: str, llama: ir.Model) -> None:
    with pytest.raises((InputError, ValidationError), match=message):
        run_pass(llama, "quantize_kv", layers=layers)


@pytest.mark.parametrize(
    ("options", "clip", "says"),
    [
        (
            {"storage": "int2"},
            0.9,
            "keys with a factor per token, codes span 90% of the numbers of a set of keys, 90% of one of values, 1",
        ),
        ({"storage": "int2", "clip": 1, "token_factors": False}, 1, "pages of 64, 1 first"),
        ({"storage": "int4"}, 1, "pages of 64, 1 first"),
        ({"storage": "int8", "clip": 0.5}, 0.5, "codes span 50% of the numbers of a set of keys, 50%"),
    ],
)
def test_codes_span_what_the_storage_or_the_recipe_asks_for(
    options: dict[str, Any], clip: float, says: str, llama: ir.Model
) -> None:
    report = run_pass(llama, "quantize_kv", **options)
    assert {layer.attributes.clip for layer in layers_of(llama.graph)} == {np.float32(clip)}
    assert says in str(report.changes[-1].what)


@pytest.mark.parametrize(
    ("options", "has_factors"),
    [({"storage": "int2"}, 1), ({"storage": "int4"}, 0), ({"storage": "int4", "token_factors": True}, 1)],
)
def test_keys_have_factors_where_they_pay_or_are_asked_for(
    options: dict[str, Any], has_factors: int, llama: ir.Model
) -> None:
    run_pass(llama, "quantize_kv", page=32, **options)
    assert {layer.attributes.token_factors for layer in layers_of(llama.graph)} == {has_factors}
    scales = next(value for value in llama.graph.inputs if value.name == "past_key_values.0.scales")
    assert scales.shape is not None
    assert scales.shape[3] == 2 * 16 + (2 + has_factors) * 32


def test_floats_and_gpus_have_no_factors(llama: ir.Model) -> None:
    with pytest.raises(InputError, match="token_factors belong to keys of integers, and float16 has no scales"):
        run_pass(llama, "quantize_kv", storage="float16", token_factors=True)


def test_floats_have_no_codes_to_clip(llama: ir.Model) -> None:
    with pytest.raises(InputError, match="clip is a share of what codes span, and float16 has no codes"):
        run_pass(llama, "quantize_kv", storage="float16", clip=0.9)


def test_it_comes_before_or_behind_sparse_kv(llama_artifact: Path) -> None:
    layers = []
    for order in (("quantize_kv", "sparse_kv"), ("sparse_kv", "quantize_kv")):
        model = canonical(llama_artifact)
        options: dict[str, dict[str, Any]] = {"quantize_kv": {"storage": "int4"}, "sparse_kv": {"budget": 3}}
        for name in order:
            run_pass(model, name, **options[name])
        layers.append(layers_of(model.graph))
        # no body is left of what was there on the way
        assert len([key for key in model.functions if key[1] == "KVAttention"]) == 1
    assert layers[0] == layers[1]


def test_codes_are_not_quantized_again(llama: ir.Model) -> None:
    run_pass(llama, "quantize_kv", storage="int8")
    report = run_pass(llama, "quantize_kv", storage="int4")
    assert [str(skip.reason) for skip in report.skips] == ["its cache is stored as int8 already"] * 2


def test_a_graph_that_cannot_be_paged_is_left_alone(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    plain = Recipe.model_validate({"name": "mine", "steps": [{"step": "quantize_kv"}]})
    made = optimize(make_artifact("gemma2"), plain, tmp_path / "out")
    report = next(report for report in made.manifest.passes if report.name == "quantize_kv")
    assert "no standard Attention" in str(report.skips[0].reason)
    assert made.manifest.checks[-1].figures["largest_change"] == 0.0


def test_the_loss_is_measured_behind_enough_context(llama_artifact: Path, tmp_path: Path) -> None:
    changes = {}
    for storage in ("float16", "bfloat16", "float8", "int8", "int6", "int4", "int2"):
        made = optimize(
            llama_artifact,
            recipe({"step": "quantize_kv", "storage": storage, "page": 16, "sink_pages": 0, "recent_pages": 0}),
            tmp_path / storage,
        )
        check = next(check for check in made.manifest.checks if check.after == "quantize_kv")
        assert "behind 32 of context" in str(check.reason)
        changes[storage] = check.figures["largest_change"]
    # half a step: 2^-11, 2^-8, 2^-4 of a number, 1/510 and 1/30 of a range, through two layers of a random model
    assert 0 < changes["float16"] < 2e-3
    assert changes["float16"] < changes["bfloat16"] < 2e-2
    assert changes["bfloat16"] < changes["float8"] < 0.3
    assert changes["float16"] < changes["int8"] < 2e-2
    assert changes["int8"] < changes["int6"] < changes["int4"] < 0.3
    # a sixth of a range, a few times
    assert changes["int4"] < changes["int2"] < 3
    checks = verify(llama_artifact, tmp_path / "int4").checks
    assert [check.status for check in checks] == ["proved", "measured"]


def test_codes_that_gpus_do_not_know_are_refused_for_them(llama_artifact: Path, tmp_path: Path) -> None:
    steps = recipe({"step": "quantize_kv", "storage": "int8", "value_storage": "int4"})
    with pytest.raises(InputError, match="kernels on GPUs store both alike.*leave value_storage"):
        optimize(llama_artifact, steps, tmp_path / "pairs", target="ort-cuda")
    steps = recipe({"step": "quantize_kv", "storage": "int3"})
    with pytest.raises(InputError, match="as int3, and kernels on GPUs know no such codes.*choose int8 or int4"):
        optimize(llama_artifact, steps, tmp_path / "int3", target="ort-cuda")
    assert not (tmp_path / "int3").exists()


FEEDBACK = {"step": "quantize_kv", "storage": "int2", "value_storage": "int8", "key_feedback": True}
FEEDBACK |= {"page": 32, "sink_pages": 0, "recent_pages": 0}


def divergence(before: Session, after: Session) -> float:
    """Return the mean KL of the next token in nats on held-out text."""
    ids = np.array([before.encode(held_out_text()[:3000])[:600]])
    logits = [session.logits(ids)[0].astype(np.float64) for session in (before, after)]
    logarithms = [x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in logits]
    return float((np.exp(logarithms[0]) * (logarithms[0] - logarithms[1])).sum(axis=-1).mean())


def test_keys_are_rounded_for_the_queries_of_the_calibration(shipped_artifact: Path, tmp_path: Path) -> None:
    errors, made = {}, {}
    options: dict[str, dict[str, bool]]
    options = {"alone": {"key_feedback": False}, "feedback": {}, "whitened": {"key_whitening": True}}
    for name, option in options.items():
        rotation = {"step": "rotate", "query_key": "hadamard"}
        steps = recipe({"step": "fold_norms"}, rotation, {**FEEDBACK, **option})
        steps = steps.model_copy(update={"calibration": CalibrationOptions(windows=4)})
        made[name] = optimize(shipped_artifact, steps, tmp_path / name)
        errors[name] = divergence(load(shipped_artifact), load(tmp_path / name))
    report = next(report for report in made["whitened"].manifest.passes if report.name == "quantize_kv")
    said = [str(change.what) for change in report.changes]
    assert "with a factor per token, keys rounded for the queries of the calibration, keys of the" in said[-1]
    assert any("the queries and keys of 6 layers were collected on 1024 tokens" in each for each in said)
    # measured on AVX2 as 0.031, 0.034 and 0.038; over six pieces of 600 tokens of this model whitening changes
    # nothing on average, and tests/quantization/rounding/test_ldl.py shows it where keys vary in one direction
    assert errors["whitened"] < 0.9 * errors["alone"]
    assert errors["feedback"] < 0.95 * errors["alone"]
    statuses = [check.status for check in verify(shipped_artifact, tmp_path / "whitened").checks]
    assert statuses == ["proved", "proved", "measured"]


def test_whitened_keys_and_queries_have_the_products_that_they_had(llama_artifact: Path, tmp_path: Path) -> None:
    # all tokens are in pages of floats, so that nothing is rounded
    step = {"step": "quantize_kv", "storage": "int4", "page": 32, "sink_pages": 8, "key_feedback": True}
    streaming = {"step": "sparse_kv", "policy": "streaming", "sinks": 8, "recent": 32}
    ids, logits, made = np.array([np.arange(100) % 90 + 3]), {}, {}
    for name, whitens in (("plain", False), ("whitened", True)):
        steps = [{**step, "key_whitening": whitens}, streaming]
        made[name] = optimize(llama_artifact, recipe(*steps), tmp_path / name, run="parts").model
        logits[name] = load(tmp_path / name).logits(ids)[0]
        # queries of the first tokens are turned once more, and multiplied as well
        assert {layer.has_unbounded_positions for layer in layers_of(made[name].graph)} == {True}
    graph = made["whitened"].graph
    products = [node for node in graph if "whitening.product" in (node.name or "")]
    assert len(products) == 3 * len(layers_of(graph))
    # matrices have a condition of up to 10, and numbers 24 bits
    np.testing.assert_allclose(logits["whitened"], logits["plain"], rtol=0, atol=1e-5 * np.abs(logits["plain"]).max())
    with pytest.raises(InputError, match="key_whitening is for keys that key_feedback rounds.*set key_feedback"):
        optimize(llama_artifact, recipe({**step, "key_feedback": False, "key_whitening": True}), tmp_path / "alone")


def test_feedback_is_for_codes_of_keys_on_cpus(llama: ir.Model, llama_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="key_feedback is for keys of integers, and float16 has no codes"):
        run_pass(llama, "quantize_kv", storage="float16", key_feedback=True)
    with pytest.raises(InputError, match="a step needs statistics of the model"):
        run_pass(llama, "quantize_kv", storage="int4", key_feedback=True)
    steps = recipe({**FEEDBACK, "storage": "int4", "value_storage": "int4"})
    with pytest.raises(InputError, match="statistics of the model as it is at this step.*let the model run"):
        optimize(llama_artifact, steps, tmp_path / "unread", run=False)
    made = optimize(llama_artifact, steps, tmp_path / "gpu", target="ort-cuda", run=False)
    report = next(report for report in made.manifest.passes if report.name == "quantize_kv")
    assert {str(skip.reason) for skip in report.skips} == {
        "kernels on GPUs round each channel of keys by itself: key_feedback has no effect"
    }
    assert {layer.attributes.key_feedback for layer in layers_of(made.model.graph)} == {0}


def test_a_model_without_a_tokenizer_has_no_queries_to_learn_from(llama_artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_artifact, tmp_path / "silent", ignore=shutil.ignore_patterns("tokenizer*"))
    manifest = json.loads((tmp_path / "silent" / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {name: record for name, record in manifest["files"].items() if "tokenizer" not in name}
    (tmp_path / "silent" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    made = optimize(tmp_path / "silent", recipe({**FEEDBACK, "storage": "int4"}), tmp_path / "rounded")
    report = next(report for report in made.manifest.passes if report.name == "quantize_kv")
    assert {skip.reason.code for skip in report.skips} == {"quantize_kv.no-text"}
    (node, *_) = kv_nodes(made.model.graph)
    assert (layer_of(node).attributes.key_feedback, len(node.inputs)) == (0, 12)
    checks = verify(tmp_path / "silent", tmp_path / "rounded").checks
    assert [check.status for check in checks] == ["proved", "measured"]


def test_codes_that_do_not_fit_pages_are_refused(llama_artifact: Path, tmp_path: Path) -> None:
    steps = recipe({"step": "quantize_kv", "storage": "int3", "page": 16})
    with pytest.raises(InputError, match=r"int3 packs 32 numbers at a time, and pages of 16 .*node=.*multiple of 32"):
        optimize(llama_artifact, steps, tmp_path / "int3")
    assert not (tmp_path / "int3").exists()


def test_heads_that_codes_do_not_fit_stay_floats(llama_artifact: Path, tmp_path: Path) -> None:
    steps = recipe({"step": "quantize_kv", "storage": "int3", "page": 32})
    result = optimize(llama_artifact, steps, tmp_path / "int3")
    report = next(report for report in result.manifest.passes if report.name == "quantize_kv")
    reasons = {str(skip.reason) for skip in report.skips}
    assert reasons == {"int3 packs 32 numbers at a time, and its heads have 16"}


TEXT = held_out_text()[:3000]


def bits_and_text(session: Session) -> tuple[float, object]:
    return evaluate(session, TEXT).bits_per_byte, generate(session, "class Stack:", max_new_tokens=8)


@pytest.fixture(scope="module")
def floats(shipped_artifact: Path) -> tuple[float, object]:
    """What the shipped model knows and says with caches of float32."""
    return bits_and_text(load(shipped_artifact))


# Seen: 0.0001 for int8, 0.00002 for bfloat16, 0.002 for float8; int4 costs 0.003.
@pytest.mark.parametrize(("storage", "cost"), [("int8", 0.001), ("bfloat16", 0.0005), ("float8", 0.005)])
def test_caches_keep_what_the_shipped_model_knows(
    storage: str, cost: float, floats: tuple[float, object], shipped_artifact: Path, tmp_path: Path
) -> None:
    optimize(shipped_artifact, recipe({"step": "quantize_kv", "storage": storage}), tmp_path / storage, run=False)
    bits, text = bits_and_text(load(tmp_path / storage))
    assert np.isfinite(bits)
    assert abs(bits - floats[0]) < cost
    # 3 bits of fraction may decide between two tokens that are nearly equally likely
    assert text == floats[1] or storage == "float8"
