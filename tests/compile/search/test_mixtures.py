from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from graphopt.compile.search.losses import Sample
from graphopt.compile.search.mixtures import (
    Groups,
    Judgement,
    Judgements,
    Mixture,
    MixtureSearch,
    Mutator,
    judge_mixtures,
)

pytest.importorskip("scipy")  # of the extra `search`

LAYERS, CHOICES = 6, 3
SIZES = [[width * bits for bits in (2, 3, 4)] for _ in range(LAYERS) for width in (10, 40)]
ROLES = [list(range(0, 2 * LAYERS, 2)), list(range(1, 2 * LAYERS, 2))]
# three bits for each
ROOM = sum(row[1] for row in SIZES)


class Model:
    """A model whose small matrices matter sixteen times as much as they seem to when each is looked at alone."""

    def __init__(self) -> None:
        self.calls: list[tuple[Mixture, Sample]] = []

    @property
    def losses(self) -> list[list[float]]:
        return [[4.0**-choice for choice in range(CHOICES)] for _ in SIZES]

    def judge(self, mixtures: Sequence[Mixture], sample: Sample) -> list[float]:
        self.calls += [(mixture, sample) for mixture in mixtures]
        weights = [16.0, 1.0] * LAYERS
        return [
            sum(weight * 4.0**-choice for weight, choice in zip(weights, mixture, strict=True)) for mixture in mixtures
        ]


def bytes_of(mixture: Mixture) -> int:
    return sum(row[choice] for row, choice in zip(SIZES, mixture, strict=True))


def test_what_single_matrices_did_not_tell_is_found() -> None:
    model = Model()
    divergences = judge_mixtures(
        model.losses, SIZES, ROOM, Groups(ROLES), [], MixtureSearch(candidates=40), model.judge
    )
    best = min(divergences, key=divergences.__getitem__)
    start = model.calls[0][0]
    # every small matrix of 4 bits, 6 x 16 / 16, and large ones for the bytes that are left: the least there is
    assert divergences[best] < 0.75 * divergences[start]
    assert all(best[number] == 2 for number in ROLES[0])
    assert bytes_of(best) <= ROOM
    singles = [mixture for mixture, sample in model.calls if sample == "single"]
    assert len(set(singles)) == len(singles) == 40
    assert all(bytes_of(mixture) <= ROOM for mixture in singles)


def test_mixtures_that_are_known_are_judged_too() -> None:
    model, uniform = Model(), (1,) * len(SIZES)
    divergences = judge_mixtures(
        model.losses, SIZES, ROOM, Groups(ROLES), [uniform], MixtureSearch(candidates=4), model.judge
    )
    assert divergences[uniform] == model.judge([uniform], "all")[0]
    # the integer program's, what is known, and the finalists of one generation
    assert len(divergences) == 4


def test_the_same_seed_draws_the_same_mixtures() -> None:
    models = [Model() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        judge_mixtures(
            model.losses, SIZES, ROOM, Groups(ROLES), [], MixtureSearch(candidates=16, seed=seed), model.judge
        )
    assert models[0].calls == models[1].calls != models[2].calls


def test_a_search_without_other_mixtures_ends() -> None:
    model = Model()
    # with room for all there is one best mixture, whatever costs are believed
    divergences = judge_mixtures(
        model.losses, SIZES, 10 * ROOM, Groups(ROLES), [], MixtureSearch(candidates=8), model.judge
    )
    assert list(divergences) == [(CHOICES - 1,) * len(SIZES)]
    assert len(model.calls) == 1


def test_a_mutation_leaves_what_it_was_given() -> None:
    costs = np.ones((len(SIZES), CHOICES))
    mutator = Mutator(MixtureSearch(), SIZES, ROOM, Groups(ROLES))
    mutations = [mutator.mutate(costs) for _ in range(20)]
    assert (costs == 1).all()
    assert all((mutation > 0).all() and not (mutation == 1).all() for mutation in mutations)


def test_judgements_are_kept_by_text(tmp_path: Path) -> None:
    judgements = Judgements(tmp_path / "rows.jsonl")
    judgements.add(Judgement(mixture=(0, 1), sample="single", divergence=0.5))
    judgements.add(Judgement(mixture=(0, 1), sample="all", divergence=0.25))
    second_judgements = Judgements(judgements.file)
    assert second_judgements.rows == judgements.rows
    assert second_judgements.rows[second_judgements.key((0, 1), "all")].divergence == 0.25
