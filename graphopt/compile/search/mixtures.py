"""Mixtures of formats, judged by the model as a whole: an evolutionary search (EvoPress, Sieberling et al. 2024).

What single matrices cost does not add up to what a mixture costs, and is known roughly: it is measured on little text,
for the coarsest format alone. The best mixture by these costs is where the search begins. Each generation draws
offspring, judges all of them on a little text, the best few of these on all of it, and keeps the best if it diverges
less than its parent (algorithm 1 of the paper, with the selection in steps of its section 3).

EvoPress moves bits between two matrices of equal size. Here a mutation changes what is believed of the costs, by a
factor for the matrices of a role, for neighbours, for one matrix, for one format or for one expert, and the integer
program fills the bytes anew:

    costs ~ parent's costs x exp(normal)  ->  mixture = solve(costs, bytes)

so every mixture takes the bytes that are asked for, whatever the sizes of matrices, and one draw can move the bits of
all layers at once.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from graphopt.compile.search.jsonl import Lines
from graphopt.compile.search.losses import Sample
from graphopt.compile.search.program import solve
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

Mixture = tuple[int, ...]
"""The number of the choice for each matrix."""

_TRIES = 20
# The last tenths of a permille of costs that were drawn are not worth the seconds that they take.
_GAP = 1e-3
# Below this a cost is none: it can be multiplied, and is still none.
_NO_COST = 1e-12


class MixtureSearch(BaseModel):
    """How many mixtures to judge, and how to draw them.

    Attributes:
        candidates: mixtures that are drawn; 0: the best one by the costs of single matrices is taken as it is.
        offspring: those of a generation. They are judged on a little text.
        finalists: the best of them, which are judged on all of it.
        tokens: of the calibration text that these are judged on, and of held-out text that the last one is.
        mutations: factors that one draw changes, at most.
        deviation: of the logarithm of a factor.
        seed: of the draws.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    candidates: Annotated[int, Field(ge=0)] = 128
    offspring: Annotated[int, Field(ge=1)] = 8
    finalists: Annotated[int, Field(ge=1)] = 2
    tokens: Annotated[int, Field(ge=2)] = 2048
    mutations: Annotated[int, Field(ge=1)] = 3
    deviation: Annotated[float, Field(gt=0)] = 0.7
    seed: int = 0


class Judgement(BaseModel):
    """A mixture and what it costs.

    Attributes:
        mixture: the number of the choice for each matrix.
        sample: the texts that it was judged on.
        divergence: of the model, in nats per token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mixture: Mixture
    sample: Sample
    divergence: float


class Judgements(Lines[Judgement]):
    """What was judged, by mixture and sample.

    Args:
        file: where the rows lie, see :class:`Lines`.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file, Judgement, lambda row: self.key(row.mixture, row.sample))

    @staticmethod
    def key(mixture: Mixture, sample: Sample) -> str:
        """Return what a row is called."""
        return f"{sample}: {mixture}"


class Groups(NamedTuple):
    """Matrices whose costs a draw changes together, by number.

    Attributes:
        roles: the matrices of each role.
        experts: the matrices of each expert of each mixture of experts.
    """

    roles: Sequence[Sequence[int]]
    experts: Sequence[Sequence[int]] = ()


class Mutator:
    """Draws mixtures.

    Args:
        settings: the settings.
        sizes: the bytes of each choice for each matrix, [matrices, choices].
        room: bytes of a mixture, at most.
        groups: matrices that change together.
    """

    def __init__(self, settings: MixtureSearch, sizes: Sequence[Sequence[int]], room: int, groups: Groups) -> None:
        self._settings, self._sizes, self._room, self._groups = settings, sizes, room, groups
        self._random = random.Random(settings.seed)

    def mutate(self, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return costs [matrices, choices] in which some were multiplied by a factor each."""
        draw, new_costs = self._random, costs.copy()
        for _ in range(draw.randint(1, self._settings.mutations)):
            factor = np.exp(draw.gauss(0, self._settings.deviation))
            kind = draw.randrange(5 if self._groups.experts else 4)
            if kind == 0:
                new_costs[list(draw.choice(self._groups.roles))] *= factor
            elif kind == 1:
                begin = draw.randrange(len(costs))
                new_costs[begin : begin + draw.randint(2, max(2, len(costs) // 4))] *= factor
            elif kind == 2:
                new_costs[draw.randrange(len(costs))] *= factor
            elif kind == 3:
                new_costs[:, draw.randrange(costs.shape[1])] *= factor
            else:
                new_costs[list(draw.choice(self._groups.experts))] *= factor
        return new_costs

    def mixture(self, costs: npt.NDArray[np.float64]) -> Mixture:
        """Return the mixture of least cost."""
        return tuple(solve(costs.tolist(), self._sizes, self._room, gap=_GAP))


def judge_mixtures(
    losses: Sequence[Sequence[float]],
    sizes: Sequence[Sequence[int]],
    room: int,
    groups: Groups,
    known_mixtures: Sequence[Mixture],
    settings: MixtureSearch,
    judge: Callable[[Sequence[Mixture], Sample], Sequence[float]],
    on_stage: Progress = silent,
) -> dict[Mixture, float]:
    """Return mixtures with the divergence of each on all text: of those that are drawn the finalists.

    The draws depend on the seed and on what was judged alone: a search that is begun anew with kept judgements goes the
    same way.

    Args:
        losses: what each choice for each matrix costs alone, [matrices, choices].
        sizes: its bytes, the same shape.
        room: bytes.
        groups: matrices that change together.
        known_mixtures: mixtures to judge beside those that are drawn.
        settings: the settings.
        judge: returns the divergence of each of some mixtures on some texts.
        on_stage: called for each generation.

    Raises:
        InputError: even the smallest choices take more.
    """
    mutator = Mutator(settings, sizes, room, groups)
    costs = np.maximum(np.asarray(losses, float), _NO_COST)
    parent = tuple(solve(costs.tolist(), sizes, room))
    starts = list(dict.fromkeys([parent, *known_mixtures]))
    divergences = dict(zip(starts, judge(starts, "all"), strict=True))
    drawn_mixtures, parent_loss = {parent}, divergences[parent]
    while len(drawn_mixtures) <= settings.candidates:
        on_stage(
            f"mixtures, the best diverges by {min(divergences.values()):.4f}",
            len(drawn_mixtures) - 1,
            settings.candidates,
        )
        brood: dict[Mixture, npt.NDArray[np.float64]] = {}
        size = min(settings.offspring, settings.candidates + 1 - len(drawn_mixtures))
        for _ in range(_TRIES * settings.offspring):
            if len(brood) == size:
                break
            new_costs = mutator.mutate(costs)
            mixture = mutator.mixture(new_costs)
            if mixture not in drawn_mixtures:
                drawn_mixtures.add(mixture)
                brood[mixture] = new_costs
        if not brood:  # nothing new can be drawn
            break
        at_first = dict(zip(brood, judge(list(brood), "single"), strict=True))
        finalists = sorted(at_first, key=at_first.__getitem__)[: settings.finalists]
        divergences |= dict(zip(finalists, judge(finalists, "all"), strict=True))
        best = min(finalists, key=divergences.__getitem__)
        if divergences[best] < parent_loss:
            parent_loss, costs = divergences[best], brood[best]
    return divergences
