"""The progress of each row of a batch: its tokens so far, and its inputs for a step of new columns.

:class:`MaskedRows` serves graphs that see a mask over all columns ever fed, :class:`CountedRows` graphs with caches in
pages, which take two numbers per row.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from graphopt.errors import InputError
from graphopt.tasks.causal_lm.interface import Interface, new_lengths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.tasks.ports import Array, IntArray


class Step(NamedTuple):
    """New columns, ready to be run.

    Attributes:
        feeds: all inputs except caches, by name.
        past: tokens that each row has, int64 [batch].
        total: tokens that each row will have then, int64 [batch].
        end: the position behind the last of them, int64 [batch]: more than ``total`` where tokens were evicted.
    """

    feeds: Mapping[str, Array]
    past: IntArray
    total: IntArray
    end: IntArray


class Rows(Protocol):
    """The rows of a batch."""

    @property
    def columns(self) -> int:
        """Columns fed so far, padding included."""

    @property
    def tokens(self) -> IntArray:
        """Tokens that each row has, int64 [batch]."""

    def begin(self, input_ids: IntArray, mask: IntArray | None) -> Step:
        """Return the step of new columns, of which ``mask`` marks the tokens; all are tokens by default.

        Raises:
            InputError: the graph has no input for ``mask``.
        """

    def finish(self) -> None:
        """Count the columns of the last :meth:`begin`, which have been run."""

    def rewind(self, lengths: IntArray) -> Rows:
        """Return the rows with their first tokens only.

        Args:
            lengths: tokens of each row that stay, int64 [batch].

        Raises:
            InputError: a row has fewer, or rows cannot lose such tokens.
        """

    def fork(self, rows: Sequence[int]) -> Rows:
        """Return copies of some of the rows."""

    def at_length(self, tokens: IntArray, columns: int) -> Rows:
        """Return rows that have so many tokens, int64 [batch], and columns; without padding where these are as many."""


class MaskedRows:
    """Rows with a mask over all columns, 1 for a token and 0 for padding."""

    def __init__(self, interface: Interface, batch: int) -> None:
        self._interface = interface
        self._mask: IntArray = np.zeros((batch, 0), np.int64)
        self._next = self._mask

    @property
    def columns(self) -> int:
        """See :class:`Rows`."""
        return int(self._mask.shape[1])

    @property
    def tokens(self) -> IntArray:
        """See :class:`Rows`."""
        tokens: IntArray = self._mask.sum(axis=1)
        return tokens

    def rewind(self, lengths: IntArray) -> MaskedRows:
        """See :class:`Rows`.

        Raises:
            InputError: a row has fewer; or rows would end at different columns, or in the middle of padding.
        """
        tokens = self.tokens
        _check_lengths(tokens, lengths)
        dropped_tokens = tokens - lengths
        first = self.columns - int(dropped_tokens.max(initial=0))
        if (dropped_tokens != dropped_tokens[0]).any() or not self._mask[:, first:].all():
            raise InputError(
                "rows of a cache that grows can only be rewound by the same columns, which hold tokens of all rows",
                remedy="rewind all rows by the same number of tokens, or add the step page_kv to the recipe",
            )
        return self._with_mask(self._mask[:, :first])

    def fork(self, rows: Sequence[int]) -> MaskedRows:
        """See :class:`Rows`."""
        return self._with_mask(self._mask[list(rows)])

    def at_length(self, tokens: IntArray, columns: int) -> MaskedRows:
        """See :class:`Rows`."""
        return self._with_mask((np.arange(columns) >= columns - tokens[:, None]).astype(np.int64))

    def _with_mask(self, mask: IntArray) -> MaskedRows:
        rows = copy.copy(self)
        rows._mask = mask
        return rows

    def begin(self, input_ids: IntArray, mask: IntArray | None) -> Step:
        """See :class:`Rows`."""
        self._next = np.concatenate((self._mask, np.ones_like(input_ids) if mask is None else mask), axis=1)
        # Later, a 0 marks columns after the end of a row. They are never read, so a graph without a mask may ignore it.
        feeds = self._interface.feeds(input_ids, self._next, {}, needs_mask=self.columns == 0)
        total = self._next.sum(axis=1)
        return Step(feeds, self._mask.sum(axis=1), total, total)

    def finish(self) -> None:
        """See :class:`Rows`."""
        self._mask = self._next


class CountedRows:
    """Rows with a number of tokens each; padding is not counted.

    Args:
        interface: names of the graph's inputs.
        tokens: tokens that each row has, int64 [batch].
        columns: columns fed so far.
    """

    def __init__(self, interface: Interface, tokens: IntArray, columns: int = 0) -> None:
        self._interface, self._has_positions = interface, "position_ids" in interface.inputs
        self._tokens = tokens
        self._next, self._columns, self._new_columns = tokens, columns, 0
        self._evicted_tokens = np.zeros_like(tokens)  # of each row
        self._least_tokens = self._evicted_tokens  # the tokens that each row had after that

    @property
    def columns(self) -> int:
        """See :class:`Rows`."""
        return self._columns

    @property
    def tokens(self) -> IntArray:
        """See :class:`Rows`."""
        return self._tokens

    def begin(self, input_ids: IntArray, mask: IntArray | None) -> Step:
        """See :class:`Rows`."""
        batch, length = input_ids.shape
        new = np.full(batch, length, np.int64) if mask is None else new_lengths(mask)
        feeds: dict[str, Array] = {"past_length": self.tokens, "new_length": new}
        if not self._interface.reads_embeddings:
            feeds["input_ids"] = input_ids
        self._next, self._new_columns = self.tokens + new, length
        if self._has_positions:
            positions = (self._next - length)[:, None] + np.arange(length)
            text_positions = np.maximum(positions, 0) + self._evicted_tokens[:, None]
            feeds["position_ids"] = self._interface.position_ids(text_positions)
        return Step(feeds, self.tokens, self._next, self._next + self._evicted_tokens)

    def finish(self) -> None:
        """See :class:`Rows`."""
        self._tokens, self._columns = self._next, self._columns + self._new_columns

    def rewind(self, lengths: IntArray) -> CountedRows:
        """See :class:`Rows`."""
        _check_lengths(self._tokens, lengths)
        if (lengths < self._least_tokens).any():
            raise InputError(
                "tokens were evicted, so rows cannot go back to before that",
                remedy=f"keep {self._least_tokens.tolist()} tokens or more, or feed the text again",
            )
        return self.at_length(lengths, self._columns)

    def fork(self, rows: Sequence[int]) -> CountedRows:
        """See :class:`Rows`."""
        copied_rows = self.at_length(self._tokens[list(rows)], self._columns)
        copied_rows._evicted_tokens, copied_rows._least_tokens = (
            self._evicted_tokens[list(rows)],
            self._least_tokens[list(rows)],
        )
        return copied_rows

    def at_length(self, tokens: IntArray, columns: int) -> CountedRows:
        """See :class:`Rows`."""
        rows = CountedRows(self._interface, tokens, columns)
        if len(tokens) == len(self._evicted_tokens):
            rows._evicted_tokens, rows._least_tokens = self._evicted_tokens, self._least_tokens
        return rows

    @property
    def evicted_tokens(self) -> IntArray:
        """Tokens of each row that were evicted, int64 [batch]."""
        return self._evicted_tokens

    def evict(self, lengths: IntArray) -> CountedRows:
        """Return the rows with ``lengths`` tokens, int64 [batch]; the positions of those to come stay."""
        rows = self.at_length(lengths, self._columns)
        rows._evicted_tokens, rows._least_tokens = self._evicted_tokens + self._tokens - lengths, lengths
        return rows


def _check_lengths(tokens: IntArray, lengths: IntArray) -> None:
    for row, (count, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= length <= count:
            raise InputError(
                f"row {row} has {count} tokens and cannot be rewound to {length}",
                remedy=f"give a number from 0 to {count}",
            )
