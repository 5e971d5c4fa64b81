"""Heads as proposers: the file, the turn into another basis, what is refused, and that texts never change."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphopt.analysis.structure.ports import HIDDEN
from graphopt.artifact.artifact import HEADS
from graphopt.cli import app
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.decoding.proposers import Chain, Guess, Heads, Proposer
from graphopt.inference.decoding.proposers.heads import lm_head_matrix
from graphopt.inference.decoding.proposers.heads_file import HeadsFile
from graphopt.inference.decoding.proposers.registry import open_speculation
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.generation import generate
from graphopt.inference.session import Session, load
from graphopt.passes.recipe import load_recipe
from tests.families import HIDDEN as WIDTH
from tests.families import VOCABULARY
from tests.native import needs_library
from tools.train.heads import open_with_hidden

pytestmark = [needs_library, pytest.mark.usefixtures("costs_are_measured_briefly")]

SAMPLING = Sampling(0.8, top_p=0.9, seed=7)
PROMPTS = [[*range(60, 100), 5, 6, 7], [41], [3, 200, 17, 3, 200], *([number] for number in range(5))]


def nonsense(seed: int = 0, heads: int = 3, inner: int = 8, width: int = WIDTH) -> HeadsFile:
    """Return heads that have learned nothing."""
    random = np.random.default_rng(seed)
    shapes = (width, heads, inner), (heads, inner, width), (VOCABULARY, 4), (4, heads, inner)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    return HeadsFile(*arrays, np.empty(0, np.int64), np.empty((width, 0), np.float32))


@pytest.fixture(scope="module")
def hidden_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama, rotated, in codes of 4 bits and caches in pages, that gives its hidden states."""
    folder = tmp_path_factory.mktemp("exposed") / "made"
    recipe = load_recipe("rotate-int4-rtn", add=["expose_hidden"]).with_lower("ort-cpu:avx512")
    recipe = recipe.setting("quantize_weights", lm_head={"format": "fp6-e2m3", "group": 32})
    optimize(llama_artifact, recipe, folder, quality_tokens=0)
    return folder


@pytest.fixture(scope="module")
def session(hidden_artifact: Path) -> Session:
    return load(hidden_artifact, threads=1)


def test_a_file_is_read_as_it_was_written_and_runs_alone(tmp_path: Path) -> None:
    heads = dataclasses.replace(nonsense(), tokens=np.array([3, 7]), columns=np.ones((WIDTH, 2), np.float32))
    heads.write(tmp_path / HEADS)
    loaded_heads = HeadsFile.load(tmp_path / HEADS)
    assert (loaded_heads.width, loaded_heads.count, loaded_heads.vocabulary) == (WIDTH, 3, VOCABULARY)
    assert np.array_equal(loaded_heads.tokens, [3, 7])
    assert np.array_equal(loaded_heads.columns, heads.columns)
    # float16 has 11 bits
    assert np.allclose(loaded_heads.inner, heads.inner, rtol=2**-11)
    assert np.allclose(loaded_heads.outer, heads.outer, rtol=2**-11)
    h = np.random.default_rng(1).standard_normal((2, 1, WIDTH)).astype(np.float32)
    states = onnxruntime.InferenceSession(tmp_path / HEADS).run(
        ["states"], {HIDDEN: h, "token": np.array([[3], [250]])}
    )[0]
    x = np.einsum("bpd,dki->bki", h, loaded_heads.inner) + np.einsum(
        "be,eki->bki", loaded_heads.embedding[[3, 250]], loaded_heads.token_inner
    )
    expected = h + np.einsum("bki,kid->bkd", x / (1 + np.exp(-x)), loaded_heads.outer)
    # sums of 64 and of 8 float32 numbers
    assert np.abs(states - expected).max() < 1e-5 * np.abs(expected).max()


@settings(max_examples=8)
@given(
    seed=st.integers(0, 99),
    length=st.sampled_from([None, 1, 2, 3, 7, 11]),
    batch=st.sampled_from([1, 3, 8]),
    draws=st.booleans(),
)
def test_nonsense_changes_nothing(session: Session, seed: int, length: int | None, batch: int, draws: bool) -> None:
    sampling, prompts = SAMPLING if draws else Sampling(), PROMPTS[:batch]
    plain = generate(session, prompts, max_new_tokens=20, sampling=sampling, logprobs=0)
    speculation = Speculation(Heads(session, nonsense(seed), min_chance=0.0), length)
    # log probabilities too: their bits are those of the logits
    assert generate(session, prompts, max_new_tokens=20, sampling=sampling, logprobs=0, proposer=speculation) == plain
    if length is not None:
        assert sum(speculation.stats.checks.values()) > 10
        assert max(speculation.stats.widths) == 1 + min(length, 3)


def test_a_head_of_zeros_guesses_the_newest_token_again(session: Session) -> None:
    """Without a residual block a head says what the model says of the next token: the guess is the anchor itself."""
    zeros = dataclasses.replace(nonsense(), outer=np.zeros((3, 8, WIDTH), np.float32))

    class RecordingHeads(Heads):
        def propose(self, prefixes, limits):  # type: ignore[no-untyped-def]
            drafts = super().propose(prefixes, limits)
            for row, draft in zip(self._rows, drafts, strict=True):
                proposals.append((row.tokens[-1], [guess.token for guess in draft]))
            return drafts

    proposals: list[tuple[int, list[int]]] = []
    generate(
        session, PROMPTS[:3], max_new_tokens=12, proposer=Speculation(RecordingHeads(session, zeros, min_chance=0.0), 3)
    )
    drafts = [(anchor, draft) for anchor, draft in proposals if draft]
    assert len(drafts) > 15
    # several rows of a product with codes have the bits of one, so this is so to the last bit
    assert all(set(draft) == {anchor} for anchor, draft in drafts)


def test_heads_go_on_where_another_proposer_stops(session: Session) -> None:
    class First(Proposer):
        def begin(self, rows):  # type: ignore[no-untyped-def]
            pass

        def propose(self, prefixes, limits):  # type: ignore[no-untyped-def]
            return [[Guess(1, 0.9, "first")][:limit] for limit in limits]

        def commit(self, row, tokens):  # type: ignore[no-untyped-def]
            pass

    heads = Heads(session, nonsense(), min_chance=0.0)
    chain = Chain(First(), heads)
    plain = generate(session, [PROMPTS[0]], max_new_tokens=4)
    assert generate(session, [PROMPTS[0]], max_new_tokens=4, proposer=Speculation(chain, 3)) == plain
    (row,) = heads._rows
    first, all_of_them = chain.propose([[]], [2]), heads.propose([[]], [3])
    assert [guess.token for guess in first[0]] == [1, all_of_them[0][1].token]
    assert heads.propose([[1, 2, 3]], [4]) == [[]]
    assert row.hidden is not None
    assert row.hidden.shape == (WIDTH,)


def test_heads_are_turned_into_the_basis_of_the_artifact(
    llama_artifact: Path, session: Session, tmp_path: Path
) -> None:
    """Trained for the float model, used beside one that is rotated, and rounded too: they say the same, or nearly."""
    float_session = open_with_hidden(llama_artifact, 1)
    matrix, token_ids = lm_head_matrix(float_session), np.arange(0, VOCABULARY, 2)
    random = nonsense(1)
    heads = dataclasses.replace(
        random,
        inner=random.inner / 8,
        outer=random.outer / 8,
        token_inner=random.token_inner / 8,
        tokens=token_ids,
        columns=matrix[:, token_ids],
    )
    optimize(llama_artifact, load_recipe("rotate", add=["expose_hidden"]), tmp_path / "rotated", quality_tokens=0)
    ids = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    logits = []
    for model_session in (float_session, load(tmp_path / "rotated", threads=1), session):
        feeds = model_session.interface.feeds(
            ids, np.ones_like(ids), model_session.interface.empty_past(1, ids.shape[1])
        )
        hidden = model_session.inference.run([HIDDEN], feeds)[0]
        logits.append(Heads(model_session, heads).logits(hidden[0], ids[0].tolist()))
    before, rotated_logits, coded_logits = logits
    print(
        "SEEN",
        np.abs(rotated_logits - before).max() / np.abs(before).max(),
        np.corrcoef(coded_logits.ravel(), before.ravel())[0, 1],
    )
    assert before.shape == (8, 3, VOCABULARY)
    # float32 through a model of two layers, and a least squares of well-conditioned matrices; seen 8e-7
    assert np.abs(rotated_logits - before).max() < 1e-4 * np.abs(before).max()
    # 4 bits in all layers and 6 in the lm_head: what a model of random weights says then correlates; seen 0.93
    assert np.corrcoef(coded_logits.ravel(), before.ravel())[0, 1] > 0.85


def test_what_is_refused(session: Session, hidden_artifact: Path, llama_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not give its last hidden state.*--add expose_hidden"):
        open_speculation(load(llama_artifact, threads=1), "heads")
    with pytest.raises(InputError, match="there is no heads.onnx here.*tools/train/heads"):
        open_speculation(session, "heads")
    with pytest.raises(InputError, match="no drafts 'verified:lookup,heads'"):
        open_speculation(session, "verified:lookup,heads")
    with pytest.raises(InputError, match="a hidden state of 32, and this model has one of 64"):
        Heads(session, nonsense(width=32))
    with pytest.raises(InputError, match=f"a vocabulary of 7, and this model has one of {VOCABULARY}"):
        Heads(session, dataclasses.replace(nonsense(), embedding=np.zeros((7, 4), np.float32)))
    random = np.random.default_rng(0).standard_normal((WIDTH, 2 * WIDTH)).astype(np.float32)
    foreign_heads = dataclasses.replace(nonsense(), tokens=np.arange(2 * WIDTH), columns=random)
    with pytest.raises(InputError, match="trained for another model: .*% of this one's lm_head"):
        Heads(session, foreign_heads)
    (tmp_path / HEADS).write_bytes(b"nothing")
    with pytest.raises(InputError, match="these are no heads"):
        HeadsFile.load(tmp_path / HEADS)
    heads = Heads(session, nonsense())
    shutil.copytree(hidden_artifact, tmp_path / "copy")
    with pytest.raises(InputError, match="another model writes the text"):
        generate(load(tmp_path / "copy", threads=1), [[1]], proposer=heads)


def test_the_command_line_drafts_with_the_heads_beside_a_model(hidden_artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exposed"
    shutil.copytree(hidden_artifact, folder)
    nonsense().write(folder / HEADS)
    options = ["run", str(folder), "--prompt", "import os", "--json", "--threads", "1", "--max-new-tokens", "12"]
    plain = json.loads(CliRunner().invoke(app, options).output)
    result = CliRunner().invoke(app, [*options, "--speculate", "heads", "--draft-tokens", "3", "--stats"])
    report = json.loads(result.output)
    assert report["completions"] == plain
    assert report["drafts"]["acceptance"]["heads"]  # by place, as far as any guess came
