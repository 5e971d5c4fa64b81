"""A model whose rotary frequencies are inputs, so that any of them can be tried in the next run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.analysis.structure.rotary import rotary_angles
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Skip
from graphopt.ort.session import run
from graphopt.passes.lift.rescale_rope.edits import multiply, turn_by
from graphopt.quality.evaluation import negative_log_likelihood
from graphopt.tasks.causal_lm.interface import Interface

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.compile.search.evolution import Candidate
    from graphopt.tasks.ports import Array, IntArray

_SCALE = "rope.attention_factor"


class Turnable:
    """A model that takes rotary factors, first tokens and attention factor with each run.

    Args:
        model: the graph, canonical; it is not changed.

    Attributes:
        model: the graph with these inputs.
        radians: the frequencies that it was trained with, [pairs].

    Raises:
        InputError: its rotary angles are not understood, or heads of several sizes turn.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model.clone()
        graph = self.model.graph
        self._interface = Interface.of_graph(graph)
        self._interface.check_tokens()
        rotary = rotary_angles(graph)
        if isinstance(rotary, Skip):
            raise InputError(f"there are no rotary factors to search: {rotary.reason}", node=rotary.where)
        pairs = sorted({len(angles.radians) for angles in rotary})
        if len(pairs) != 1:
            raise InputError(
                f"its heads turn {' and '.join(map(str, pairs))} pairs, and one set of factors fits one number",
                node=rotary[1].product.name,
            )
        self.radians = rotary[0].radians
        self._sets: list[tuple[ir.Value, ir.Value, npt.NDArray[np.float64]]] = []
        scale = ir.val(_SCALE, rotary[0].waves[0].outputs[0].dtype or ir.DataType.FLOAT, [])
        waves = dict.fromkeys(wave for angles in rotary for wave in angles.waves)
        for number, angles in enumerate(rotary):
            weight = angles.frequencies
            assert weight.const_value is not None
            frequencies = ir.val(
                f"rope.frequencies.{number}", weight.const_value.dtype, weight.const_value.shape.numpy()
            )
            first = ir.val(f"rope.first.{number}", angles.positions.dtype or ir.DataType.FLOAT, [])
            self._sets.append((frequencies, first, angles.radians))
            turn_by(graph, angles, frequencies, first)
            graph.inputs.extend([frequencies, first])
        for wave in waves:
            multiply(graph, wave, scale)
        graph.inputs.append(scale)
        self._scale = scale

    def feeds(self, candidate: Candidate) -> dict[str, Array]:
        """Return the inputs that a candidate means."""
        feeds: dict[str, Array] = {_SCALE: np.array(candidate.attention_factor, _numpy(self._scale))}
        for frequencies, first, radians in self._sets:
            assert frequencies.shape is not None
            scaled_radians = (radians / np.asarray(candidate.factors)).astype(_numpy(frequencies))
            feeds[frequencies.name or ""] = scaled_radians.reshape(frequencies.shape.numpy())
            feeds[first.name or ""] = np.array(candidate.first, _numpy(first))
        return feeds

    def nats(self, session: object, candidate: Candidate, texts: Sequence[IntArray], begin: int) -> float:
        """Return the mean nats of the tokens from ``begin`` on, of texts that are each fed as one sequence.

        Args:
            session: of :attr:`model`.
            candidate: how it turns.
            texts: tokens, with the one behind the last position.
            begin: the first position of which the next token counts.
        """
        candidate_feeds, token_nats = self.feeds(candidate), []
        for ids in texts:
            row = ids[None, :-1]
            plain: Mapping[str, Array] = self._interface.feeds(
                row, np.ones_like(row), self._interface.empty_past(1, row.shape[1])
            )
            logits = run(session, ["logits"], {**plain, **candidate_feeds})[0]
            token_nats.append(negative_log_likelihood(logits[0, begin:], ids[begin + 1 :]))
        return float(np.concatenate(token_nats).mean())


def _numpy(value: ir.Value) -> np.dtype[np.generic]:
    assert value.dtype is not None
    return value.dtype.numpy()
