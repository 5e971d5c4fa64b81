from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt.errors import InputError
from graphopt.quality.compare import compare, pieces_of
from graphopt.quality.evaluation import evaluate
from graphopt.quality.figures import Comparison, log_probabilities, standard_error

TEXT = "Every model here reads this. " + "def add(left, right):\n    return left\n" * 4


@pytest.fixture(scope="module")
def w4a8_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "w4a8-rtn"
    graphopt.optimize(llama_artifact, "w4a8-rtn", folder, quality_tokens=0)
    return folder


def test_figures_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    reference, logits = rng.normal(0, 3, (2, 50, 31)).astype(np.float32)
    targets = rng.integers(0, 31, 50)
    comparison = Comparison()
    for rows in (slice(0, 20), slice(20, 50)):
        comparison.add(log_probabilities(reference[rows]), logits[rows], targets[rows])
    expected, nats, divergences, matches = comparison.columns()
    p, q = (
        np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (reference, logits)
    )
    # float32 log probabilities of up to 20 nats: 20 * 6e-8, and a sum of 31 terms
    assert np.allclose(divergences, (p * np.log(p / q)).sum(-1), atol=1e-5)
    assert np.allclose(expected, -np.log(p[np.arange(50), targets]), atol=1e-5)
    assert np.allclose(nats, -np.log(q[np.arange(50), targets]), atol=1e-5)
    assert np.array_equal(matches, p.argmax(-1) == q.argmax(-1))


def test_a_token_without_a_chance_adds_nothing_and_nan_stays_nan() -> None:
    reference = np.array([[0.0, 1.0, -np.inf], [0.0, 1.0, 2.0]], np.float32)
    comparison = Comparison()
    comparison.add(log_probabilities(reference), reference, np.array([0, 1]))
    assert np.array_equal(comparison.columns()[2], [0, 0])
    comparison.add(log_probabilities(reference), np.full((2, 3), np.nan, np.float32), np.array([0, 1]))
    assert np.isnan(comparison.columns()[2][2:]).all()


def test_a_model_beside_itself_has_no_divergence(llama_artifact: Path) -> None:
    quality = compare(llama_artifact, llama_artifact, [TEXT], tokens=64, window=32)
    assert (quality.kl_mean, quality.kl_largest, quality.same_first_choice) == (0, 0, 1)
    assert quality.bits_per_byte == quality.reference_bits_per_byte
    assert quality.bits_per_byte_error == 0


def test_the_loss_is_that_of_eval(llama_artifact: Path, w4a8_artifact: Path) -> None:
    session = graphopt.load(w4a8_artifact)
    (piece,) = pieces_of(session, [TEXT], 10**6, 128)
    quality = compare(llama_artifact, w4a8_artifact, [TEXT], tokens=10**6, window=128)
    evaluation = evaluate(session, TEXT, window=128)
    assert (quality.tokens, quality.bytes) == (evaluation.tokens, evaluation.bytes) == (len(piece.ids) - 1, piece.bytes)
    # the same logits; float32 log probabilities here, float64 there
    assert quality.bits_per_byte == pytest.approx(evaluation.bits_per_byte, rel=1e-6)
    first = evaluate(graphopt.load(llama_artifact), TEXT, window=128)
    assert quality.reference_bits_per_byte == pytest.approx(first.bits_per_byte, rel=1e-6)
    assert 0 < quality.kl_mean <= quality.kl_99 <= quality.kl_largest
    assert quality.same_first_choice < 1


def test_a_model_of_last_logits_is_fed_token_by_token(
    llama_artifact: Path, w4a8_artifact: Path, tmp_path: Path
) -> None:
    graphopt.optimize(llama_artifact, "w4a8-rtn", tmp_path / "last", last_logits=True, quality_tokens=0)
    direct, by_token = (
        compare(llama_artifact, folder, [TEXT], tokens=24) for folder in (w4a8_artifact, tmp_path / "last")
    )
    # Inputs are rounded per token, so that only sums of float32 differ.
    assert by_token.kl_mean == pytest.approx(direct.kl_mean, rel=1e-3)
    assert by_token.tokens == direct.tokens


def test_texts_share_the_tokens_and_no_byte_is_counted_twice(llama_artifact: Path) -> None:
    session = graphopt.load(llama_artifact)
    pieces = pieces_of(session, [TEXT, "x = 1\n" * 40], 60, 16)
    assert 50 <= sum(len(piece.ids) - 1 for piece in pieces) <= 60
    assert max(len(piece.ids) for piece in pieces) <= 16
    texts = [session.decode(piece.ids[1:].tolist()) for piece in pieces]
    assert [piece.bytes for piece in pieces] == [len(text.encode()) for text in texts]


def test_refusals(llama_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too short"):
        compare(llama_artifact, llama_artifact, [""])
    bare_folder = tmp_path / "other"
    graphopt.artifact.artifact.write(graphopt.read(llama_artifact), bare_folder)
    (bare_folder / "tokenizer.json").unlink()
    (bare_folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        compare(bare_folder, llama_artifact, [TEXT])


def test_standard_error() -> None:
    assert standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0)
    assert math.isnan(standard_error(np.array([1.0])))
