"""What a node is for is told by structure: in every family, whatever the names are, before and after the compiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from graphopt.analysis.structure.folding import fold
from graphopt.analysis.structure.folding.trunk import constant_nodes
from graphopt.analysis.structure.roles import roles_of
from graphopt.artifact import artifact
from graphopt.compile.pipeline import optimize
from graphopt.passes.recipe import Recipe
from tests.decoders import shuffle_names

SPLIT = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 1, "down_proj": 1, "attention": 1}
GATED_MLP = {"gate_proj": 1, "up_proj": 1}
MERGED_LAYER = {"qkv_proj": 1, "o_proj": 1, "down_proj": 1, "attention": 1}

LAYERS = {
    "llama": SPLIT | GATED_MLP | {"norm": 2},
    "gemma2": SPLIT | GATED_MLP | {"norm": 4},
    "gemma3": SPLIT | GATED_MLP | {"norm": 4, "q_norm": 1, "k_norm": 1},
    "qwen2": SPLIT | GATED_MLP | {"norm": 2},
    "phi3": MERGED_LAYER | {"gate_up_proj": 1, "norm": 2},
    "gpt2": MERGED_LAYER | {"up_proj": 1, "norm": 2},
    "gpt_neox": MERGED_LAYER | {"up_proj": 1, "norm": 2},
    "bert": SPLIT | {"up_proj": 1, "norm": 2},
    "mixtral": SPLIT | {"norm": 2, "router": 1, "gate_up_proj": 4, "down_proj": 4},
}
"""What a layer of each family has."""


def count_roles(graph: ir.Graph, layer: int | None) -> dict[str, int]:
    """Return how often each role is in a layer; nodes that read constants alone are left out."""
    layer_fold = fold(graph)
    layers, roles = layer_fold.layer_of(), roles_of(graph, layer_fold)
    constants = constant_nodes(graph)
    nodes = [node for node in graph if layers.get(node) == layer and node not in constants]
    counts = Counter(roles[node] for node in nodes)
    return {name: count for name, count in counts.items() if name not in ("other", "shared", "rotary")}


@pytest.mark.parametrize("family", LAYERS)
def test_roles_of_each_family_with_names_shuffled(make_artifact: Callable[[str], Path], family: str) -> None:
    model = artifact.read(make_artifact(family)).model
    shuffle_names(model)
    assert count_roles(model.graph, 0) == count_roles(model.graph, 1) == LAYERS[family]
    outside = count_roles(model.graph, None)
    assert outside["embedding"] >= 1
    assert outside["norm"] == 1
    assert outside["head" if family == "bert" else "lm_head"] == 1


@pytest.mark.parametrize("preset", ["rotate-int4-rtn", "w4a4-rtn", "kv4", "streaming"])
def test_roles_outlive_the_compiler(llama_artifact: Path, preset: str) -> None:
    graph = optimize(llama_artifact, preset, run=False).model.graph
    assert count_roles(graph, 1) == SPLIT | GATED_MLP | {"norm": 2}


def test_a_target_merges_roles(llama_artifact: Path) -> None:
    graph = optimize(llama_artifact, "fp6-rtn", run=False, target="ort-cpu:avx512").model.graph
    assert count_roles(graph, 1) == MERGED_LAYER | {"gate_up_proj": 1, "norm": 2}


def test_an_lm_head_that_is_tied_to_packed_codes_is_told(llama_artifact: Path) -> None:
    """The lookup is onnxruntime's own, of codes in blocks: its table says how many tokens there are."""
    recipe = Recipe(name="tied", steps=[{"step": "quantize_weights", "lm_head": {"format": "uint4", "group": 32}}])
    model = optimize(llama_artifact, recipe, run=False).model
    outside = count_roles(model.graph, None)
    assert outside["lm_head"] == 1
    assert outside["embedding"] >= 1
