"""Decoding step by step, with the KV cache kept in onnxruntime's memory.

    tokens --+
             v
    cache -> model -> logits of the new tokens
      ^        |
      +--------+  the cache of this step is the past of the next: bound, never copied to NumPy

:class:`Decoder` knows tokens, masks and positions; :class:`GrowingCache` knows only buffers. Another cache
(preallocated, in place, rewindable) takes its place by offering the methods of :class:`Cache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from graphopt.analysis.interface import IntArray, Interface
from graphopt.errors import InputError
from graphopt.runtime import import_onnxruntime
from graphopt.session import Session

if TYPE_CHECKING:
    import onnxruntime

Logits = npt.NDArray[np.floating]

_PIECE = 256
"""Tokens per row that are fed at once. On the shipped model pieces of 128 to 512 took 0.8 times as long as a whole
window of 1024: the operator ``Attention`` computes what a causal mask then hides, and pieces have less of that."""

_LOGITS_BYTES = 1 << 26
"""Of the logits of one piece, at most: a large vocabulary makes the pieces shorter."""


class Cache(Protocol):
    """Where the keys and values of a batch of sequences live between steps."""

    def bind(self, binding: onnxruntime.IOBinding, new_tokens: int) -> None:
        """Bind the caches of a step of ``new_tokens`` tokens: inputs, and outputs in the order of the interface."""

    def advance(self, outputs: Mapping[str, onnxruntime.OrtValue]) -> None:
        """Take over the outputs of the step that was just run, by output name."""


class GrowingCache:
    """A cache that onnxruntime allocates anew at each step, longer by the tokens of that step.

    It works with every graph. Each step copies the past once, inside the graph, as the graph's ``Concat`` says.

    Args:
        interface: names and shapes of the graph's caches.
        batch: number of sequences.

    Raises:
        InputError: the graph does not state the number of KV heads or the head size.
    """

    def __init__(self, interface: Interface, batch: int) -> None:
        ort = import_onnxruntime()
        self._present = dict(zip(interface.past, interface.present, strict=True))
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(empty) for name, empty in interface.empty_past(batch).items()
        }

    def bind(self, binding: onnxruntime.IOBinding, new_tokens: int) -> None:
        """See :class:`Cache`."""
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_output(self._present[name], "cpu")

    def advance(self, outputs: Mapping[str, onnxruntime.OrtValue]) -> None:
        """See :class:`Cache`."""
        self._values = {name: outputs[present] for name, present in self._present.items()}


class Decoder:
    """A batch of sequences that grow together, with their cache.

    Args:
        session: the model.
        batch: number of sequences.
        cache: where keys and values live; a :class:`GrowingCache` unless told.

    Raises:
        InputError: the graph does not state the number of KV heads or the head size.
    """

    def __init__(self, session: Session, batch: int, *, cache: Cache | None = None) -> None:
        self._session = session
        self._cache: Cache = GrowingCache(session.interface, batch) if cache is None else cache
        self._binding = session.inference.io_binding()
        self._mask: IntArray = np.zeros((batch, 0), np.int64)

    @property
    def length(self) -> int:
        """Tokens per row in the cache, padding included."""
        return int(self._mask.shape[1])

    def feed(self, input_ids: IntArray, mask: IntArray | None = None) -> Iterator[tuple[int, Logits]]:
        """Feed any number of new tokens piece by piece, so that memory holds the logits of one piece only.

        Args:
            input_ids: the new tokens, [batch, length].
            mask: as for :meth:`step`.

        Yields:
            Where in ``input_ids`` the piece begins, and its logits as from :meth:`step`: the last is always there.

        Raises:
            InputError: as :meth:`step`.
        """
        batch, length = input_ids.shape
        piece = length  # without a cache there is no second piece
        if self._session.interface.past:
            width = self._session.interface.vocabulary or 1 << 17
            fitting = max(1, _LOGITS_BYTES // (4 * width * batch))
            piece = _PIECE if self._session.interface.last_logits else min(_PIECE, fitting)
        for begin in range(0, length, piece):
            part = slice(begin, begin + piece)
            yield begin, self.step(input_ids[:, part], None if mask is None else mask[:, part])

    def step(self, input_ids: IntArray, mask: IntArray | None = None) -> Logits:
        """Feed new tokens and return their logits.

        Args:
            input_ids: the new tokens, [batch, length].
            mask: 1 for a token, 0 for padding before a prompt or after the end of a row, [batch, length]; all 1 unless
                told. A 0 takes no position, and no later token sees it.

        Returns:
            Logits [batch, length, vocabulary] in the graph's own float type, or [batch, 1, vocabulary], of the last
            position, where the graph makes no others. They lie in onnxruntime's memory, which is
            theirs for as long as the array lives: read what you need and let them go.

        Raises:
            InputError: a row runs past the model's positions, the graph has no cache to go on from or no mask to obey,
                or the run fails.
        """
        session, interface, first = self._session, self._session.interface, self.length == 0
        if not first and not interface.past:
            raise InputError(
                "the graph has no past_key_values inputs, so it cannot go on from where it was",
                file=session.file,
                remedy="export the model with a KV cache: `graphopt export`",
            )
        self._mask = np.concatenate((self._mask, np.ones_like(input_ids) if mask is None else mask), axis=1)
        session.check_length(int(self._mask.sum(axis=1).max()))
        # Later, a 0 stands after the end of a row. Nobody reads that row, so a graph without a mask may ignore it.
        feeds = interface.feeds(input_ids, self._mask, {}, padded=first)
        binding = self._binding
        binding.clear_binding_outputs()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("logits", "cpu")
        self._cache.bind(binding, input_ids.shape[1])
        try:
            session.inference.run_with_iobinding(binding)
        except Exception as error:
            raise session.failure(error) from error
        names = ("logits", *interface.present)
        outputs = dict(zip(names, binding.get_outputs(), strict=True))
        self._cache.advance(outputs)
        # The binding would hold this step's past until the next step binds another: let its memory go now.
        binding.clear_binding_inputs()
        logits: Logits = outputs["logits"].numpy()
        return logits
