"""A suffix automaton of texts that grow: which tokens followed each run of tokens, and how often.

The states are the classes of runs that end at the same places (Blumer et al., 1985); a text of n tokens has at most 2 n
of them. Several texts may share one automaton, each with a state of its own at which it goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = 0
"""The state of the empty run, where a text begins."""

_COUNTED = 64
"""States on the way to the root that a new token is counted in, the longest first. Only in a text that repeats a few
tokens all the time there are more; there, every count leads to the same guess."""


class SuffixAutomaton:
    """Runs of tokens.

    Attributes:
        following: for each state the state behind each token that followed it.
        link: the state of the longest shorter run at the end of a state's runs that also ended elsewhere.
        length: tokens of the longest run of a state.
        count: how often its runs occurred.
    """

    def __init__(self) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]

    def extend(self, text: int, token: int) -> int:
        """Add a token behind a text.

        Args:
            text: the state of the whole text, as the last call returned it, or :data:`ROOT`.
            token: the token.

        Returns:
            The new state of the text.
        """
        state = self._behind(text, token)
        link, count, at = self.link, self.count, state
        for _ in range(_COUNTED):
            if at <= ROOT:
                break
            count[at] += 1
            at = link[at]
        return state

    def extend_all(self, text: int, tokens: Sequence[int]) -> int:
        """Add tokens behind a text, as :meth:`extend` does one by one."""
        for token in tokens:
            text = self.extend(text, token)
        return text

    def walk(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Go on from a run that occurred to the longest end of it, with ``token`` behind, that occurred.

        Args:
            state: of the run.
            matched: tokens of the run.
            token: what follows.

        Returns:
            The state of that end, and its tokens: 0 where the token itself is new.
        """
        while state > ROOT and token not in self.following[state]:
            state = self.link[state]
            matched = self.length[state]
        behind = self.following[state].get(token)
        return (ROOT, 0) if behind is None else (behind, matched + 1)

    def _behind(self, text: int, token: int) -> int:
        following, link, length = self.following, self.link, self.length
        there = following[text].get(token)
        if there is not None:  # another text has gone this way
            return there if length[there] == length[text] + 1 else self._split(text, token, there)
        new, at = self._new({}, length[text] + 1), text
        while at >= ROOT and token not in following[at]:
            following[at][token] = new
            at = link[at]
        if at < ROOT:
            link[new] = ROOT
        else:
            there = following[at][token]
            link[new] = there if length[there] == length[at] + 1 else self._split(at, token, there)
        return new

    def _new(self, following: dict[int, int], length: int) -> int:
        self.following.append(following)
        self.link.append(ROOT)
        self.length.append(length)
        self.count.append(0)
        return len(self.length) - 1

    def _split(self, at: int, token: int, there: int) -> int:
        """Give the runs that reach ``there`` from ``at`` a state of their own."""
        following, link = self.following, self.link
        made = self._new(dict(following[there]), self.length[at] + 1)
        link[made], link[there] = link[there], made
        self.count[made] = self.count[there]
        while at >= ROOT and following[at].get(token) == there:
            following[at][token] = made
            at = link[at]
        return made
