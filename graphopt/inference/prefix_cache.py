"""Prompts that begin alike: what the model read for one of them is not read again for the next.

    first    prompt -> model -> text          the states stay, with checkpoints where they are recurrent
    next     the longest beginning that it shares with an earlier one -> a copy, taken back to there -> the rest is fed

What is shared is decided by tokens. A text comes out as without the cache, up to the rounding of steps of another
length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.prompt_cache import go_back, shared_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.session import Session

_BYTES = 1 << 30


class PrefixCache:
    """The states behind the prompts that were run with it, the latest first.

    Args:
        session: the model.
        bytes: memory that they may take; the oldest go first. The latest stays in any case.

    Attributes:
        fed_tokens: of the prompts of the last call, how many tokens were left to feed, padding included.
    """

    def __init__(self, session: Session, *, bytes: int = _BYTES) -> None:
        self.session, self._bytes = session, bytes
        self._entries: list[tuple[list[int], Decoder]] = []
        self.fed_tokens = 0

    @property
    def bytes(self) -> int:
        """Memory that the states take."""
        return sum(decoder.states.bytes for _, decoder in self._entries)

    def fork(self, prompts: Sequence[Sequence[int]]) -> tuple[Decoder, int]:
        """Return a decoder with a row for each prompt, and how many tokens of each its row has read.

        Args:
            prompts: the tokens of whole prompts. The last token of each is left to be fed: its logits choose the next.
        """
        longest = max(map(len, prompts))
        for length, entry in self._candidates(prompts):
            decoder = self._entries[entry][1].fork([0] * len(prompts))
            prefix = go_back(decoder, length)
            if prefix:
                self._entries.insert(0, self._entries.pop(entry))
                self.fed_tokens = longest - prefix
                return decoder, prefix
        self.fed_tokens = longest
        return Decoder(self.session, len(prompts), room=longest), 0

    def _candidates(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Return how many tokens all prompts share with entries, and the entries; those of the most first."""
        candidates = [
            (min(shared_length(tokens, prompt[:-1]) for prompt in prompts), index)
            for index, (tokens, decoder) in enumerate(self._entries)
            if "fork" in decoder.states.abilities
        ]
        nearest = [(self._entries[index][1].nearest(length), length, index) for length, index in candidates]
        return [(length, index) for start, length, index in sorted(nearest, reverse=True) if start]

    def add(self, tokens: Sequence[int], decoder: Decoder) -> None:
        """Take the states of one row, which nobody steps any more.

        Args:
            tokens: of its text; the states hold the first of them.
            decoder: of the row.
        """
        tokens_read = list(tokens[: int(decoder.tokens[0])])
        # What is a beginning of the new text is of no more use.
        self._entries = [
            entry
            for entry in self._entries
            if shared_length(entry[0], tokens_read) < min(len(entry[0]), len(tokens_read))
        ]
        self._entries.insert(0, (tokens_read, decoder))
        while len(self._entries) > 1 and self.bytes > self._bytes:
            self._entries.pop()
