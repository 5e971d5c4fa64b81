"""Frequencies of each method against transformers, which states them from the configuration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.passes.lift.rescale_rope import RescaleRope
from graphopt.passes.lift.rescale_rope.methods import METHODS, attention_factor, check

# float32 powers, quotients and sums by two libraries: a few units in the last place of each, 6e-8.
FLOAT32 = 1e-6
BASES = st.sampled_from([500.0, 10_000.0, 500_000.0, 1_000_000.0])
LENGTHS = st.sampled_from([128, 1024, 4096, 8192])
FACTORS = st.floats(1.0, 64.0, width=32)
PAIRS = st.integers(4, 64)


def trained_with(base: float, pairs: int) -> np.ndarray:
    """Return frequencies as transformers makes them, float32."""
    import torch

    powers = torch.arange(0, 2 * pairs, 2, dtype=torch.int64).to(torch.float) / (2 * pairs)
    return np.asarray((1.0 / base**powers).numpy(), np.float64)


def by_transformers(base: float, pairs: int, trained: int, parameters: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Return the frequencies and the attention factor of a Llama with these ``rope_parameters``."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=2 * pairs,
        num_attention_heads=1,
        head_dim=2 * pairs,
        max_position_embeddings=max(2, math.ceil(trained * parameters.get("factor", 1))),
        rope_parameters={"rope_theta": base, **parameters},
    )
    length = trained + 1 if parameters["rope_type"] == "longrope" else None
    made, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    return made.numpy().astype(np.float64), scale


def ours(w: np.ndarray, trained: int, **options: Any) -> tuple[np.ndarray, float]:
    chosen = RescaleRope(**options)
    check(chosen)
    return METHODS[chosen.method](w, chosen, trained), attention_factor(chosen, trained)


def agree(made: tuple[np.ndarray, float], expected: tuple[np.ndarray, float], *, also: Any = 0.0) -> None:
    # 1e-300: frequencies of 0 may be equal
    np.testing.assert_array_less(abs(made[0] - expected[0]), FLOAT32 * expected[0] + also + 1e-300)
    assert made[1] == pytest.approx(expected[1], rel=1e-12)


def of_the_ramp(w: np.ndarray, factor: float, magnitude: float = 1.0) -> np.ndarray:
    """Return what frequencies w (1 - g) + (w / s) g may differ by, where g is made in float32.

    g is a difference of numbers up to ``magnitude``, so it is off by a few units in the last place of that, and the
    frequency by w (1 - 1 / s) times as much: up to s times more than a unit in its own last place.
    """
    return w * (1 - 1 / factor) * 4 * 2.0**-24 * magnitude


@settings(max_examples=30)
@given(BASES, PAIRS, LENGTHS, FACTORS)
def test_linear_is_that_of_transformers(base: float, pairs: int, trained: int, factor: float) -> None:
    expected = by_transformers(base, pairs, trained, {"rope_type": "linear", "factor": factor})
    agree(ours(trained_with(base, pairs), trained, method="linear", factor=factor), expected)


@settings(max_examples=30)
@given(BASES, PAIRS, LENGTHS, FACTORS)
def test_ntk_is_another_base(base: float, pairs: int, trained: int, factor: float) -> None:
    """transformers has it as ``dynamic``, whose factor grows with the text: tests of logits hold it to that."""
    size = 2 * pairs
    expected = trained_with(base * factor ** (size / (size - 2)), pairs)
    made, scale = ours(trained_with(base, pairs), trained, method="ntk", factor=factor)
    assert scale == 1
    np.testing.assert_allclose(made, expected, rtol=FLOAT32)


@settings(max_examples=60)
@given(BASES, PAIRS, LENGTHS, FACTORS, st.floats(8, 64), st.floats(0.5, 4))
def test_yarn_is_that_of_transformers(
    base: float, pairs: int, trained: int, factor: float, fast: float, slow: float
) -> None:
    parameters = {"factor": factor, "beta_fast": fast, "beta_slow": slow}
    known = {"rope_type": "yarn", "original_max_position_embeddings": trained}
    expected = by_transformers(base, pairs, trained, {**known, **parameters})
    w = trained_with(base, pairs)
    agree(ours(w, trained, method="yarn", **parameters), expected, also=of_the_ramp(w, factor))


@settings(max_examples=30)
@given(BASES, PAIRS, LENGTHS, FACTORS, st.floats(0.5, 2), st.floats(2.5, 8))
def test_llama3_is_that_of_transformers(
    base: float, pairs: int, trained: int, factor: float, low: float, high: float
) -> None:
    parameters = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    known = {"rope_type": "llama3", "original_max_position_embeddings": trained}
    expected = by_transformers(base, pairs, trained, {**known, **parameters})
    w = trained_with(base, pairs)
    also = of_the_ramp(w, factor, high / (high - low))
    agree(ours(w, trained, method="llama3", **parameters), expected, also=also)


@settings(max_examples=30)
@given(BASES, LENGTHS, FACTORS, st.lists(st.floats(1, 64, width=32), min_size=4, max_size=32))
def test_longrope_is_that_of_transformers(base: float, trained: int, factor: float, factors: list[float]) -> None:
    if factor == 1:
        factors = [1.0] * len(factors)
    expected = by_transformers(
        base,
        len(factors),
        trained,
        {
            "rope_type": "longrope",
            "factor": factor,
            "long_factor": factors,
            "short_factor": [1.0] * len(factors),
            "original_max_position_embeddings": trained,
        },
    )
    w = trained_with(base, len(factors))
    agree(ours(w, trained, method="longrope", factor=factor, factors=factors), expected)


def test_the_truncated_basis_is_that_of_the_paper() -> None:
    """With b = 2 pi / 2048, a = 2 pi / 16384 and rho = 2 pi / 32768, as the authors trained Llama of 2048 positions."""
    w = trained_with(10_000, 64)
    made, scale = ours(w, 2048, method="truncated", factor=8)
    high, low, constant = (2 * math.pi / length for length in (2048, 16384, 32768))
    assert scale == 1
    counts = [int((w >= high).sum()), int(((w < high) & (w > low)).sum()), int((w <= low).sum())]
    assert min(counts) > 0
    np.testing.assert_array_equal(made[w >= high], w[w >= high])
    np.testing.assert_allclose(made[(w < high) & (w > low)], constant, rtol=1e-12)
    np.testing.assert_array_equal(made[w <= low], 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "linear", "beta_fast": 16}, "option beta_fast, which the method linear does not read.*yarn"),
        ({"method": "yarn", "first": 4}, "option first, which the method yarn does not read.*longrope"),
        ({"method": "longrope", "factor": 1, "factors": [1, 2]}, "factor 1, which changes nothing"),
    ],
)
def test_options_that_contradict_one_another_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check(RescaleRope(**options))


@pytest.mark.parametrize(
    ("options", "trained", "said"),
    [
        ({"method": "yarn"}, None, r"yarn needs the length.*rescale_rope.trained"),
        ({"method": "longrope", "factors": [1, 2]}, 1024, r"2 factors for longrope, and a head turns 8 pairs"),
        ({"method": "llama3", "low_freq_factor": 4}, 1024, "low_freq_factor 4.0 and high_freq_factor 4.0"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options: dict[str, Any], trained: int | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ours(trained_with(10_000, 8), trained, **options)  # type: ignore[arg-type]


def test_yarn_refuses_frequencies_of_no_single_base() -> None:
    w = trained_with(10_000, 8)
    rescaled, _ = ours(w, 1024, method="llama3", factor=4)
    with pytest.raises(InputError, match="powers of one base, and those of the model are not"):
        ours(rescaled, 4096, method="yarn")
    ours(ours(w, 1024, method="ntk", factor=4)[0], 4096, method="yarn")  # the powers of another base are
