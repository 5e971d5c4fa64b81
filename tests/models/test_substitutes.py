"""Methods that transformers' exporter cannot write, in whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.artifact.artifact import MODEL
from graphopt.artifact.manifest import read_manifest
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import load
from graphopt.tasks.causal_lm.interface import Interface
from tests.families import SUBSTITUTED_MODULES, VOCABULARY
from tests.models.test_export import torch_logits
from tests.models.test_recurrence import run_pieces

# Relative to the largest logit; float32 summed in another order moves these by 2e-7 to 2e-6.
TOLERANCE = 1e-5
# Longer than windows of 6 and chunks of 8.
LENGTH = 20


@pytest.mark.parametrize("family", SUBSTITUTED_MODULES)
def test_logits_are_those_of_transformers(
    family: str, make_folder: Callable[[str], Path], make_artifact: Callable[[str], Path]
) -> None:
    ids = np.random.default_rng(3).integers(0, VOCABULARY, (2, LENGTH))
    mask = np.ones((2, LENGTH), np.int64)
    expected = torch_logits(make_folder(family), ids, mask)
    largest = np.abs(expected).max()
    assert 0.2 < largest < 100
    for pieces in ([20], [7, 11, 1, 1]):
        logits = run_pieces(make_artifact(family), ids, mask, pieces)
        assert np.abs(logits - expected).max() <= TOLERANCE * largest, pieces


def test_pairs_are_turned_by_one_operator(make_artifact: Callable[[str], Path]) -> None:
    graph = ir.load(make_artifact("llama4") / MODEL).graph
    rotaries = [node for node in graph if node.op_type == "RotaryEmbedding"]
    assert [node.attributes.get_int("interleaved") for node in rotaries] == [1, 1]  # queries and keys of one layer


def test_an_indexer_chooses_among_any_number_of_tokens(
    make_folder: Callable[[str], Path], make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    """Padding in front, more tokens than it was traced with, and states that are cut back, copied and saved."""
    folder = make_artifact("glm_moe_dsa")
    graph = ir.load(folder / MODEL).graph
    keys = {value.name: str(value.shape) for value in (*graph.inputs, *graph.outputs) if "indexer" in str(value.name)}
    assert keys == {
        "past_key_values.0.indexer_key": "[batch,1,past,32]",
        "present.0.indexer_key": "[batch,1,past + length,32]",
    }
    assert sum(node.op_type == "Min" for node in graph) == 1  # of 6 and the tokens
    assert "its layers have keys of trained indexers" in " ".join(map(str, read_manifest(folder).notes))
    ids = np.random.default_rng(4).integers(0, VOCABULARY, (2, 40))
    mask = (np.arange(40) >= np.array([0, 9])[:, None]).astype(np.int64)
    expected = torch_logits(make_folder("glm_moe_dsa"), ids, mask)
    real, largest = mask.astype(bool), np.abs(expected).max()
    assert np.abs(run_pieces(folder, ids, mask, [25, 14, 1]) - expected)[real].max() <= TOLERANCE * largest
    decoder = Decoder(load(folder / MODEL, threads=1), 1)
    decoder.step(ids[:1, :33])
    decoder.rewind(30)
    decoder.save(tmp_path / "saved.safetensors")
    copy = Decoder.restore(load(folder / MODEL, threads=1), tmp_path / "saved.safetensors")
    for continuation, rows in ((copy, 1), (decoder.fork([0, 0]), 2), (decoder, 1)):
        logits = continuation.step(np.repeat(ids[:1, 30:], rows, axis=0))
        assert np.abs(logits[-1] - expected[0, 30:]).max() <= TOLERANCE * largest


def test_layers_that_reuse_keys_have_no_cache(make_artifact: Callable[[str], Path]) -> None:
    graph = ir.load(make_artifact("gemma3n") / MODEL).graph
    caches = Counter(name.split(".")[1] for name in Interface.of_graph(graph).past)
    assert caches == {"0": 2}  # of two layers
    assert sum(node.op_type == "Erf" for node in graph) == 0
