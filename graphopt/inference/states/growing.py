"""States that onnxruntime allocates anew at each step: keys and values that grow, and recurrent states.

    keys and values   longer by the tokens of each step: they rewind by columns, all rows alike
    recurrent states  of fixed size, made of all tokens so far: they go back to 0 tokens, or to a checkpoint

What a step has read is not written again, so that a checkpoint is a reference and costs no copy.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.inference.states.store import Mark, SavedStates, StateStore
from graphopt.ort.session import array_of, import_onnxruntime, ort_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import onnxruntime

    from graphopt.tasks.causal_lm.interface import Interface
    from graphopt.tasks.ports import IntArray
    from graphopt.util.targets import Device

_Values = dict[str, Any]  # an OrtValue by the name of an input

_CHECKPOINTS = 16
"""Checkpoints that are kept, at most."""

_CHECKPOINT_BYTES = 1 << 28
"""Memory that they take, at most, where there are more than :data:`_MIN_CHECKPOINTS`."""

_MIN_CHECKPOINTS = 4


class _StepStates(StateStore):
    """States that a graph reads and gives back as new tensors.

    Args:
        interface: names and shapes of the graph's states.
        names: the inputs whose states these are.
        batch: number of sequences.
        device: where they are.
        later_outputs: how many outputs are bound behind those of these states.

    Raises:
        InputError: the graph does not state the sizes of a state.
    """

    abilities = frozenset(("fork", "save"))

    def __init__(
        self,
        interface: Interface,
        names: Iterable[str],
        batch: int,
        *,
        device: Device = "cpu",
        later_outputs: int = 0,
    ) -> None:
        ort = import_onnxruntime()
        self.batch, self._device, self._interface, self._later_outputs = batch, device, interface, later_outputs
        present = dict(zip(interface.past, interface.present, strict=True))
        self._present = {name: present[name] for name in names}
        empty = interface.empty_past(batch)
        self._values: _Values = {name: ort.OrtValue.ortvalue_from_numpy(empty[name]) for name in self._present}

    @property
    def bytes(self) -> int:
        """See :class:`StateStore`."""
        return sum(value.tensor_size_in_bytes() for value in self._values.values())

    def reserve(self, past: IntArray, total: IntArray, new_tokens: int) -> None:
        """See :class:`StateStore`: onnxruntime allocates the memory."""

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """See :class:`StateStore`."""
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_output(self._present[name], self._device)

    def advance(self, binding: onnxruntime.IOBinding) -> None:
        """See :class:`StateStore`."""
        outputs = binding.get_outputs()
        end = len(outputs) - self._later_outputs  # logits stand before them, and the hidden state if any
        self._values = dict(zip(self._present, outputs[end - len(self._present) : end], strict=True))

    def fork(self, rows: Sequence[int]) -> StateStore:
        """See :class:`StateStore`."""
        store = self._open(len(rows))
        store._values = _rows_of(self._values, rows)
        return store

    @property
    def layout(self) -> str:
        """See :class:`StateStore`."""
        ports = (self._interface.inputs[name] for name in self._present)
        return json.dumps([[port.name, str(port.dtype), port.shape] for port in ports])

    def save(self, tokens: IntArray) -> SavedStates:  # noqa: ARG002, others need it
        """See :class:`StateStore`."""
        return SavedStates(self._arrays(), "")

    def restore(self, states: SavedStates) -> None:
        """See :class:`StateStore`."""
        arrays = {name: states.arrays.get(name) for name in self._present}
        for name, array in arrays.items():
            port = self._interface.inputs[name]
            sizes = (self.batch, *port.shape[1:])
            is_same = array is not None and array.dtype == port.dtype and array.ndim == len(sizes)
            if array is None or not is_same or any(s not in (None, n) for s, n in zip(sizes, array.shape, strict=True)):
                raise InputError(
                    "a state of the cache is missing or of another kind",
                    tensor=name,
                    shape=None if array is None else array.shape,
                    remedy=f"it is {port.dtype} {list(sizes)} for this model and batch",
                )
        self._values = {name: ort_value(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: array_of(value) for name, value in self._values.items()}

    @abstractmethod
    def _open(self, batch: int) -> _StepStates:
        """Return a store of the same states for another number of sequences."""


class GrowingStates(_StepStates):
    """Keys and values that become longer by the tokens of each step.

    Each step copies the past once, inside the graph, as the graph's ``Concat`` says.

    Args:
        interface: names and shapes of the graph's states.
        batch: number of sequences.
        device: where they are.
        later_outputs: how many outputs are bound behind those of these states.

    Raises:
        InputError: the graph does not state the number of KV heads or the head size.
    """

    def __init__(self, interface: Interface, batch: int, *, device: Device = "cpu", later_outputs: int = 0) -> None:
        names = (name for name in interface.past if name not in interface.recurrent)
        super().__init__(interface, names, batch, device=device, later_outputs=later_outputs)

    def rewind(self, tokens: IntArray, lengths: IntArray) -> None:
        """See :class:`StateStore`: every row loses as many columns as the first; what stays is copied."""
        dropped_columns = int(tokens[0] - lengths[0])
        for name, value in self._values.items() if dropped_columns else ():
            array = array_of(value)
            self._values[name] = ort_value(np.ascontiguousarray(array[:, :, : array.shape[2] - dropped_columns]))

    def _open(self, batch: int) -> GrowingStates:
        return GrowingStates(self._interface, batch, device=self._device, later_outputs=self._later_outputs)


class RecurrentStates(_StepStates):
    """States of fixed size, made of all tokens so far: tails of convolutions, and what recurrences hold.

    They cannot forget their newest tokens. A step that is taken back puts back the states that it began with, and the
    tokens that stay are fed once more.

    Args:
        interface: names and shapes of the graph's states.
        batch: number of sequences.
        device: where they are.

    Raises:
        InputError: the graph does not state the sizes of a state.
    """

    def __init__(self, interface: Interface, batch: int, *, device: Device = "cpu") -> None:
        super().__init__(interface, interface.recurrent, batch, device=device)
        self._checkpoints: list[tuple[IntArray, _Values]] = []

    @property
    def bytes(self) -> int:
        """See :class:`StateStore`; checkpoints are part of it, where they are not the states themselves."""
        states = {id(values): values for values in (self._values, *(values for _, values in self._checkpoints))}
        return sum(value.tensor_size_in_bytes() for values in states.values() for value in values.values())

    def keep(self, tokens: IntArray) -> None:
        """See :class:`StateStore`. Where there are too many, those that stay lie as far apart as they can."""
        if self._checkpoints and (self._checkpoints[-1][0] == tokens).all():
            return
        self._checkpoints.append((tokens.copy(), self._values))
        size = max(1, sum(value.tensor_size_in_bytes() for value in self._values.values()))
        while len(self._checkpoints) > max(_MIN_CHECKPOINTS, min(_CHECKPOINTS, _CHECKPOINT_BYTES // size)):
            lengths = [int(count.max()) for count, _ in self._checkpoints]
            gaps = [after - before for before, after in zip([0, *lengths], lengths[1:], strict=False)]
            del self._checkpoints[gaps.index(min(gaps))]

    def rewind(self, tokens: IntArray, lengths: IntArray) -> None:
        """See :class:`StateStore`: each row to 0 tokens, or to a length at which :meth:`keep` was called."""
        sources = [self._source(row, int(tokens[row]), int(lengths[row])) for row in range(self.batch)]
        self._take_rows(sources)
        self._checkpoints = [entry for entry in self._checkpoints if (entry[0] <= lengths).all()]

    def nearest(self, tokens: IntArray, lengths: IntArray) -> IntArray:
        """See :class:`StateStore`."""
        candidates = [np.zeros_like(tokens), tokens, *(count for count, _ in self._checkpoints)]
        nearest: IntArray = np.max([np.where(count <= lengths, count, 0) for count in candidates], axis=0)
        return nearest

    def mark(self, tokens: IntArray) -> Mark:
        """See :class:`StateStore`."""
        return Mark(tokens, [self._values])

    def fork(self, rows: Sequence[int]) -> RecurrentStates:
        """See :class:`StateStore`; checkpoints go along. States are not written again, so a single row shares them."""
        store, indices = self._open(len(rows)), list(rows)
        is_same = indices == list(range(self.batch))
        store._values = self._values if is_same else _rows_of(self._values, indices)
        store._checkpoints = [
            (tokens[indices], values if is_same else _rows_of(values, indices)) for tokens, values in self._checkpoints
        ]
        return store

    def roll_back(self, mark: Mark, tokens: IntArray, lengths: IntArray) -> IntArray:
        """See :class:`StateStore`."""
        goes_back, (before,) = lengths < tokens, mark.checkpoint
        self._take_rows([before if is_back else self._values for is_back in goes_back])
        return np.where(goes_back, mark.tokens, lengths)

    def _source(self, row: int, count: int, length: int) -> _Values | None:
        """Return the states that a row of ``count`` tokens had when it had ``length``; ``None`` for zeros."""
        if length in (0, count):
            return self._values if length else None
        for tokens, values in reversed(self._checkpoints):
            if tokens[row] == length:
                return values
        lengths = sorted({0, *(int(tokens[row]) for tokens, _ in self._checkpoints)})
        raise InputError(
            f"row {row} cannot be rewound from {count} to {length} tokens: a recurrent state does not know the tokens "
            "that it was made of",
            remedy=f"rewind to {' or '.join(map(str, lengths))}, or feed the text again",
        )

    def _take_rows(self, sources: Sequence[_Values | None]) -> None:
        """Let each row continue from its row in one of these states, or from zeros."""
        first = sources[0]
        if first is not None and all(source is first for source in sources):
            self._values = dict(first)
            return
        arrays = {name: np.zeros_like(array) for name, array in self._arrays().items()}
        for row, source in enumerate(sources):
            for name, value in (source or {}).items():
                arrays[name][row] = array_of(value)[row]
        self._values = {name: ort_value(array) for name, array in arrays.items()}

    def _open(self, batch: int) -> RecurrentStates:
        return RecurrentStates(self._interface, batch, device=self._device)


def _rows_of(values: _Values, rows: Sequence[int]) -> _Values:
    return {name: ort_value(np.ascontiguousarray(array_of(value)[list(rows)])) for name, value in values.items()}
