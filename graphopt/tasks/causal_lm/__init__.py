"""Causal language models: tokens in, logits of the next token out, with caches of keys and values or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from graphopt.analysis.structure.ports import ATTENTION_MASK, LOGITS
from graphopt.tasks.base import Call, Task, TaskName, random_padding
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.causal_lm.probe import CausalProbe

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import onnx_ir as ir

    from graphopt.tasks.ports import Array, IntArray


class CausalLM(Task):
    """See :class:`graphopt.tasks.causal_lm.interface.Interface` for the ports."""

    name: ClassVar[TaskName] = "causal_lm"
    compared: ClassVar[str] = "logits"
    output: ClassVar[str] = LOGITS
    caches: ClassVar[bool] = True

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`Task`."""
        return LOGITS in outputs

    def check(self, graph: ir.Graph) -> None:
        """See :class:`Task`."""
        Interface.of_graph(graph)

    def probe(self, graph: ir.Graph, *, context: int = 0) -> CausalProbe:
        """See :class:`Task`."""
        return CausalProbe.of(Interface.of_graph(graph), context=context)

    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """See :class:`Task`."""
        interface, (batch, length) = Interface.of_graph(graph), input_ids.shape
        return interface.feeds(input_ids, np.ones_like(input_ids), interface.empty_past(batch, length))

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """See :class:`Task`."""
        interface, random = Interface.of_graph(graph), np.random.default_rng(0)
        for batch, length, past in sizes:
            mask = np.ones((batch, past + length), np.int64)
            if ATTENTION_MASK in interface.inputs:
                mask = random_padding(batch, past + length, random)
            thin = {name: np.zeros((batch, 1, past, 1), interface.inputs[name].dtype) for name in interface.past}
            feeds = interface.feeds(random.integers(0, 2, (batch, length)), mask, thin, padded=False)
            yield Call(feeds, length, past, mask.astype(bool))
