from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from graphopt.errors import GraphoptError, InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import Session, load
from graphopt.quality.evaluation import evaluate, negative_log_likelihood, plan
from graphopt.util.stdlib_text import held_out_text
from tests.small_models import byte_tokenizer, counting_model

TEXT = held_out_text()[:1500] + "Größe: 5 €\n"


@pytest.fixture(scope="module")
def session(llama_artifact: Path) -> Session:
    return load(llama_artifact, threads=1)


def counting(folder: Path, *, bos: bool = True, cache: bool = True) -> Session:
    """The model that counts, on the bytes of "abcdefg" as tokens 1 to 7, with BOS as 0."""
    session = load(counting_model(folder, cache=cache), threads=1)
    return dataclasses.replace(session, tokenizer=byte_tokenizer("abcdefg", bos=bos))


# Windows


@given(st.integers(2, 300), st.integers(1, 60), st.data())
def test_each_token_is_scored_once_and_in_context(tokens: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    windows = plan(tokens, window, stride)
    positions: list[int] = []
    for part in windows:
        assert part.start >= 0
        assert part.start + part.length < tokens  # the last target exists
        assert part.length == min(window, tokens - 1)
        assert 1 <= part.scored_targets <= part.length
        targets = range(part.start + 1, part.start + part.length + 1)[-part.scored_targets :]
        if part.start > 0:
            assert targets[0] - part.start > window - stride
        positions += targets
    assert positions == list(range(1, tokens))
    assert len(windows) == 1 + max(0, math.ceil((tokens - 1 - window) / stride))


@pytest.mark.parametrize(("window", "stride"), [(8, 0), (8, 9), (0, 0), (8, -1)])
def test_a_stride_that_does_not_fit_is_refused(session: Session, window: int, stride: int) -> None:
    with pytest.raises(InputError, match=f"a stride of {stride} tokens does not fit a window of {window}"):
        evaluate(session, TEXT, window=window, stride=stride)


# Scores


@pytest.mark.parametrize(("window", "stride"), [(None, None), (128, 128), (50, 7), (3, 1), (1, 1)])
def test_scores_are_those_of_torch(
    session: Session, llama_folder: Path, window: int | None, stride: int | None
) -> None:
    text = TEXT[-300:] if window is not None and window < 50 else TEXT
    ids = session.encode(text)
    assert session.beginning == ()  # so the first token, one byte here, is no part of the score
    evaluation = evaluate(session, text, window=window, stride=stride)
    assert (evaluation.window, evaluation.stride) == (window or 128, stride or 64)
    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    expected = torch_nats(model, ids, evaluation.window, evaluation.stride)
    # Logits agree to about 1e-6 of the largest, here about 4: no token's score can move by more than twice that. Scores
    # are about 6 nats, so 2e-6 of the sum; five times that for other machines' kernels.
    assert evaluation.nats == pytest.approx(expected, rel=1e-5)
    assert evaluation.tokens == len(ids) - 1
    assert evaluation.bytes == len(text.encode()) - len(session.decode(ids[:1]).encode())
    assert evaluation.perplexity == pytest.approx(math.exp(expected / (len(ids) - 1)), rel=1e-4)
    assert evaluation.bits_per_byte == pytest.approx(expected / math.log(2) / evaluation.bytes, rel=1e-5)


def torch_nats(model: LlamaForCausalLM, ids: list[int], window: int, stride: int) -> float:
    """Score token by token, each in a forward of its own window: the definition, not the plan."""
    total, targets, logits = 0.0, len(ids) - 1, {}
    for target in range(1, len(ids)):
        # The first window that reaches the target; the last window ends at the last target.
        start = min(max(0, math.ceil((target - window) / stride)) * stride, max(0, targets - window))
        if start not in logits:
            with torch.no_grad():
                logits[start] = model(torch.tensor([ids[start : start + window]])).logits[0].double()
        total -= float(torch.log_softmax(logits[start][target - 1 - start], dim=-1)[ids[target]])
    return total


def test_the_beginning_is_a_condition(tmp_path: Path) -> None:
    # Logits are 9 at the right token and 0 at 7 others. With BOS, all of "abcdefg" is predicted; without, "a" is not
    # scored and its byte not counted.
    nats = math.log(math.exp(9) + 7) - 9
    with_bos = evaluate(counting(tmp_path), "abcdefg")
    without = evaluate(counting(tmp_path, bos=False), "abcdefg")
    # float32 logits of 9 + 7 exp(-9): one rounding of a sum near 1, 1.2e-7, against 8.6e-4 nats.
    assert with_bos.nats == pytest.approx(7 * nats, rel=3e-4)
    assert (with_bos.tokens, with_bos.bytes) == (7, 7)
    assert without.nats == pytest.approx(6 * nats, rel=3e-4)
    assert (without.tokens, without.bytes) == (6, 6)
    assert with_bos.window == 1024  # where the number of positions is unknown


def test_a_graph_without_a_cache_can_be_scored(tmp_path: Path) -> None:
    text = "abcdefg" * 100
    with_cache = evaluate(counting(tmp_path / "a"), text, window=300)
    without = evaluate(counting(tmp_path / "b", cache=False), text, window=300)
    assert without.nats == pytest.approx(with_cache.nats, rel=1e-9)  # the same logits, summed in other portions


def test_pieces_change_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(session, TEXT, window=60, stride=25)
    monkeypatch.setattr("graphopt.inference.decoding.decoder._PIECE", 7)
    assert evaluate(session, TEXT, window=60, stride=25).nats == pytest.approx(whole.nats, rel=1e-6)  # order of sums


def test_progress_counts_up_to_all_tokens(session: Session) -> None:
    progress: list[tuple[int, int]] = []
    evaluation = evaluate(session, TEXT, window=32, stride=16, on_progress=lambda *counts: progress.append(counts))
    assert progress[-1] == (evaluation.tokens, evaluation.tokens)
    assert [count for count, _ in progress] == sorted({count for count, _ in progress})
    assert evaluation.seconds > 0


@given(st.integers(0, 2**32), st.integers(1, 70), st.sampled_from([1, 2, 300, 5000]), st.floats(0, 40))
def test_log_likelihood_is_that_of_float64(seed: int, positions: int, vocabulary: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((positions, vocabulary)) * scale).astype(np.float32)
    targets = random.integers(0, vocabulary, positions)
    wide = torch.from_numpy(logits).double()
    expected = -torch.log_softmax(wide, dim=-1).numpy()[np.arange(positions), targets]
    # Float32 terms: each is off by at most |x| exp(x) 6e-8 < 3e-8 and a rounding, and so is their pairwise sum.
    np.testing.assert_allclose(negative_log_likelihood(logits, targets), expected, rtol=1e-12, atol=2e-6)


def test_half_precision_logits_are_widened() -> None:
    logits = np.array([[60000.0, 0.0], [-60000.0, 0.0]], np.float16)
    assert negative_log_likelihood(logits, np.array([0, 0])).tolist() == [0, float(np.float16(60000))]


# Refusals


@pytest.mark.parametrize(("text", "message"), [("", "the text is empty"), ("a", "no token of it can be predicted")])
def test_nothing_to_score_is_refused(session: Session, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(session, text)


def test_an_empty_text_is_refused_with_a_bos_token_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the text is empty"):
        evaluate(counting(tmp_path), "")


def test_no_tokenizer_is_refused(session: Session) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        evaluate(dataclasses.replace(session, tokenizer=None), TEXT)


def test_a_window_wider_than_the_model_is_refused(session: Session) -> None:
    with pytest.raises(InputError, match="a window of 129 tokens is wider than the model's 128 positions"):
        evaluate(session, "short", window=129)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def step(_: Decoder, ids: np.ndarray, mask: None = None) -> np.ndarray:
        return np.full((*ids.shape, session.interface.vocabulary or 0), value, np.float32)

    monkeypatch.setattr(Decoder, "step", step)
    with pytest.raises(GraphoptError, match="logits are not finite"):
        evaluate(session, TEXT)
