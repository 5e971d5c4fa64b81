"""How long the next draft should be: from what steps cost, and from how often such guesses were right; 0 included.

    tokens of a step      live rows + sum over guesses of the chance that it and all before it are right
    worth                 tokens / seconds, largest over all lengths

Chances are learned by source, length of the match and position in the draft; they begin with the proposer's estimate.
An account holds what drafts have cost beyond single tokens. While it is overdrawn nothing is drafted, so that drafts
never cost more than a small share of the time, however wrong they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphopt.inference.decoding.step_costs import LONGEST, Costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.proposer import Guess

SHARE = 0.01
"""Of the time of plain decoding, that drafts may lose."""

_PRIOR_WEIGHT = 4.0
"""Guesses that a first estimate counts for."""

_MEMORY = 200.0
"""Guesses that are remembered for a chance: texts change."""

_UNKNOWN = 0.6
"""Chance of a guess before anything is known of its proposer."""

_PACE = 0.02
"""How much one more guess counts in that chance."""

_RETRY = 64
"""Steps after which a proposer that did not pay is asked again."""

_PROBE_INTERVAL = 256
"""Steps after which one guess is checked that did not seem to pay: costs may have been measured in a bad moment."""

_RETRY_LENGTH = 3
"""Guesses that it is asked for then."""

_CREDIT = 10
"""Steps whose time drafts may lose of what they have gained before."""

_WORTH = 1.02
"""How much better than a single token a draft must look."""


@dataclass
class Chances:
    """How often guesses were right."""

    _right: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _totals: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _of_source: dict[str, float] = field(default_factory=dict)

    def estimate(self, guess: Guess, position: int) -> float:
        """Return the chance of a guess at a place of a draft, once those before it were right."""
        key = _key(guess, position)
        count = self._totals.get(key, 0.0)
        return (self._right.get(key, 0.0) + _PRIOR_WEIGHT * guess.chance) / (count + _PRIOR_WEIGHT)

    @property
    def best(self) -> float | None:
        """The share of guesses that were right lately, of the source that is right most; ``None`` before the first."""
        return max(self._of_source.values(), default=None)

    def learn(self, draft: Sequence[Guess], right: int, wrong: bool) -> None:
        """Take in what became of a draft."""
        for position, guess in enumerate(draft[: right + wrong]):
            key = _key(guess, position)
            count = self._totals.get(key, 0.0)
            fade = 1.0 if count < _MEMORY else 1 - 1 / _MEMORY
            self._totals[key] = fade * count + 1
            self._right[key] = fade * self._right.get(key, 0.0) + (position < right)
            share = self._of_source.get(guess.source, _UNKNOWN)
            self._of_source[guess.source] = share + _PACE * ((position < right) - share)


class Lengths:
    """The policy of one proposer.

    Attributes:
        loss: seconds that drafts have cost beyond what their tokens cost singly; negative where they have gained.
    """

    def __init__(self) -> None:
        self.chances = Chances()
        self.loss = 0.0
        self._plain = 0.0  # seconds that all tokens so far would have taken singly
        self._guess = 0.0  # seconds of the proposer for a guess
        self._since = 0  # steps since a draft was asked for
        self._unseen = 0  # drafts since one was checked

    def overdrawn(self, costs: Costs) -> bool:
        """Return whether drafts have cost too much so far."""
        return self.loss > SHARE * self._plain + costs.seconds_of(LONGEST + 1)

    def to_ask(self, costs: Costs, live: int) -> int:
        """Return how long a draft to ask the proposer for, by how it did so far; 0 to leave it alone."""
        self._since += 1
        if self.overdrawn(costs):
            return 0
        if self._guess * LONGEST < SHARE * costs.seconds_of(1):
            return LONGEST
        share = self.chances.best
        chance = _UNKNOWN if share is None else share
        best, best_worth = 0, _WORTH * live / costs.seconds_of(1)
        probability, tokens = 1.0, 1.0
        for length in range(1, LONGEST + 1):
            probability *= chance
            tokens += probability
            worth = live * tokens / (costs.seconds_of(1 + length) + live * length * self._guess)
            if worth > best_worth:
                best, best_worth = length, worth
        return max(best, _RETRY_LENGTH) if self._since >= _RETRY else best

    def to_check(self, drafts: Sequence[Sequence[Guess]], texts: Sequence[int], costs: Costs) -> int:
        """Return how many guesses of each draft to check, at most.

        Args:
            drafts: of each row.
            texts: tokens of each row that are fed before its draft; 0 for a row that has ended.
            costs: of steps.
        """
        live = sum(1 for count in texts if count)
        best, best_worth = 0, _WORTH * live / costs.seconds_of(max(texts))
        tokens = float(live)
        probabilities = [1.0] * len(drafts)
        for length in range(1, max(map(len, drafts)) + 1):
            columns = 0
            for row, draft in enumerate(drafts):
                if len(draft) >= length:
                    probabilities[row] *= self.chances.estimate(draft[length - 1], length - 1)
                    tokens += probabilities[row]
                columns = max(columns, texts[row] + min(length, len(draft)))
            worth = tokens / costs.seconds_of(columns)
            if worth > best_worth:
                best, best_worth = length, worth
        self._unseen = 0 if best else self._unseen + 1
        if self._unseen < _PROBE_INTERVAL:
            return best
        self._unseen = 0
        return 1

    def record_proposal(self, seconds: float | None, guesses: int) -> None:
        """Take in the time of the proposer, for so many guesses; ``None`` where it says nothing about others."""
        self._since = 0
        if seconds is None:
            return
        per_guess = seconds / max(1, guesses)
        self._guess = per_guess if self._guess == 0 else 0.8 * self._guess + 0.2 * per_guess

    def record_step(self, seconds: float, tokens: float, costs: Costs) -> None:
        """Take in what drafts added to a step.

        Args:
            seconds: of the proposer, and of the step if it checked a draft.
            tokens: that the step gave beside those of a single step, by row; all of them if it checked a draft.
            costs: of steps.
        """
        single = costs.seconds_of(1)
        self._plain += max(1.0, tokens) * single
        if seconds or tokens:
            self.loss = max(self.loss + seconds - tokens * single, -_CREDIT * single)


def _key(guess: Guess, position: int) -> tuple[str, int, int]:
    """Matches of 1, 2, 3 and 4, up to 8, up to 16, more; places alike."""
    return guess.source, min(4, guess.match.bit_length()), min(4, position.bit_length())
