"""Calibration of heads: against transformers' own attention, against the definitions, and on to a recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.analysis.structure.heads import ORIGIN, Calibration
from graphopt.analysis.structure.paged_caches import PagedLayer, kv_nodes, layer_of, layers_of
from graphopt.artifact import artifact
from graphopt.artifact.artifact import Artifact, origin_of
from graphopt.compile.calibration.heads import calibrate
from graphopt.compile.calibration.mass import attention, policy_shares
from graphopt.compile.calibration.razor import REPEATS, Repetition, echo_and_induction
from graphopt.compile.calibration.tap import Heads, TappedLayer, tap
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.passes.cache.sparse_kv import SparseKV
from graphopt.passes.common.paging.states import change
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, RETRIEVAL, STREAMING, KVAttributes
from graphopt.util.stdlib_text import held_out_text
from tests.graphs import residual_model, run_pass

TEXT = held_out_text()[:3000]
READ_OPTIONS: dict[str, Any] = {"sinks": 4, "recent": 20, "budget": 1, "page": 16}
STREAMS = SparseKV(policy="streaming", **READ_OPTIONS)
RETRIEVES = SparseKV(policy="retrieval", **READ_OPTIONS)


def recipe(*steps: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "mine", "steps": [{"step": "canonicalize"}, *steps]})


@pytest.fixture(scope="module")
def calibration(llama_artifact: Path) -> Calibration:
    return calibrate(llama_artifact, TEXT, streaming=STREAMS, retrieval=RETRIEVES, windows=2, queries=16)


def heads_of(queries: np.ndarray, keys: np.ndarray, **attributes: Any) -> Heads:
    """Queries [Hk, n, G, D] and keys [Hk, n, D] as a model would have given them."""
    layer = PagedLayer(0, keys.shape[-1], KVAttributes(kv_heads=len(keys), **{"scale": 1.0, **attributes}))
    return Heads(TappedLayer(layer, "query", "key", None), queries.astype(np.float32), keys.astype(np.float32))


# Queries and keys


def test_queries_and_keys_give_the_attention_that_transformers_computes(
    llama_artifact: Path, llama_folder: Path
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = np.random.default_rng(0).integers(0, 300, 40)
    with torch.no_grad():
        expected = model(torch.tensor(ids[None]), output_attentions=True).attentions
    with tap(artifact.read(llama_artifact)) as tapped_model:
        layers = list(tapped_model.run(ids))
    assert [heads.tapped_layer.layer.number for heads in layers] == [0, 1]
    for heads, weights in zip(layers, expected, strict=True):
        shares = np.concatenate([attention(heads, head, np.arange(40))[0].swapaxes(0, 1) for head in range(2)])
        # both multiply 64 and 16 float32 numbers a few layers deep
        np.testing.assert_allclose(shares, weights[0].numpy(), rtol=0, atol=1e-5)


def with_windows(llama_artifact: Path, *numbers: int) -> Artifact:
    """The model in pages, some of its layers with a window of their own."""
    model_artifact = artifact.read(llama_artifact)
    for name in ("canonicalize", "page_kv"):
        run_pass(model_artifact.model, name)
    for node in kv_nodes(model_artifact.model.graph):
        if layer_of(node).number in numbers:
            change(model_artifact.model.graph, node, {"window": 6, "policies": (STREAMING,), "recent": 6})
    return model_artifact


def test_layers_with_a_window_of_their_own_are_left_out_and_named(llama_artifact: Path) -> None:
    options = {"streaming": STREAMS, "retrieval": RETRIEVES, "windows": 1, "queries": 4}
    result = calibrate(with_windows(llama_artifact, 0), TEXT, **options)  # type: ignore[arg-type]
    assert ([layer.number for layer in result.layers], result.windowed) == ([1], (0,))
    with pytest.raises(InputError, match="every layer of this model has a window of its own"):
        calibrate(with_windows(llama_artifact, 0, 1), TEXT)


def test_a_model_without_attention_over_a_cache_is_refused_with_the_reason(llama_artifact: Path) -> None:
    without = replace(artifact.read(llama_artifact), model=residual_model())
    with pytest.raises(InputError, match="cannot be measured: it has no standard Attention"):
        calibrate(without, TEXT)


def test_a_sparse_model_is_refused(llama_artifact: Path) -> None:
    sparse = artifact.read(llama_artifact)
    for name, options in (("canonicalize", {}), ("sparse_kv", {"policy": "streaming"})):
        run_pass(sparse.model, name, **options)
    with pytest.raises(InputError, match=r"have policies already.*before the step sparse_kv"):
        calibrate(sparse, TEXT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 129}, "a window of 129 tokens is none of 64 to 128"),
        ({"window": 10}, "a window of 10 tokens is none of"),
    ],
)
def test_windows_that_do_not_fit_are_refused(options: dict[str, Any], message: str, llama_artifact: Path) -> None:
    with pytest.raises(InputError, match=message):
        calibrate(llama_artifact, TEXT, **options)


def test_a_short_text_and_a_model_without_tokenizer_are_refused(llama_artifact: Path) -> None:
    with pytest.raises(InputError, match="give a longer text"):
        calibrate(llama_artifact, "import this")
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        calibrate(replace(artifact.read(llama_artifact), companions={}), TEXT)


# What policies keep


@settings(max_examples=30)
@given(st.integers(0, 3), st.integers(1, 20), st.integers(0, 4), st.floats(0, 4, width=32), st.integers(0, 9))
def test_streaming_keeps_the_mass_of_what_it_reads(
    sinks: int, recent: int, window: int, softcap: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    heads = heads_of(
        random.standard_normal((2, 24, 3, 16)), random.standard_normal((2, 24, 16)), window=5 * window, softcap=softcap
    )
    attrs = replace(heads.tapped_layer.layer.attributes, policies=(STREAMING,), sinks=sinks, recent=recent)
    positions = np.array([0, 7, 23])
    shares = policy_shares(heads, positions, {"streaming": attrs})
    for head in range(2):
        for row, p in enumerate(positions):
            visible = [j for j in range(p + 1) if not window or j > p - 5 * window]
            read_tokens = [j for j in visible if j < sinks or j > p - recent]
            scores = heads.queries[head, p].astype(np.float64) @ heads.keys[head].astype(np.float64).T
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            mass = np.exp(scores)
            share = mass[:, read_tokens].sum(axis=1) / mass[:, visible].sum(axis=1)
            # both are float64
            np.testing.assert_allclose(shares[head]["streaming"].mass[row], share, rtol=1e-9)
            assert shares[head]["streaming"].read_share[row] == pytest.approx(len(read_tokens) / len(visible))


@pytest.mark.parametrize("summary", ["bounds", "mean"])
def test_retrieval_finds_a_page_that_has_all_the_mass(summary: str) -> None:
    random = np.random.default_rng(0)
    keys = 0.1 * random.standard_normal((1, 96, 16))
    keys[0, 37] += 2
    heads = heads_of(np.full((1, 96, 2, 16), 2.0), keys)
    attrs = replace(
        heads.tapped_layer.layer.attributes, policies=(RETRIEVAL,), page=16, sinks=1, recent=4, summary=summary
    )
    positions = np.array([90, 95])
    policies = {f"{budget}": replace(attrs, budget=budget) for budget in (0, 1, 6)}
    policies["dense"] = replace(attrs, policies=(DENSE,))
    (shares,) = policy_shares(heads, positions, policies)
    # the score of key 37 is 64, of others about 0, and e^-64 of 96 is 6e-27
    assert (shares["0"].mass < 1e-20).all()
    assert (shares["1"].mass > 1 - 1e-12).all()
    for name in ("6", "dense"):
        np.testing.assert_allclose(shares[name].mass, 1, rtol=1e-12)
        np.testing.assert_array_equal(shares[name].read_share, 1)


def test_a_sink_logit_takes_attention_and_keeps_its_share_out_of_the_mass() -> None:
    random = np.random.default_rng(0)
    heads = heads_of(random.standard_normal((2, 20, 2, 16)), random.standard_normal((2, 20, 16)))
    logits = np.array([0.0, 1.0, 2.0, 30.0], np.float32)
    with_sinks = replace(heads, tapped_layer=replace(heads.tapped_layer, sink_logits=logits))
    positions = np.array([19])
    for head in range(2):
        without, _ = attention(heads, head, positions)
        having, _ = attention(with_sinks, head, positions)
        scores = heads.queries[head, 19].astype(np.float64) @ heads.keys[head].astype(np.float64).T
        total = np.exp(scores).sum(axis=1)
        share = total / (total + np.exp(logits[2 * head : 2 * head + 2].astype(np.float64)))
        np.testing.assert_allclose(having[0].sum(axis=1), share, rtol=1e-9)
        np.testing.assert_allclose(having[0] / share[:, None], without[0], rtol=1e-9)


# Echo and induction


@pytest.mark.parametrize(("offset", "expected"), [(0, (0.75, 0.0)), (1, (0.0, 1.0))])
def test_heads_that_look_for_their_token_or_for_what_follows_it(offset: int, expected: tuple[float, float]) -> None:
    """A key tells the token ``offset`` places before it; a query asks for its own token."""
    repetition = Repetition.draw((5,), 60, 64)
    assert (repetition.block, len(repetition.ids)) == (15, 61)
    assert len(set(repetition.ids[1:16])) == 15
    tokens = np.eye(64)[repetition.ids]
    keys = 40 * np.roll(tokens, offset, axis=0)
    scores = echo_and_induction(
        heads_of(tokens[None, :, None], keys[None]), 0, repetition, repetition.query_positions(8)
    )
    # Of 4 equal tokens the current one is no earlier occurrence, and it takes a quarter. Scores are 40 or 0.
    np.testing.assert_allclose(scores[:, 0], expected, atol=1e-9)
    # the last token of all has no successor
    assert repetition.query_positions(99).tolist() == list(range(1 + 15 * (REPEATS - 1), 60))


# On to a recipe


def test_a_calibration_has_every_head_and_its_figures_are_shares(calibration: Calibration) -> None:
    assert calibration == Calibration.model_validate_json(calibration.model_dump_json())
    assert list(calibration.policies) == ["streaming", "retrieval, bounds", "retrieval, mean"]
    assert [(layer.number, len(layer.heads)) for layer in calibration.layers] == [(0, 2), (1, 2)]
    for layer in calibration.layers:
        for head in layer.heads:
            assert len(head.echo) == len(head.induction) == 2
            for name, mass in head.kept.items():
                assert all(0 < share <= 1 for share in mass), name
                assert name == "streaming" or all(np.greater_equal(mass, head.kept["streaming"]))
    streaming, bounds = calibration.policies["streaming"], calibration.policies["retrieval, bounds"]
    assert streaming.read < bounds.read < 1
    # 24 of 64 to 128 tokens: their mean share is at most 24 / 64
    assert streaming.read < 0.375


def test_a_recipe_takes_the_file_and_its_manifest_the_scores(
    calibration: Calibration, llama_artifact: Path, tmp_path: Path
) -> None:
    file = tmp_path / "heads.json"
    file.write_text(calibration.model_dump_json())
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nsteps:\n- step: canonicalize\n- {step: sparse_kv, heads: heads.json, retrieval_share: 0.5,"
        " rank: mass, page: 16, sinks: 4, recent: 20, budget: 1, policy: dense}\n"
    )
    result = optimize(llama_artifact, load_recipe(tmp_path / "mine.yaml"), tmp_path / "out")
    retrieval_heads = calibration.scores.retrieval_heads(0.5, "mass")
    assert len(retrieval_heads) == 2
    for layer in layers_of(artifact.read(tmp_path / "out").model.graph):
        expected = [DENSE if (layer.number, head) in retrieval_heads else STREAMING for head in range(2)]
        assert {*expected, *layer.attributes.policies} == {*expected}
        assert [layer.attributes.policy(head) for head in range(2)] == expected
    # the same again, from the manifest alone
    saved_recipe = load_recipe(tmp_path / "mine.yaml")
    file.unlink()
    with pytest.raises(InputError, match=r"the calibration cannot be read.*graphopt heads"):
        optimize(llama_artifact, saved_recipe, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    assert Recipe.model_validate(result.manifest.recipe).steps[1].heads == calibration.scores  # type: ignore[union-attr]


def test_what_passes_did_before_does_not_matter(calibration: Calibration, llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "rotate", tmp_path / "rotated", run=False)
    assert origin_of(artifact.read(tmp_path / "rotated")) == origin_of(artifact.read(llama_artifact))
    step = {"step": "sparse_kv", "heads": calibration.scores, **READ_OPTIONS}
    result = optimize(tmp_path / "rotated", recipe(step), run=False)
    sparse, lower = result.manifest.passes[-2:]
    assert (sparse.name, lower.name) == ("sparse_kv", "lower")
    assert sparse.changes
    assert not [skip for skip in sparse.skips if skip.where == "heads"]


def test_a_calibration_of_another_model_is_refused(calibration: Calibration, llama_artifact: Path) -> None:
    scores = calibration.scores
    first, second = scores.layers[0], scores.layers[1]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"origin": "0" * 64}, r"it is of 0{12}\.\.\., the graph of .*graphopt heads"),
        ({"layers": {0: first}}, r"\{0: 2\} KV heads, those of the graph \{0: 2, 1: 2\}"),
        ({"layers": {0: first, 1: second[:1]}}, r"\{0: 2, 1: 1\} KV heads"),
    ]
    for update, message in cases:
        foreign_scores = scores.model_copy(update=update)
        with pytest.raises(InputError, match=f"the calibration is of another model: .*{message}"):
            optimize(llama_artifact, recipe({"step": "sparse_kv", "heads": foreign_scores, **READ_OPTIONS}), run=False)


def test_a_graph_that_does_not_say_what_it_was_made_from_is_compared_by_its_heads(
    calibration: Calibration, llama_artifact: Path
) -> None:
    model = artifact.read(llama_artifact).model
    assert ORIGIN not in model.metadata_props
    run_pass(model, "canonicalize")
    # the heads that stream are those that compensate
    report = run_pass(model, "sparse_kv", heads=calibration.scores, compensate=True, **READ_OPTIONS)
    assert all(layer.attributes.compensate for layer in layers_of(model.graph))
    assert [str(skip.reason) for skip in report.skips if skip.where == "heads"] == [
        "the graph does not say what it was made from: only its heads were compared"
    ]


def test_retrieval_heads_that_would_stream_are_refused(calibration: Calibration, llama_artifact: Path) -> None:
    with pytest.raises(InputError, match=r"retrieval heads that stream like all others.*dense or retrieval"):
        optimize(
            llama_artifact, recipe({"step": "sparse_kv", "policy": "streaming", "heads": calibration.scores}), run=False
        )


def test_plain_files_are_told_apart_by_their_weights(llama_artifact: Path) -> None:
    model = artifact.read(llama_artifact).model
    plain = Artifact(model, artifact.read(llama_artifact / artifact.MODEL).manifest)
    first = origin_of(plain)
    assert first == origin_of(artifact.read(llama_artifact / artifact.MODEL))
    weight = next(value for value in model.graph.initializers.values() if value.dtype == ir.DataType.FLOAT)
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() + 1, name=weight.name)
    assert origin_of(plain) != first
