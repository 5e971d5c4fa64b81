"""Where keys and values live between steps, and the simplest such place: what onnxruntime allocates at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from graphopt.ort.session import array_of, import_onnxruntime, ort_value

if TYPE_CHECKING:
    import onnxruntime

    from graphopt.tasks.causal_lm.interface import Interface
    from graphopt.tasks.ports import IntArray
    from graphopt.util.targets import Device


class Cache(Protocol):
    """Where the keys and values of a batch of sequences live between steps."""

    def reserve(self, stored: IntArray, tokens: IntArray, new_tokens: int) -> None:
        """Make room for a step.

        Args:
            stored: tokens that each row has stored, int64 [batch].
            tokens: tokens that each row has after the step, int64 [batch].
            new_tokens: columns of the step.

        Raises:
            InputError: there is not enough memory.
        """

    def bind(self, binding: onnxruntime.IOBinding, new_tokens: int) -> None:
        """Bind the caches of a step of ``new_tokens`` tokens: inputs, and behind the logits outputs in their order."""

    def advance(self, binding: onnxruntime.IOBinding) -> None:
        """Adopt the states that the step just run on ``binding`` has written."""


class GrowingCache:
    """A cache that onnxruntime allocates anew at each step, longer by the tokens of that step.

    It works with every graph. Each step copies the past once, inside the graph, as the graph's ``Concat`` says.

    Args:
        interface: names and shapes of the graph's caches.
        batch: number of sequences.
        device: where they are.

    Raises:
        InputError: the graph does not state the number of KV heads or the head size.
    """

    def __init__(self, interface: Interface, batch: int, *, device: Device = "cpu") -> None:
        ort = import_onnxruntime()
        self._device = device
        self._present = dict(zip(interface.past, interface.present, strict=True))
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(empty) for name, empty in interface.empty_past(batch).items()
        }

    def reserve(self, stored: IntArray, tokens: IntArray, new_tokens: int) -> None:
        """See :class:`Cache`: onnxruntime allocates the memory."""

    def bind(self, binding: onnxruntime.IOBinding, new_tokens: int) -> None:
        """See :class:`Cache`."""
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_output(self._present[name], self._device)

    def advance(self, binding: onnxruntime.IOBinding) -> None:
        """See :class:`Cache`."""
        outputs = binding.get_outputs()
        caches = outputs[len(outputs) - len(self._present) :]  # logits stand before them, and the hidden state if any
        self._values = dict(zip(self._present, caches, strict=True))

    def rewind(self, columns: int) -> None:
        """Keep the first columns only; what stays is copied."""
        for name, value in self._values.items():
            self._values[name] = ort_value(np.ascontiguousarray(array_of(value)[:, :, :columns]))
