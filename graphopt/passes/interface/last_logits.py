"""Only the last positions of a call reach the lm_head: of a prompt's logits, its next token needs no others."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import Field

from graphopt.analysis.structure.products import LAST_POSITIONS
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import shared_constant
from graphopt.passes.base import Pass
from graphopt.passes.common.lm_head_path import nodes_of_product, path_to_lm_head

if TYPE_CHECKING:
    from graphopt.passes.context import Context

LAST_POSITION = Rule("last_logits.last-position", "only the last position of {tensor} reaches {lm_head}")
LAST_SOME = Rule("last_logits.last-positions", "only the last {count} positions of {tensor} reach {lm_head}")
NO_LOGITS = Rule("last_logits.no-logits", "the graph has no output of this name")


class LastLogits(Pass):
    """Compute logits for the last positions of each call only.

    before::

        logits = MatMul(x, W)                                       [batch, length, vocabulary]

    after::

        logits = MatMul(Slice(x, -1; axis 1), W)                    [batch, 1, vocabulary]
        logits = MatMul(Slice(x, -positions; axis 1), W)            [batch, last_positions, vocabulary]

    Each row of a product depends on its own row of x alone, so the last one is what it was. Text is generated from it
    and no other: batches are padded on the left. A prefill of n tokens then spends one n-th on its lm_head, and its
    logits take one n-th of the memory. A step that checks drafts needs the logits of each, so of more positions; a call
    of fewer tokens has logits of all. What scores given tokens needs the others, and cannot use such a model.

    Attributes:
        positions: how many of the last positions of a call; 12 let a step check drafts of 11 tokens.
    """

    name: ClassVar[str] = "last_logits"
    effect: ClassVar[Effect] = "exact"

    positions: Annotated[int, Field(ge=1, le=1 << 16)] = 1

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Cut the input of the lm_head; say why it cannot be where it cannot."""
        ledger = context.ledger
        graph = model.graph
        logits = next((value for value in graph.outputs if value.name == "logits"), None)
        if logits is None:
            ledger.skipped("logits", NO_LOGITS())
            return
        path = path_to_lm_head(graph, logits)
        if isinstance(path, Fact):
            ledger.skipped("logits", path)
            return
        lm_head = path[-1]
        parts = nodes_of_product(lm_head)
        x = parts[-1].inputs[0]
        assert x is not None and x.shape is not None
        count = self.positions
        starts = shared_constant(
            graph, "last_position" if count == 1 else "last_positions", np.array([-count], np.int64)
        )
        ends = shared_constant(graph, "behind_last_position", np.array([np.iinfo(np.int64).max], np.int64))
        axes = shared_constant(graph, "position_axis", np.array([1], np.int64))
        cut = ir.node("Slice", [x, starts, ends, axes], name=f"{lm_head.name}.last_position")
        last_rows = cut.outputs[0]
        last_rows.name, last_rows.type, last_rows.shape = f"{cut.name}.output", x.type, _cut(x.shape, count)
        graph.insert_before(parts[-1], cut)
        parts[-1].replace_input_with(0, last_rows)
        for node in (*path, *parts[1:]):
            output = node.outputs[0]
            assert output.shape is not None
            output.shape = _cut(output.shape, count)
        rule = LAST_POSITION if count == 1 else functools.partial(LAST_SOME, count=count)
        ledger.changed(cut, rule(tensor=x.name, lm_head=lm_head.name), [lm_head])


def _cut(shape: ir.Shape, positions: int) -> ir.Shape:
    return ir.Shape([shape[0], 1 if positions == 1 else LAST_POSITIONS.format(positions), shape[2]])
