"""Spans of a text that was read are replaced: what moves is what the model would have read there, as far as it can be.

Keys and values of the first layer know nothing of other tokens, so there an edit is exact; in later layers they keep
what they had read. Moved there and back, all keys are what they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.editing import Edit, apply_edits, edits_between
from graphopt.inference.session import Session, load
from graphopt.inference.states.buffers import Row
from graphopt.inference.states.eviction import Eviction
from graphopt.inference.states.moving import StoredTokens, read_tokens
from graphopt.inference.states.pages import PagedStates
from graphopt.passes.recipe import Recipe
from tests.graphs import relative

PAGES = {"step": "page_kv", "page": 16}
TOKENS = np.random.default_rng(0).integers(5, 90, 100).tolist()
NEW_TOKENS = [7, 8, 9, 10, 11, 12, 13]


def in_pages(source: Path, folder: Path, *steps: dict[str, Any]) -> Session:
    recipe = {"name": "pages", "steps": [{"step": "canonicalize"}, *steps]}
    optimize(source, Recipe.model_validate(recipe), folder, run=False)
    return load(folder, threads=1)


@pytest.fixture(scope="module")
def llama(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    return in_pages(llama_artifact, tmp_path_factory.mktemp("editing") / "llama", PAGES)


def decoder_after(session: Session, tokens: Sequence[int]) -> Decoder:
    decoder = Decoder(session, 1)
    decoder.step(np.array([tokens], np.int64))
    return decoder


def stored_tokens(decoder: Decoder, layer: int) -> StoredTokens:
    assert isinstance(decoder.states, PagedStates)
    state = {name: Row(tensor.buffers[0], 0) for name, tensor in decoder.states.tensors[layer].items()}
    count = int(decoder.tokens[0])
    return read_tokens(decoder.states.layers[layer], state, 0, count, count)


# a rotary embedding of all channels, of some, of the end of a latent, and one with a Hadamard transform behind it
FAMILIES = {
    "llama": [PAGES],
    "gpt_neox": [PAGES],
    "deepseek_v3": [{"step": "absorb_latent"}, PAGES],
    "llama, rotated": [{"step": "fold_norms"}, {"step": "rotate", "query_key": "hadamard"}, PAGES],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layer_is_that_of_the_text_read_anew(
    family: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    session = in_pages(make_artifact(family.split(",")[0]), tmp_path / "model", *FAMILIES[family])
    decoder = decoder_after(session, TOKENS)
    after = decoder.edit(TOKENS, [Edit(20, 24, NEW_TOKENS), Edit(60, 70, [])], reread=0)
    assert after == [*TOKENS[:20], *NEW_TOKENS, *TOKENS[24:60], *TOKENS[70:]]
    assert decoder.tokens.tolist() == [len(after)]
    result, expected = stored_tokens(decoder, 0), stored_tokens(decoder_after(session, after), 0)
    # float32: keys of size 1 at positions up to 100, in another order of sums
    assert np.allclose(result.keys, expected.keys, atol=2e-5 * np.abs(expected.keys).max())
    assert np.allclose(result.values, expected.values, atol=2e-5)
    assert not np.allclose(
        result.keys[:, 40:], stored_tokens(decoder_after(session, TOKENS), 0).keys[:, 40 : len(after)], atol=0.01
    )
    assert decoder.step(np.array([[3, 4]])).shape[:2] == (1, 2)


def test_there_and_back(llama: Session) -> None:
    decoder = decoder_after(llama, TOKENS)
    before = [stored_tokens(decoder, layer) for layer in range(len(llama.interface.layers))]
    text = decoder.edit(TOKENS, [Edit(30, 30, NEW_TOKENS)], reread=0)
    text = decoder.edit(text, [Edit(30, 37, [])], reread=0)
    assert text == TOKENS
    for layer, expected in enumerate(before):
        result = stored_tokens(decoder, layer)
        assert np.allclose(result.keys, expected.keys, atol=1e-5 * np.abs(expected.keys).max())
        assert np.array_equal(result.values, expected.values)
    logits = decoder.step(np.array([[3]]))
    assert relative(decoder_after(llama, TOKENS).step(np.array([[3]])), logits) < 1e-4


def test_what_is_read_again_knows_the_new_text(llama: Session) -> None:
    after = apply_edits(TOKENS, [Edit(90, 92, NEW_TOKENS)])
    expected = decoder_after(llama, after).step(np.array([[3]]))
    errors = []
    for reread in (0, 4, 8):
        decoder = decoder_after(llama, TOKENS)
        assert decoder.edit(TOKENS, [Edit(90, 92, NEW_TOKENS)], reread=reread) == after
        errors.append(relative(expected, decoder.step(np.array([[3]]))))
    assert errors[0] > errors[2]
    # nothing moved: the same steps in other lengths
    assert errors[2] < 1e-5


def test_an_edit_costs_what_it_reads(llama: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    step = Decoder.step

    def count(self: Decoder, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        lengths.append(ids.shape[1])
        return step(self, ids, mask)

    decoder = decoder_after(llama, TOKENS)
    monkeypatch.setattr(Decoder, "step", count)
    decoder.edit(TOKENS, [Edit(20, 24, NEW_TOKENS), Edit(60, 70, [])], reread=3)
    assert lengths == [len(NEW_TOKENS) + 3, 3]


@pytest.mark.parametrize("storage", ["int8", "float16"])
def test_caches_of_few_bits(storage: str, llama_artifact: Path, tmp_path: Path) -> None:
    session = in_pages(llama_artifact, tmp_path / "model", {"step": "quantize_kv", "storage": storage, "page": 16})
    decoder = decoder_after(session, TOKENS)
    after = decoder.edit(TOKENS, [Edit(20, 24, NEW_TOKENS)], reread=0)
    result, expected = stored_tokens(decoder, 0), stored_tokens(decoder_after(session, after), 0)
    # each rounding moves a number by half a step of 255 levels of what 16 keys span, or by 2^-11 of it; there are three
    step = 1 / 255 if storage == "int8" else 2.0**-11
    assert np.abs(result.keys - expected.keys).max() < 3 * step * np.abs(expected.keys).max()
    assert np.allclose(result.values, expected.values, atol=step * np.abs(expected.values).max())


@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40), st.integers(0, 5))
def test_edits_make_one_text_of_another(before: list[int], after: list[int], reread: int) -> None:
    edits = edits_between(before, after, reread)
    assert apply_edits(before, edits) == after
    assert all(right.start - left.end > reread for left, right in itertools.pairwise(edits))


@pytest.mark.parametrize("edits", [[Edit(5, 4, [])], [Edit(0, 101, [])], [Edit(5, 9, []), Edit(8, 10, [])]])
def test_edits_that_cannot_be(edits: list[Edit]) -> None:
    with pytest.raises(InputError, match="an edit of tokens"):
        apply_edits(TOKENS, edits)


@pytest.mark.parametrize(
    ("family", "steps", "message"),
    [
        ("gpt2", [PAGES], "tokens cannot move: Add gives positions to what the values of layer 0"),
        ("qwen3_next", [PAGES], "recurrent states are made of all tokens so far"),
        ("llama", [], "caches that grow are not edited .*add the step page_kv"),
    ],
)
def test_models_whose_tokens_cannot_move(
    family: str, steps: list[dict[str, Any]], message: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    session = in_pages(make_artifact(family), tmp_path / "model", *steps)
    decoder = decoder_after(session, TOKENS)
    with pytest.raises(InputError, match=message):
        decoder.edit(TOKENS, [Edit(20, 24, [])])
    # and it is as it was
    assert decoder.tokens.tolist() == [100]
    assert np.array_equal(decoder.step(np.array([[3]])), decoder_after(session, TOKENS).step(np.array([[3]])))


def test_a_rotation_that_depends_on_the_length_is_refused(llama: Session, tmp_path: Path) -> None:
    model = ir.load(llama.file)
    (positions,) = [value for value in model.graph.inputs if value.name == "position_ids"]
    readers = list(positions.uses())
    # as where factors are others beyond the length that a model was trained on
    threshold = ir.Value(name="threshold", const_value=ir.tensor(np.array(80), name="threshold"))
    model.graph.register_initializer(threshold)
    is_far = ir.node("Greater", [positions, threshold])
    sum_node = ir.node("Add", [positions, positions])
    choice = ir.node("Where", [is_far.outputs[0], sum_node.outputs[0], positions])
    for node in (choice, sum_node, is_far):
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.INT64, positions.shape
        model.graph.insert_before(model.graph[0], node)
    is_far.outputs[0].dtype = ir.DataType.BOOL
    for node, index in readers:
        node.replace_input_with(index, choice.outputs[0])
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    session = load(tmp_path / "model.onnx", threads=1)
    decoder = decoder_after(session, TOKENS)
    with pytest.raises(InputError, match=r"keys of layer \d do not turn alike where 76 tokens from position 24 on"):
        decoder.edit(TOKENS, [Edit(20, 24, [])], reread=0)
    text = TOKENS[:70]
    decoder_after(session, text).edit(text, [Edit(20, 24, [])], reread=0)


def test_rows_that_cannot_be_edited(llama: Session) -> None:
    edits = [Edit(3, 4, [])]
    with pytest.raises(InputError, match=r"rows of \[100, 100\] tokens, and a text of 100: edit one row"):
        decoder_after(llama, TOKENS).fork([0, 0]).edit(TOKENS, edits)
    with pytest.raises(InputError, match=r"rows of \[100\] tokens, and a text of 99"):
        decoder_after(llama, TOKENS).edit(TOKENS[1:], edits)
    decoder = decoder_after(llama, TOKENS)
    decoder.evict(Eviction(60, sinks=4, recent=20))
    with pytest.raises(InputError, match="tokens were evicted, and nothing says which"):
        decoder.edit(TOKENS[:60], edits)


def test_a_ring_is_edited_where_it_still_has_what_the_span_reads(llama_artifact: Path, tmp_path: Path) -> None:
    streaming = {"step": "sparse_kv", "policy": "streaming", "sinks": 4, "recent": 20}
    session = in_pages(llama_artifact, tmp_path / "model", PAGES, streaming)
    text = TOKENS * 3
    decoder = Decoder(session, 1)
    for begin in range(0, len(text), 10):
        decoder.step(np.array([text[begin : begin + 10]]))
    with pytest.raises(InputError, match="cannot be rewound from 300 to 100 tokens"):
        decoder.edit(text, [Edit(100, 104, [])])
    after = decoder.edit(text, [Edit(290, 292, NEW_TOKENS)], reread=8)
    expected, result = (text_decoder.step(np.array([[3]])) for text_decoder in (decoder_after(session, after), decoder))
    # all behind the span was read again
    assert relative(expected, result) < 1e-4
