"""States of several kinds in one model: a store of each, asked in turn.

A hybrid has keys and values in some layers and recurrent states in others. What one store cannot take back, none does:
a row of a draft that was refused goes back to where the recurrent states were.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from graphopt.inference.states.store import Mark, SavedStates, StateStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnxruntime

    from graphopt.tasks.ports import IntArray


class HybridStates(StateStore):
    """The states of a model that has several kinds.

    Args:
        stores: one for each kind. Those whose outputs are new at each step stand behind the others, and those that go
            back the furthest stand last.
    """

    def __init__(self, stores: Sequence[StateStore]) -> None:
        self.batch, self._stores = stores[0].batch, tuple(stores)
        abilities = frozenset.intersection(*(store.abilities for store in stores))
        self.abilities = abilities - {"split"}

    @property
    def bytes(self) -> int:
        """See :class:`StateStore`."""
        return sum(store.bytes for store in self._stores)

    def reserve(self, past: IntArray, total: IntArray, new_tokens: int) -> None:
        """See :class:`StateStore`."""
        for store in self._stores:
            store.reserve(past, total, new_tokens)

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """See :class:`StateStore`."""
        for store in self._stores:
            store.bind(binding)

    def advance(self, binding: onnxruntime.IOBinding) -> None:
        """See :class:`StateStore`."""
        for store in self._stores:
            store.advance(binding)

    def keep(self, tokens: IntArray) -> None:
        """See :class:`StateStore`."""
        for store in self._stores:
            store.keep(tokens)

    def rewind(self, tokens: IntArray, lengths: IntArray) -> None:
        """See :class:`StateStore`; the last store is asked first, as it refuses most."""
        for store in reversed(self._stores):
            store.rewind(tokens, lengths)

    def nearest(self, tokens: IntArray, lengths: IntArray) -> IntArray:
        """See :class:`StateStore`."""
        for store in reversed(self._stores):
            lengths = store.nearest(tokens, lengths)
        return lengths

    def room_for_drafts(self, tokens: IntArray) -> IntArray:
        """See :class:`StateStore`."""
        room: IntArray = np.minimum.reduce([store.room_for_drafts(tokens) for store in self._stores])
        return room

    def mark(self, tokens: IntArray) -> Mark:
        """See :class:`StateStore`."""
        return Mark(tokens, [store.mark(tokens) for store in self._stores])

    def roll_back(self, mark: Mark, tokens: IntArray, lengths: IntArray) -> IntArray:
        """See :class:`StateStore`."""
        for store, before in zip(reversed(self._stores), reversed(mark.checkpoint), strict=True):
            lengths = store.roll_back(before, tokens, lengths)
        return lengths

    def fork(self, rows: Sequence[int]) -> HybridStates:
        """See :class:`StateStore`."""
        return HybridStates([store.fork(rows) for store in self._stores])

    @property
    def layout(self) -> str:
        """See :class:`StateStore`."""
        return json.dumps([store.layout for store in self._stores])

    def save(self, tokens: IntArray) -> SavedStates:
        """See :class:`StateStore`."""
        parts = [store.save(tokens) for store in self._stores]
        arrays = {name: array for states in parts for name, array in states.arrays.items()}
        layers = tuple(layer for states in parts for layer in states.layers)
        return SavedStates(arrays, json.dumps([states.progress for states in parts]), layers)

    def restore(self, states: SavedStates) -> None:
        """See :class:`StateStore`."""
        for store, progress in zip(self._stores, json.loads(states.progress), strict=True):
            store.restore(SavedStates(states.arrays, progress))
