from __future__ import annotations

import math

import pytest

from graphopt.errors import InputError
from graphopt.quality.verdict import Requirement, verdict_of


@pytest.mark.parametrize(
    ("divergence", "word"),
    [
        (0, "as good"),
        (0.02, "as good"),
        (0.021, "usable"),
        (0.15, "usable"),
        (0.5, "damaged"),
        (1.1, "broken"),
        (math.nan, "broken"),
        (math.inf, "broken"),
    ],
)
def test_words_of_divergences(divergence: float, word: str) -> None:
    assert verdict_of({"kl_mean": divergence}) == word


@pytest.mark.parametrize(
    ("cosine", "word"), [(1, "as good"), (0.995, "usable"), (0.95, "damaged"), (0.5, "broken"), (math.nan, "broken")]
)
def test_words_of_cosines(cosine: float, word: str) -> None:
    assert verdict_of({"cosine_mean": cosine}) == word


def test_a_figure_that_is_not_there_was_not_finite() -> None:
    assert verdict_of({"same_first_choice": 1.0}) == "broken"


def test_requirements() -> None:
    requirement = Requirement.parse("kl<0.05, same_first_choice >= 0.9")
    assert requirement.unmet({"kl_mean": 0.04, "same_first_choice": 0.9}) == []
    assert requirement.unmet({"kl_mean": 0.05, "same_first_choice": 0.89}) == [
        "kl is 0.05, not < 0.05",
        "same_first_choice is 0.89, not >= 0.9",
    ]
    with pytest.raises(InputError, match="this kind of model has no figure kl: it has cosine"):
        Requirement.parse("kl<1").unmet({"cosine_mean": 1.0})


@pytest.mark.parametrize("text", ["", "kl", "kl<", "kl=1", "divergence<1", "kl<nan", "kl<a", "kl<1,,"])
def test_requirements_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match=r"cannot be read.*such as kl<0\.05"):
        Requirement.parse(text)
