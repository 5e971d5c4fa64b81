"""A head that drafts: one layer that reads a token and the hidden state before it, and says which token follows it.

Ports are those of :class:`graphopt.tasks.causal_lm.interface.Interface`, with ``previous_hidden_state`` float [batch,
length, width] beside ``input_ids``: the ``last_hidden_state`` by which the model chose each of these tokens, or that of
the head itself, which it gives too. It lies in the folder ``mtp`` of the model that it drafts for.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphopt.analysis.structure.ports import ATTENTION_MASK, INPUT_IDS, LOGITS, POSITION_IDS, PREVIOUS_HIDDEN
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.tasks.base import SAMPLE_BATCH, SAMPLE_LENGTH
from graphopt.tasks.causal_lm import CausalLM
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.causal_lm.probe import CausalProbe

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import onnx_ir as ir

    from graphopt.tasks.base import Call
    from graphopt.tasks.ports import Array, IntArray

NOT_ALONE = Rule("mtp_head.not-alone", "a head drafts for the model beside it, and makes no text of its own")


@dataclass(frozen=True)
class HeadProbe(CausalProbe):
    """Random tokens, each with a random hidden state.

    Attributes:
        hidden: float [batch, length, width].
    """

    hidden: Array = dataclasses.field(default_factory=lambda: np.zeros((0, 0, 0)))

    @property
    def feeds(self) -> dict[str, Array]:
        """See :class:`CausalProbe`."""
        return {**super().feeds, PREVIOUS_HIDDEN: self.hidden}

    def other_feeds(self, rows: slice, columns: slice) -> dict[str, Array]:
        """See :class:`CausalProbe`."""
        return {PREVIOUS_HIDDEN: np.ascontiguousarray(self.hidden[rows, columns])}


class MtpHead(CausalLM):
    """See the module for the ports."""

    name: ClassVar[str] = "mtp_head"
    noun: ClassVar[str] = "a head that drafts"
    follows: ClassVar[bool] = True
    unrolls: ClassVar[bool] = False

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        return PREVIOUS_HIDDEN in inputs and LOGITS in outputs

    def probe(self, graph: ir.Graph, *, context: int = 0) -> HeadProbe:
        """Draw a probe with random hidden states of a size as norms leave them."""
        interface = Interface.of_graph(graph)
        probe = CausalProbe.draw(interface, context=context)
        return HeadProbe(**vars(probe), hidden=_draw(interface, probe.input_ids.shape))

    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """See :class:`graphopt.tasks.base.Task`; hidden states are random unless the model gives them."""
        feeds = super().text_feeds(graph, input_ids)
        return {**feeds, PREVIOUS_HIDDEN: _draw(Interface.of_graph(graph), input_ids.shape)}

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """See :class:`graphopt.tasks.base.Task`."""
        interface, sizes = Interface.of_graph(graph), list(sizes)
        for call, (batch, length, _) in zip(super().calls(graph, sizes), sizes, strict=True):
            yield dataclasses.replace(call, feeds={**call.feeds, PREVIOUS_HIDDEN: _draw(interface, (batch, length))})

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take none: a head is a part of a checkpoint, and has no configuration of its own."""
        del config, transformers
        return False

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return the head behind a past, and inputs for it."""
        del source
        torch = importlib.import_module("torch")
        sample = self.sample(model)
        with torch.no_grad():
            caches = model(**sample).past_key_values
        ids, mask = sample[INPUT_IDS], sample[ATTENTION_MASK]
        past = ids.shape[1]
        feeds = {
            **sample,
            ATTENTION_MASK: torch.cat([mask, torch.ones_like(mask)], dim=1),
            POSITION_IDS: sample[POSITION_IDS] + past,
            "past_key_values": caches,
        }
        return model, feeds

    def sample(self, model: Any) -> dict[str, Any]:
        """Return two texts with the hidden states before their tokens."""
        torch = importlib.import_module("torch")
        ids = torch.arange(SAMPLE_BATCH * SAMPLE_LENGTH).reshape(SAMPLE_BATCH, SAMPLE_LENGTH) % model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        return {
            INPUT_IDS: ids,
            PREVIOUS_HIDDEN: torch.randn(*ids.shape, model.config.hidden_size, generator=generator),
            ATTENTION_MASK: torch.ones_like(ids),
            POSITION_IDS: torch.arange(SAMPLE_LENGTH).expand(SAMPLE_BATCH, -1).contiguous(),
        }

    def why_no_genai(self) -> Fact | None:
        """See :class:`graphopt.tasks.base.Task`."""
        return NOT_ALONE()


def _draw(interface: Interface, shape: tuple[int, ...]) -> Array:
    """Return random hidden states for tokens of a shape."""
    port = interface.inputs[PREVIOUS_HIDDEN]
    if not port.shape or port.shape[-1] is None:
        raise InputError("the graph does not say how wide a hidden state is", tensor=PREVIOUS_HIDDEN)
    numbers = np.random.default_rng(1).standard_normal((*shape, port.shape[-1]))
    return numbers.astype(port.dtype or np.float32)


MTP_HEAD = MtpHead()
