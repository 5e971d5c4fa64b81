"""An evolutionary search for rotary factors (LongRoPE, Ding et al. 2024, section 3.2 and algorithm 1).

A candidate divides the frequency of each pair by a factor, from 1 to 1.25 times the factor of the context, and leaves
the first tokens as they were. Factors never decrease from fast to slow pairs: this monotone space is what makes the
search feasible, as the paper shows. Each generation mutates some of the fittest candidates and crosses others.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRSTS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""How many first tokens may be left as they were: the paper's table 4."""

_LARGEST_SHARE = 1.25
_TRIES = 100


class Candidate(BaseModel):
    """One choice.

    Attributes:
        factors: what the frequency of each pair is divided by, from the fastest to the slowest.
        first: tokens at the start of a sequence that keep their angles.
        attention_factor: what cosines and sines are multiplied by; the paper has 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    factors: tuple[float, ...]
    first: int = 0
    attention_factor: float = 1.0


class Evolution(BaseModel):
    """How long and how widely to search; the defaults are those of the paper.

    Attributes:
        population: candidates of the first generation.
        parents: the fittest of all so far, from which the next generation comes.
        mutations: mutated candidates of each generation.
        crossovers: crossed candidates of each generation.
        generations: generations behind the first one.
        chance: with which a mutation changes a number.
        seed: of the draws.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    population: Annotated[int, Field(ge=2)] = 64
    parents: Annotated[int, Field(ge=2)] = 32
    mutations: Annotated[int, Field(ge=0)] = 16
    crossovers: Annotated[int, Field(ge=0)] = 16
    generations: Annotated[int, Field(ge=0)] = 40
    chance: Annotated[float, Field(gt=0, le=1)] = 0.3
    seed: int = 0

    @property
    def candidates(self) -> int:
        """How many candidates are measured, at most."""
        return self.population + self.generations * (self.mutations + self.crossovers)


class Breeder:
    """Draws candidates.

    Args:
        settings: the population, the changes of a generation and the seed.
        factor: by which the context grows.
        attention_factors: what a candidate may choose from.
    """

    def __init__(self, settings: Evolution, factor: float, attention_factors: Sequence[float]) -> None:
        self._settings, self._largest = settings, _LARGEST_SHARE * factor
        self._attention_factors = list(attention_factors)
        self._random = random.Random(settings.seed)

    def clip(self, candidate: Candidate) -> Candidate:
        """Return the candidate with factors in range, in steps of 0.01, that never decrease."""
        factors, smallest = [], 1.0
        for factor in candidate.factors:
            smallest = round(max(smallest, min(factor, self._largest)), 2)
            factors.append(smallest)
        return candidate.model_copy(update={"factors": tuple(factors)})

    def mutate(self, candidate: Candidate) -> Candidate:
        """Return a copy in which each number was drawn anew with some chance, factors between their neighbours."""
        draw, factors = self._random, list(candidate.factors)
        for pair in range(len(factors)):
            if draw.random() < self._settings.chance:
                low = factors[pair - 1] if pair else 1.0
                high = factors[pair + 1] if pair + 1 < len(factors) else self._largest
                factors[pair] = draw.uniform(low, high)
        first, scale = candidate.first, candidate.attention_factor
        if draw.random() < self._settings.chance:
            first = draw.choice(FIRSTS)
        if draw.random() < self._settings.chance:
            scale = draw.choice(self._attention_factors)
        return self.clip(Candidate(factors=tuple(factors), first=first, attention_factor=scale))

    def cross(self, parents: Sequence[Candidate]) -> Candidate:
        """Return a candidate that has each number from one of two parents; a factor below the one before is raised."""
        parent, partner = self._random.sample(list(parents), 2)
        factors = [self._random.choice(pair) for pair in zip(parent.factors, partner.factors, strict=True)]
        first = self._random.choice((parent.first, partner.first))
        scale = self._random.choice((parent.attention_factor, partner.attention_factor))
        return self.clip(Candidate(factors=tuple(factors), first=first, attention_factor=scale))

    def mutation_of_one(self, parents: Sequence[Candidate]) -> Candidate:
        """Return a mutated copy of one of ``parents``."""
        return self.mutate(self._random.choice(list(parents)))


def evolve(
    starts: Sequence[Candidate],
    factor: float,
    settings: Evolution,
    measure: Callable[[Candidate], float],
    on_stage: Progress = silent,
) -> tuple[Candidate, float]:
    """Return the fittest candidate and its measure, which is smaller the fitter it is.

    The draws depend on the seed and on what was measured alone: a search that is begun anew with kept measures goes the
    same way.

    Args:
        starts: candidates to begin with; the rest of the first generation are mutations of them.
        factor: by which the context grows.
        settings: the settings.
        measure: of a candidate.
        on_stage: called for each candidate.
    """
    breeder = Breeder(settings, factor, sorted({1.0, *(start.attention_factor for start in starts)}))
    losses: dict[Candidate, float] = {}

    def add(draw: Callable[[], Candidate], stage: str) -> None:
        """Measure a candidate that was not measured yet, if drawing finds one."""
        for _ in range(_TRIES):
            candidate = draw()
            if candidate not in losses:
                best = f", best {min(losses.values()):.4f} nats" if losses else ""
                on_stage(stage + best, len(losses), settings.candidates)
                losses[candidate] = measure(candidate)
                return

    clipped_starts = [breeder.clip(start) for start in starts]
    for start in clipped_starts:
        add(lambda start=start: start, "first generation")  # type: ignore[misc]
    while len(losses) < settings.population:
        count_before = len(losses)
        add(lambda: breeder.mutation_of_one(clipped_starts), "first generation")
        if len(losses) == count_before:  # nothing new can be drawn
            break
    for generation in range(settings.generations):
        parents = sorted(losses, key=lambda candidate: losses[candidate])[: settings.parents]
        stage = f"generation {generation + 1} of {settings.generations}"
        for _ in range(settings.mutations):
            add(lambda: breeder.mutation_of_one(parents), stage)  # noqa: B023 (called at once)
        for _ in range(settings.crossovers):
            add(lambda: breeder.cross(parents), stage)  # noqa: B023
    best = min(losses, key=lambda candidate: losses[candidate])
    return best, losses[best]
