"""Keys and values that onnxruntime allocates anew at each step: states of every graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.inference.states.store import StateStore
from graphopt.ort.session import array_of, import_onnxruntime, ort_value

if TYPE_CHECKING:
    import onnxruntime

    from graphopt.tasks.causal_lm.interface import Interface
    from graphopt.tasks.ports import IntArray
    from graphopt.util.targets import Device


class GrowingStates(StateStore):
    """States that become longer by the tokens of each step.

    Each step copies the past once, inside the graph, as the graph's ``Concat`` says.

    Args:
        interface: names and shapes of the graph's states.
        batch: number of sequences.
        device: where they are.

    Raises:
        InputError: the graph does not state the number of KV heads or the head size.
    """

    def __init__(self, interface: Interface, batch: int, *, device: Device = "cpu") -> None:
        ort = import_onnxruntime()
        self.batch, self._device = batch, device
        self._present = dict(zip(interface.past, interface.present, strict=True))
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(empty) for name, empty in interface.empty_past(batch).items()
        }

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
        states = outputs[len(outputs) - len(self._present) :]  # logits stand before them, and the hidden state if any
        self._values = dict(zip(self._present, states, strict=True))

    def rewind(self, tokens: IntArray, lengths: IntArray) -> None:
        """See :class:`StateStore`: every row loses as many columns as the first; what stays is copied."""
        dropped_columns = int(tokens[0] - lengths[0])
        for name, value in self._values.items() if dropped_columns else ():
            array = array_of(value)
            self._values[name] = ort_value(np.ascontiguousarray(array[:, :, : array.shape[2] - dropped_columns]))
