"""A causal language model on random tokens: a batch with padding, a prefill, then a second call on the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import ATTENTION_MASK, INPUT_IDS, LOGITS, POSITION_IDS
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.ort.session import run
from graphopt.tasks.base import BATCH, LENGTH, PADDING, PREFILL, Floats
from graphopt.tasks.causal_lm.interface import Interface

if TYPE_CHECKING:
    import onnxruntime

    from graphopt.tasks.ports import Array, IntArray

TOKENS = Rule("causal_lm.tokens", "{batch} x {length} random tokens{behind} with padding, in two calls")
BEHIND_CONTEXT = Rule("causal_lm.behind-context", " behind {tokens} of context")

# Columns of context that are fed at once: their logits are made and thrown away.
_PIECE = 64


@dataclass(frozen=True)
class CausalProbe:
    """Random tokens [batch, length] and their mask; the first row begins with padding where the graph has a mask.

    Attributes:
        input_ids: the tokens.
        attention_mask: 1 for a token, 0 for padding.
        context: columns that only fill the cache; what the model says about them is not compared.
        positions: whether the graph takes ``position_ids``.
    """

    input_ids: IntArray
    attention_mask: IntArray
    context: int = 0
    positions: bool = False

    @classmethod
    def draw(cls, interface: Interface, seed: int = 0, context: int = 0) -> CausalProbe:
        """Draw a probe that fits ``interface``; without a cache there is no context."""
        context = context if interface.past else 0
        ids = np.random.default_rng(seed).integers(0, interface.vocabulary or 2, (BATCH, context + LENGTH))
        mask = np.ones(ids.shape, np.int64)
        if interface.takes_padding:
            mask[0, :PADDING] = 0
        return cls(ids, mask, context, POSITION_IDS in interface.inputs)

    @property
    def tokens(self) -> Fact:
        """See :class:`graphopt.tasks.base.Probe`."""
        return TOKENS(
            batch=BATCH, length=self.length, behind=BEHIND_CONTEXT(tokens=self.context) if self.context else None
        )

    @property
    def feeds(self) -> dict[str, Array]:
        """See :class:`graphopt.tasks.base.Probe`."""
        feeds: dict[str, Array] = {INPUT_IDS: self.input_ids, ATTENTION_MASK: self.attention_mask}
        if self.positions:
            feeds[POSITION_IDS] = np.maximum(self.attention_mask.cumsum(-1) - 1, 0)
        return feeds

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """See :class:`graphopt.tasks.base.Probe`."""
        return self.attention_mask.astype(bool)

    @property
    def length(self) -> int:
        """Columns behind the context, which are compared: :data:`graphopt.tasks.base.LENGTH` of a random text."""
        return int(self.input_ids.shape[1]) - self.context

    @property
    def comparison_mask(self) -> npt.NDArray[np.bool_]:
        """[batch, :attr:`length`]: which of the columns behind the context are tokens."""
        return self.real[:, self.context :]

    @property
    def calls(self) -> list[tuple[int, int, bool]]:
        """First column and the one behind the last of each call, and whether its logits are compared."""
        begins = range(0, self.context, _PIECE)
        filling = [(begin, min(begin + _PIECE, self.context), False) for begin in begins]
        end = self.context + self.length
        middle = end - (LENGTH - PREFILL)
        return [*filling, (self.context, middle, True), (middle, end, True)]

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return the logits of real tokens, [tokens, vocabulary]: of a prefill, then of the rest on its cache.

        A graph that makes logits of the last positions only gives those of two tokens a row, unless they are all.
        """
        interface = Interface.of_session(session)
        # What cannot have padding may take several new tokens onto a cache in one row only (GroupQueryAttention).
        rows = [slice(None)] if interface.pads else [slice(row, row + 1) for row in range(BATCH)]
        logits = np.concatenate([self._run_rows(session, interface, part) for part in rows])
        token_logits: npt.NDArray[Any] = logits[self.comparison_mask] if logits.shape[1] == self.length else logits
        return token_logits.reshape(-1, logits.shape[-1]).astype(np.float64)

    def other_feeds(self, rows: slice, columns: slice) -> dict[str, Array]:
        """Return what else a call is fed, for some rows and columns of new tokens: nothing."""
        del rows, columns
        return {}

    def _run_rows(self, session: onnxruntime.InferenceSession, interface: Interface, rows: slice) -> npt.NDArray[Any]:
        """Return the logits [batch, columns, vocabulary] of some rows."""
        ids, mask = self.input_ids[rows], self.attention_mask[rows]
        past, outputs = interface.empty_past(len(ids), ids.shape[1]), []
        for start, end, is_compared in self.calls:
            feeds = interface.feeds(ids[:, start:end], mask[:, :end], past) | self.other_feeds(rows, slice(start, end))
            logits, *present = run(session, [LOGITS, *interface.present], feeds)
            past = dict(zip(interface.past, present, strict=True))
            if is_compared:
                logits = logits[:, None] if interface.has_shared_pool else logits
                count = interface.last_logits
                outputs.append(logits if count is None or count >= self.length else logits[:, -1:])
        return np.concatenate(outputs, axis=1)

    def matching_rows(self, before: Floats, after: Floats) -> Floats:
        """Return ``before``, or of it the tokens that end a call, where ``after`` has no others."""
        if len(after) >= len(before):
            return before
        ends = np.zeros(self.comparison_mask.shape, bool)
        ends[:, [PREFILL - LENGTH - 1, -1]] = True
        last_rows: Floats = before[ends[self.comparison_mask]]
        return last_rows

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return the divergence from ``first``, and how often the likeliest token is the same."""
        return {
            "divergence_from_start_nats": _divergence(first, after),
            "same_first_choice_share": float((first.argmax(-1) == after.argmax(-1)).mean()),
        }


def _divergence(before: Floats, after: Floats) -> float:
    """Return the mean Kullback-Leibler divergence per token, in nats."""
    p, q = (x - x.max(-1, keepdims=True) for x in (before, after))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())
