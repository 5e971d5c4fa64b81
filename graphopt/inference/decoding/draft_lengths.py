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

_TRUSTED = 4.0
"""Guesses that a first estimate counts for."""

_MEMORY = 200.0
"""Guesses that are remembered for a chance: texts change."""

_UNKNOWN = 0.6
"""Chance of a guess before anything is known of its proposer."""

_PACE = 0.02
"""How much one more guess counts in that chance."""

_RETRY = 64
"""Steps after which a proposer that did not pay is asked again."""

_PROBED = 256
"""Steps after which one guess is checked that did not seem to pay: costs may have been measured in a bad moment."""

_TRIED = 3
"""Guesses that it is asked for then."""

_CREDIT = 10
"""Steps whose time drafts may lose of what they have gained before."""

_WORTH = 1.02
"""How much better than a single token a draft must look."""


@dataclass
class Chances:
    """How often guesses were right."""

    _right: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _all: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _of_source: dict[str, float] = field(default_factory=dict)

    def of(self, guess: Guess, place: int) -> float:
        """Return the chance of a guess at a place of a draft, once those before it were right."""
        key = _key(guess, place)
        count = self._all.get(key, 0.0)
        return (self._right.get(key, 0.0) + _TRUSTED * guess.chance) / (count + _TRUSTED)

    @property
    def best(self) -> float | None:
        """The share of guesses that were right lately, of the source that is right most; ``None`` before the first."""
        return max(self._of_source.values(), default=None)

    def learn(self, draft: Sequence[Guess], right: int, wrong: bool) -> None:
        """Take in what became of a draft."""
        for place, guess in enumerate(draft[: right + wrong]):
            key = _key(guess, place)
            count = self._all.get(key, 0.0)
            fade = 1.0 if count < _MEMORY else 1 - 1 / _MEMORY
            self._all[key] = fade * count + 1
            self._right[key] = fade * self._right.get(key, 0.0) + (place < right)
            share = self._of_source.get(guess.source, _UNKNOWN)
            self._of_source[guess.source] = share + _PACE * ((place < right) - share)


class Lengths:
    """The policy of one proposer.

    Attributes:
        lost: seconds that drafts have cost beyond what their tokens cost singly; negative where they have gained.
    """

    def __init__(self) -> None:
        self.chances = Chances()
        self.lost = 0.0
        self._plain = 0.0  # seconds that all tokens so far would have taken singly
        self._guess = 0.0  # seconds of the proposer for a guess
        self._since = 0  # steps since a draft was asked for
        self._unseen = 0  # drafts since one was checked

    def overdrawn(self, costs: Costs) -> bool:
        """Return whether drafts have cost too much so far."""
        return self.lost > SHARE * self._plain + costs.of(LONGEST + 1)

    def to_ask(self, costs: Costs, live: int) -> int:
        """Return how long a draft to ask the proposer for, by how it did so far; 0 to leave it alone."""
        self._since += 1
        if self.overdrawn(costs):
            return 0
        if self._guess * LONGEST < SHARE * costs.of(1):
            return LONGEST
        known = self.chances.best
        chance = _UNKNOWN if known is None else known
        best, most = 0, _WORTH * live / costs.of(1)
        reached, tokens = 1.0, 1.0
        for length in range(1, LONGEST + 1):
            reached *= chance
            tokens += reached
            worth = live * tokens / (costs.of(1 + length) + live * length * self._guess)
            if worth > most:
                best, most = length, worth
        return max(best, _TRIED) if self._since >= _RETRY else best

    def to_check(self, drafts: Sequence[Sequence[Guess]], texts: Sequence[int], costs: Costs) -> int:
        """Return how many guesses of each draft to check, at most.

        Args:
            drafts: of each row.
            texts: tokens of each row that are fed before its draft; 0 for a row that has ended.
            costs: of steps.
        """
        live = sum(1 for count in texts if count)
        best, most = 0, _WORTH * live / costs.of(max(texts))
        expected = float(live)
        reached = [1.0] * len(drafts)
        for length in range(1, max(map(len, drafts)) + 1):
            columns = 0
            for row, draft in enumerate(drafts):
                if len(draft) >= length:
                    reached[row] *= self.chances.of(draft[length - 1], length - 1)
                    expected += reached[row]
                columns = max(columns, texts[row] + min(length, len(draft)))
            worth = expected / costs.of(columns)
            if worth > most:
                best, most = length, worth
        self._unseen = 0 if best else self._unseen + 1
        if self._unseen < _PROBED:
            return best
        self._unseen = 0
        return 1

    def drafted(self, seconds: float | None, guesses: int) -> None:
        """Take in the time of the proposer, for so many guesses; ``None`` where it says nothing about others."""
        self._since = 0
        if seconds is None:
            return
        each = seconds / max(1, guesses)
        self._guess = each if self._guess == 0 else 0.8 * self._guess + 0.2 * each

    def spent(self, seconds: float, tokens: float, costs: Costs) -> None:
        """Take in what drafts added to a step.

        Args:
            seconds: of the proposer, and of the step if it checked a draft.
            tokens: that the step gave beside those of a single step, by row; all of them if it checked a draft.
            costs: of steps.
        """
        single = costs.of(1)
        self._plain += max(1.0, tokens) * single
        if seconds or tokens:
            self.lost = max(self.lost + seconds - tokens * single, -_CREDIT * single)


def _key(guess: Guess, place: int) -> tuple[str, int, int]:
    """Matches of 1, 2, 3 and 4, up to 8, up to 16, more; places alike."""
    return guess.source, min(4, guess.match.bit_length()), min(4, place.bit_length())
