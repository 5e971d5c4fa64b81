"""Graphs of onnxruntime-genai's own model builder, through the whole pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt.models.export import export
from tests.contrib_graphs import Layer, group_query_model

TOKENS = 12
PROMPTS = ["def f(", "class Stack: def pop(self)"]


@pytest.fixture(scope="module")
def llama(make_genai: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "llama"
    export(make_genai("llama"), folder)
    return folder


def generate(folder: Path, prompts: list[str]) -> list[tuple[int, ...]]:
    completions = graphopt.generate(graphopt.load(folder), prompts, max_new_tokens=TOKENS)
    return [tuple(completion.tokens) for completion in completions]


def test_the_fixture_by_hand_has_the_builders_nodes(make_genai: Callable[..., Path]) -> None:
    """One layer of the builder's graph and the one that the tests make: the same ops, attributes and inputs."""
    builder_graph = graphopt.read(make_genai("llama")).model.graph
    by_hand = group_query_model(Layer()).graph
    kinds = {(node.domain, node.op_type) for node in by_hand} - {("", "Add")}
    # SiLU and the transposed embedding of a tied head are left out.
    extra = {("", op_type) for op_type in ("Constant", "Sigmoid", "Mul", "Transpose")}
    assert {(node.domain, node.op_type) for node in builder_graph} - extra == kinds
    for op_type in ("GroupQueryAttention", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization"):
        builder_node, hand_node = (next(n for n in graph if n.op_type == op_type) for graph in (builder_graph, by_hand))
        optional_attributes = {
            "k_quant_type",
            "v_quant_type",
            "kv_cache_bit_width",
            "qk_norm_epsilon",
            "smooth_softmax",
        }
        assert set(builder_node.attributes) - optional_attributes == set(hand_node.attributes)
        present = [[value is not None for value in node.inputs] for node in (builder_node, hand_node)]
        shortest = min(map(len, present))
        assert present[0][:shortest] == present[1][:shortest]
        assert not any(any(flags[shortest:]) for flags in present)


@pytest.mark.parametrize("recipe", ["kv4", "streaming"])
def test_caches_in_pages_generate_the_same_tokens(
    recipe: str, llama: Path, llama_artifact: Path, tmp_path: Path
) -> None:
    result = graphopt.optimize(llama, recipe, tmp_path / recipe)
    assert Counter(node.op_type for node in result.model.graph)["KVAttention"] == 2
    assert not [skip for report in result.manifest.passes for skip in report.skips]
    # One by one as the builder's graph is, and both in one batch, which it cannot: shorter than a page, so exact.
    single_rows = [generate(llama, [prompt])[0] for prompt in PROMPTS]
    assert generate(tmp_path / recipe, PROMPTS) == single_rows
    assert generate(llama_artifact, PROMPTS) == single_rows


def test_rotation_and_int4_weights_work_as_on_any_other_graph(llama: Path, tmp_path: Path) -> None:
    result = graphopt.optimize(llama, "rotate-int4-rtn", tmp_path / "rotated")
    assert [check.status for check in result.manifest.checks if check.name == "certificate"] == ["proved"]
    # Queries, keys and values come out of one matrix, gate and up out of two: 2 layers of 5, and the head.
    assert result.manifest.precision is not None
    assert sum(product.count for product in result.manifest.precision.products) == 11
    assert len(generate(tmp_path / "rotated", PROMPTS)) == len(PROMPTS)


def test_the_builders_caches_and_config_are_understood(llama: Path, make_genai: Callable[..., Path]) -> None:
    session = graphopt.load(llama)
    assert session.max_positions == 128
    assert session.manifest.model.eos_token_ids == [0]
    assert not session.interface.takes_padding
    with pytest.raises(graphopt.errors.InputError, match="counts a row's tokens from its first column"):
        graphopt.generate(session, PROMPTS, max_new_tokens=1)
    logits = session.logits(np.ones((1, 3), np.int64))
    assert logits.shape == (1, 3, 300)


def test_a_window_and_a_soft_cap_become_pages_that_go_round(make_genai: Callable[..., Path], tmp_path: Path) -> None:
    result = graphopt.optimize(make_genai("gemma2"), "kv4", tmp_path / "gemma2")
    nodes = [node for node in result.model.graph if node.op_type == "KVAttention"]
    assert [node.attributes.get_int("window") for node in nodes] == [6, 0]
    assert [node.attributes.get_float("softcap") for node in nodes] == [50.0, 50.0]
    (grow_report,) = [report for report in result.manifest.passes if report.name == "grow_caches"]
    assert ["grows now" in str(change.what) for change in grow_report.changes] == [True]
    single_rows = [generate(tmp_path / "gemma2", [prompt])[0] for prompt in PROMPTS]
    assert generate(tmp_path / "gemma2", PROMPTS) == single_rows


def test_products_that_round_their_inputs_are_compared_before_they_do(
    make_genai: Callable[..., Path], tmp_path: Path
) -> None:
    """With inputs in int8 a difference in the last place is one of 1/127 now and then: 1e-3 to 3e-2 of the logits."""
    result = graphopt.optimize(make_genai("llama", "int4"), "kv4", tmp_path / "int4")
    change = {check.after: check.figures.get("largest_change") for check in result.manifest.checks}["canonicalize"]
    assert change is not None
    assert change < 1e-5
    levels = [n.attributes.get_int("accuracy_level") for n in result.model.graph if n.op_type == "MatMulNBits"]
    # 2 layers of 5, and the head; as the builder made them.
    assert levels == [4] * 11


def test_products_of_the_builder_run_on_our_kernels_with_its_codes(
    make_genai: Callable[..., Path], tmp_path: Path
) -> None:
    """Nothing is rounded anew, and its tied embedding is looked up in the codes of the head."""
    source = tmp_path / "exported"
    export(make_genai("llama", "int4"), source)
    result = graphopt.optimize(source, "int4", tmp_path / "int4", target="ort-cpu")
    kinds = Counter(node.op_type for node in result.model.graph)
    assert not kinds.keys() & {"MatMulNBits", "GatherBlockQuantized", "DequantizeLinear"}
    # 2 layers of 5, of which gate and up are merged, and the head.
    assert (kinds["MatMulTable"], kinds["GatherTable"]) == (9, 1)
    change = {check.after: check.figures.get("largest_change") for check in result.manifest.checks}["unfuse_products"]
    assert change is not None
    # Inputs in int8, see above.
    assert change < 3e-2
    assert len(generate(tmp_path / "int4", PROMPTS[:1])[0]) == TOKENS
