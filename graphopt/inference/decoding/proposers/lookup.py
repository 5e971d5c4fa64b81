"""Drafts looked up in the prompt and the text so far: what followed where the last tokens occurred before.

    text:   ... a b c d e f ... a b c | d e f     found by the longest matches, continued by the most frequent tokens

The rule is SuffixDecoding's (Oliaro et al., 2024, arXiv:2411.04975, section 3): for each end of the text that occurred
before, go on with the token that followed most often; the chance of a guess is the share of its count, times that of
the guess before; the draft whose chances sum up to the most wins. Its length is bounded by that of the match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.inference.decoding.proposer import Guess, Proposer
from graphopt.inference.decoding.proposers.automaton import ROOT, SuffixAutomaton

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation

_STRETCH = 2
"""Guesses for each token of the match, at most."""

_MATCHES = 6
"""Ends of the text that are tried, the longest first."""

_WIDEST = 64
"""Different tokens behind a run, at most: a run that almost anything follows says nothing."""


class Lookup(Proposer):
    """Proposes from the texts themselves; costs microseconds.

    Args:
        share: whether rows and later batches look into each other's texts, whose memory grows then. By default each row
            knows only its own.
    """

    name = "lookup"
    usage = "lookup"
    summary = "what followed where the last tokens of the text occurred before"

    def __init__(self, *, share: bool = False) -> None:
        self._share, self._common_text = share, SuffixAutomaton()
        self._texts: list[SuffixAutomaton] = []
        self._ends: list[int] = []
        self._unread: list[list[int]] = []  # tokens of each row since a draft was last asked for

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Proposer`; texts are read when a draft is asked for, as that takes microseconds a token."""
        if self._share:
            for row in range(len(self._unread)):
                self._catch_up(row)
        self._texts = [self._common_text if self._share else SuffixAutomaton() for _ in rows]
        self._ends = [ROOT] * len(rows)
        self._unread = [[*row.prompt, *row.tokens] for row in rows]

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Proposer`."""
        for row, limit in enumerate(limits):
            if limit > 0 or self._share:
                self._catch_up(row)
        return [self._draft(row, prefixes[row], limit) if limit > 0 else [] for row, limit in enumerate(limits)]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Proposer`."""
        self._unread[row] += tokens

    def _catch_up(self, row: int) -> None:
        self._ends[row] = self._texts[row].extend_all(self._ends[row], self._unread[row])
        self._unread[row] = []

    def _draft(self, row: int, prefix: Sequence[int], limit: int) -> list[Guess]:
        text, end = self._texts[row], self._ends[row]
        # Where the whole text occurred only here, its link is the longest end of it that occurred before.
        state = end if text.count[end] > 1 or end == ROOT else text.link[end]
        match = text.length[max(state, ROOT)]
        for token in prefix:
            state, match = text.walk(state, match, token)
        best: list[Guess] = []
        best_score = 0.0
        for _ in range(_MATCHES):
            if state <= ROOT or best_score >= min(limit, _STRETCH * match):  # no shorter match can have more
                break
            draft = _follow(text, state, match, min(limit, _STRETCH * match), at_end=not prefix)
            score, chance = 0.0, 1.0
            for guess in draft:
                chance *= guess.chance
                score += chance
            if score > best_score:
                best, best_score = draft, score
            state = text.link[state]
            match = text.length[max(state, ROOT)]
        return best


def _follow(text: SuffixAutomaton, state: int, match: int, limit: int, *, at_end: bool) -> list[Guess]:
    """Return the most frequent tokens behind a run, one behind the other; of equal counts the newest."""
    draft: list[Guess] = []
    counts = text.count
    before = counts[state] - at_end  # the run at the end of the text has nothing behind it yet
    while len(draft) < limit:
        following = text.following[state]
        if not following or len(following) > _WIDEST:
            break
        token, successor = max(reversed(following.items()), key=lambda item: counts[item[1]])
        draft.append(Guess(token, min(1.0, counts[successor] / max(before, 1)), Lookup.name, match))
        state, before = successor, counts[successor]
    return draft
