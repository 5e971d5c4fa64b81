"""Drafts looked up in the prompt and the text so far: what followed where the last tokens occurred before.

    text:   ... a b c d e f ... a b c | d e f     found by the longest matches, continued by the most frequent tokens

The rule is SuffixDecoding's (Oliaro et al., 2024, arXiv:2411.04975, section 3): for each end of the text that occurred
before, go on with the token that followed most often; the chance of a guess is the share of its count, times that of
the guess before; the draft whose chances sum up to the most wins. Its length is bounded by that of the match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.inference.decoding.drafts.automaton import ROOT, SuffixAutomaton
from graphopt.inference.decoding.drafts.drafter import Guess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation

SOURCE = "lookup"

_STRETCH = 2
"""Guesses for each token of the match, at most."""

_MATCHES = 6
"""Ends of the text that are tried, the longest first."""

_WIDEST = 64
"""Different tokens behind a run, at most: a run that almost anything follows says nothing."""


class Lookup:
    """Guesses from the texts themselves; costs microseconds.

    Args:
        share: whether rows and later batches look into each other's texts, whose memory grows then. By default each row
            knows only its own.
    """

    def __init__(self, *, share: bool = False) -> None:
        self._share, self._shared = share, SuffixAutomaton()
        self._texts: list[SuffixAutomaton] = []
        self._ends: list[int] = []
        self._unread: list[list[int]] = []  # tokens of each row since a draft was last asked for

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Drafter`; texts are read when a draft is asked for, as that takes microseconds a token."""
        if self._share:
            for row in range(len(self._unread)):
                self._read(row)
        self._texts = [self._shared if self._share else SuffixAutomaton() for _ in rows]
        self._ends = [ROOT] * len(rows)
        self._unread = [[*row.prompt, *row.tokens] for row in rows]

    def propose(self, begun: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Drafter`."""
        for row, limit in enumerate(limits):
            if limit > 0 or self._share:
                self._read(row)
        return [self._draft(row, begun[row], limit) if limit > 0 else [] for row, limit in enumerate(limits)]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Drafter`."""
        self._unread[row] += tokens

    def _read(self, row: int) -> None:
        self._ends[row] = self._texts[row].extend_all(self._ends[row], self._unread[row])
        self._unread[row] = []

    def _draft(self, row: int, begun: Sequence[int], limit: int) -> list[Guess]:
        texts, end = self._texts[row], self._ends[row]
        # Where the whole text occurred only here, its link is the longest end of it that occurred before.
        state = end if texts.count[end] > 1 or end == ROOT else texts.link[end]
        matched = texts.length[max(state, ROOT)]
        for token in begun:
            state, matched = texts.walk(state, matched, token)
        best: list[Guess] = []
        most = 0.0
        for _ in range(_MATCHES):
            if state <= ROOT or most >= min(limit, _STRETCH * matched):  # no shorter match can have more
                break
            draft = _followed(texts, state, matched, min(limit, _STRETCH * matched), at_end=not begun)
            score, chance = 0.0, 1.0
            for guess in draft:
                chance *= guess.chance
                score += chance
            if score > most:
                best, most = draft, score
            state = texts.link[state]
            matched = texts.length[max(state, ROOT)]
        return best


def _followed(texts: SuffixAutomaton, state: int, matched: int, limit: int, *, at_end: bool) -> list[Guess]:
    """Return the most frequent tokens behind a run, one behind the other; of equal counts the newest."""
    draft: list[Guess] = []
    count = texts.count
    before = count[state] - at_end  # the run at the end of the text has nothing behind it yet
    while len(draft) < limit:
        following = texts.following[state]
        if not following or len(following) > _WIDEST:
            break
        token, behind = max(reversed(following.items()), key=lambda item: count[item[1]])
        draft.append(Guess(token, min(1.0, count[behind] / max(before, 1)), SOURCE, matched))
        state, before = behind, count[behind]
    return draft
