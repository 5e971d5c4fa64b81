from __future__ import annotations

import numpy as np
import pytest

from graphopt.inference.decoding.sampling import Sampling


def by_definition(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float) -> np.ndarray:
    """Sort everything, keep the first tokens that reach ``top_p`` of the first ``top_k``."""
    exponents = logits.astype(np.float64) / temperature
    weights = np.exp(exponents - exponents.max())
    ranks = np.argsort(-weights)[:top_k]
    mass = np.cumsum(weights[ranks])
    nucleus = ranks[: 1 + np.count_nonzero(mass[:-1] < top_p * mass[-1])] if top_p < 1 else ranks
    probabilities = np.zeros(len(logits))
    probabilities[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return probabilities


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.8, None, 0.95), (1.5, None, 0.5), (0.01, None, 0.9), (0.8, 20, 0.9), (0.8, 7, 1.0), (2.0, None, 1.0)],
)
def test_tokens_are_drawn_by_the_definition(temperature: float, top_k: int | None, top_p: float, spread: float) -> None:
    sampling, random = Sampling(temperature, top_k, top_p), np.random.default_rng(3)
    for _ in range(20):
        logits = (spread * random.standard_normal(500)).astype(np.float32)
        want = by_definition(logits, temperature, top_k, top_p)
        probabilities = sampling.probabilities(logits)
        assert np.array_equal(probabilities > 0, want > 0)
        # sums of up to 500 float64 in another order
        np.testing.assert_allclose(probabilities, want, rtol=1e-13)
        # the place of one number on the scale of these probabilities, in the order of the vocabulary
        number = int(random.integers(1 << 30))
        token = np.searchsorted(np.cumsum(want), np.random.default_rng(number).random(), side="right")
        assert sampling.choose(logits, np.random.default_rng(number)) == token


def test_of_tokens_alike_only_as_many_are_kept_as_reach_it() -> None:
    logits = np.zeros(100, np.float32)
    assert np.count_nonzero(Sampling(1.0, top_k=8).probabilities(logits)) == 8
    assert np.count_nonzero(Sampling(1.0, top_p=0.395).probabilities(logits)) == 40
