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

_COUNT_DEPTH = 64
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
        state = self._append(text, token)
        link, count, suffix = self.link, self.count, state
        for _ in range(_COUNT_DEPTH):
            if suffix <= ROOT:
                break
            count[suffix] += 1
            suffix = link[suffix]
        return state

    def extend_all(self, text: int, tokens: Sequence[int]) -> int:
        """Add tokens behind a text, as :meth:`extend` does one by one."""
        for token in tokens:
            text = self.extend(text, token)
        return text

    def walk(self, state: int, run: int, token: int) -> tuple[int, int]:
        """Go on from a run that occurred to the longest end of it, with ``token`` behind, that occurred.

        Args:
            state: of the run.
            run: its tokens.
            token: what follows.

        Returns:
            The state of that end, and its tokens: 0 where the token itself is new.
        """
        while state > ROOT and token not in self.following[state]:
            state = self.link[state]
            run = self.length[state]
        successor = self.following[state].get(token)
        return (ROOT, 0) if successor is None else (successor, run + 1)

    def _append(self, text: int, token: int) -> int:
        following, link, length = self.following, self.link, self.length
        successor = following[text].get(token)
        if successor is not None:  # another text has gone this way
            return successor if length[successor] == length[text] + 1 else self._split(text, token, successor)
        new, suffix = self._new({}, length[text] + 1), text
        while suffix >= ROOT and token not in following[suffix]:
            following[suffix][token] = new
            suffix = link[suffix]
        if suffix < ROOT:
            link[new] = ROOT
        else:
            successor = following[suffix][token]
            is_next = length[successor] == length[suffix] + 1
            link[new] = successor if is_next else self._split(suffix, token, successor)
        return new

    def _new(self, following: dict[int, int], length: int) -> int:
        self.following.append(following)
        self.link.append(ROOT)
        self.length.append(length)
        self.count.append(0)
        return len(self.length) - 1

    def _split(self, state: int, token: int, successor: int) -> int:
        """Give the runs that reach ``successor`` from ``state`` a state of their own."""
        following, link = self.following, self.link
        clone = self._new(dict(following[successor]), self.length[state] + 1)
        link[clone], link[successor] = link[successor], clone
        self.count[clone] = self.count[successor]
        while state >= ROOT and following[state].get(token) == successor:
            following[state][token] = clone
            state = link[state]
        return clone
