"""What decoding, drafts and serving see of states, whatever they are inside: a step, and abilities.

    a step     reserve -> bind -> the run -> advance
    rewind     forget the newest tokens of a row; to roll back is to forget those of the last step without a trace
    fork       rows that continue copies of rows
    save       arrays that a store of the same layout continues from
    evict      tokens in the middle of a row go, and their memory

A kind of states is a store:

    keys and values that grow           onnxruntime allocates them anew; they rewind by columns, all rows alike
    keys and values in pages, in rings  written in place; they rewind page by page, fork and save the pages in use

    recurrent states                    have a fixed size, and do not know the tokens that they were made of: a step is
                                        taken back by the states before it, and the tokens that stay are fed once more;
                                        they rewind to 0 and to checkpoints

A model with several kinds has a store that asks one of each, :mod:`graphopt.inference.states.hybrid`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnxruntime

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.inference.states.eviction import Eviction
    from graphopt.tasks.ports import IntArray

Array = npt.NDArray[Any]
Ability = Literal["fork", "save", "split", "evict", "edit"]

_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Mark:
    """States before a step.

    Attributes:
        tokens: of each row, int64 [batch].
        checkpoint: what cannot be computed again from the states after the step; only the store reads it.
    """

    tokens: IntArray
    checkpoint: Sequence[Any] = ()


@dataclass(frozen=True)
class SavedStates:
    """States outside of a store.

    Attributes:
        arrays: by graph input.
        progress: what else a store needs to continue from them, as JSON.
        layers: whose states lie in pages.
    """

    arrays: Mapping[str, Array]
    progress: str
    layers: tuple[PagedLayer, ...] = ()


class StateStore(ABC):
    """The states of a batch of sequences: where they live between steps.

    A kind of states implements a step and :meth:`rewind`. The others are abilities, which it names: ``fork``, ``save``
    (with :meth:`restore` and :attr:`layout`), ``split`` for :meth:`row`, ``evict``, and ``edit`` for :meth:`move`.

    Attributes:
        batch: number of sequences.
        abilities: what the store offers besides a step and :meth:`rewind`.
    """

    batch: int
    abilities: frozenset[Ability] = frozenset()

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory that the states take."""

    @abstractmethod
    def reserve(self, past: IntArray, total: IntArray, new_tokens: int) -> None:
        """Make room for a step.

        Args:
            past: tokens that each row has, int64 [batch].
            total: tokens that each row has after the step, int64 [batch].
            new_tokens: columns of the step.

        Raises:
            InputError: there is not enough memory; nothing has changed.
        """

    @abstractmethod
    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """Bind the states of a step: inputs, and behind the logits outputs in their order."""

    @abstractmethod
    def advance(self, binding: onnxruntime.IOBinding) -> None:
        """Adopt the states that the step just run on ``binding`` has written."""

    @abstractmethod
    def rewind(self, tokens: IntArray, lengths: IntArray) -> None:
        """Forget the newest tokens of each row.

        Args:
            tokens: of each row, int64 [batch].
            lengths: how many of them stay, int64 [batch].

        Raises:
            InputError: what a row would read again is gone; nothing has changed.
        """

    def keep(self, tokens: IntArray) -> None:  # noqa: B027, most states need not do anything
        """Let :meth:`rewind` come back to where rows have so many tokens, int64 [batch]; most states always can."""

    def nearest(self, tokens: IntArray, lengths: IntArray) -> IntArray:
        """Return the most tokens up to ``lengths`` that :meth:`rewind` can leave to each row, int64 [batch]."""
        return np.minimum(tokens, lengths)

    def room_for_drafts(self, tokens: IntArray) -> IntArray:
        """Return how many tokens behind the next one of each row :meth:`roll_back` can take back, int64 [batch]."""
        return np.full(len(tokens), _NO_LIMIT, np.int64)

    def mark(self, tokens: IntArray) -> Mark:
        """Return what :meth:`roll_back` needs, before a step of rows that have so many tokens, int64 [batch]."""
        return Mark(tokens)

    def roll_back(self, mark: Mark, tokens: IntArray, lengths: IntArray) -> IntArray:  # noqa: ARG002, others need it
        """Take tokens of the last step back, as if they had never been fed.

        Args:
            mark: of that step.
            tokens: of each row, int64 [batch].
            lengths: how many of them stay, int64 [batch], of those that :meth:`room_for_drafts` allowed.

        Returns:
            Tokens that each row has now, int64 [batch]: a row that cannot keep just so many to the bit is where it was
            at the mark.
        """
        self.rewind(tokens, lengths)
        return lengths

    def fork(self, rows: Sequence[int]) -> StateStore:
        """Return a store that begins as a copy of these rows, each of which may be named any number of times.

        Raises:
            InputError: there is no memory for it.
        """
        raise NotImplementedError

    def row(self, row: int) -> StateStore:
        """Return the store of one row, in the same memory, which has room for all that is to come and may not grow."""
        raise NotImplementedError

    @property
    def layout(self) -> str:
        """Kinds, sizes and policies of the states, as JSON: what the saved states of another store must have too."""
        raise NotImplementedError

    def save(self, tokens: IntArray) -> SavedStates:
        """Return the states of rows that have so many tokens, int64 [batch], without copies where possible."""
        raise NotImplementedError

    def evict(self, tokens: IntArray, eviction: Eviction) -> IntArray:
        """Drop tokens, and give their memory back.

        Args:
            tokens: of each row, int64 [batch].
            eviction: which of them stay.

        Returns:
            The tokens that each row has now, int64 [batch].

        Raises:
            InputError: the states know their tokens by their places.
        """
        raise NotImplementedError

    def move(
        self,
        source: StateStore,
        source_tokens: int,
        first: int,
        end: int,
        tokens: int,
        turns: Sequence[npt.NDArray[np.float32] | None],
    ) -> None:
        """Append tokens of another store, of one row as this one, and turn their keys to where they stand then.

        Args:
            source: a store of the same kind and layout.
            source_tokens: that it has.
            first: its first token to append.
            end: behind the last one.
            tokens: that this store has.
            turns: for each layer, what keys are multiplied by, [KV heads, head size, head size]; ``None`` for nothing.

        Raises:
            InputError: there is no memory for them.
        """
        raise NotImplementedError

    def restore(self, states: SavedStates) -> None:
        """Continue from saved states of the same batch.

        Raises:
            InputError: a state is missing or of another shape or type, or there is no memory for it.
        """
        raise NotImplementedError
