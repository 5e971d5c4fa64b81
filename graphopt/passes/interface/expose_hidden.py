"""The last hidden state beside the logits: what heads read that guess further tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.lm_head import lm_head_of
from graphopt.analysis.structure.ports import HIDDEN, LOGITS
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.passes.base import Pass
from graphopt.passes.common.lm_head_path import nodes_of_product

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context

HIDDEN_OUTPUT = Rule("expose_hidden.exposed", "{tensor}, which {lm_head} reads, is the output {output}")
OUTPUT_ALREADY = Rule("expose_hidden.output-already", "{tensor}, which the lm_head reads, is an output already")
NAME_TAKEN = Rule("expose_hidden.name-taken", "the graph has another tensor called {tensor}")


class ExposeHidden(Pass):
    """Give the last hidden state beside the logits.

    before::

        logits = MatMul(x, W)

    after::

        last_hidden_state = x                                       [batch, length, width]
        logits = MatMul(last_hidden_state, W)

    Nothing is computed that was not computed before. The tensor is found by the graph: it is what the one product reads
    that makes the logits, whatever format its weight has. A bias, a scale, a soft-cap may stand behind the product;
    where ``last_logits`` cuts positions in front of it, the state is of those positions. It is in the basis that the
    product reads: behind ``rotate`` that of the rotation, behind ``fold_norms`` without the gain of the last norm.
    Heads (Medusa, Cai et al., 2024, arXiv:2401.10774) are turned into that basis when they are loaded.
    """

    name: ClassVar[str] = "expose_hidden"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("last_logits",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Name the input of the lm_head and make it an output; say why it cannot be where it cannot."""
        exposure = expose(model.graph)
        if isinstance(exposure, Fact):
            context.ledger.skipped(LOGITS, exposure)
        else:
            lm_head, old_name = exposure
            context.ledger.changed(lm_head, HIDDEN_OUTPUT(tensor=old_name, lm_head=lm_head.name, output=HIDDEN))


def expose(graph: ir.Graph) -> tuple[ir.Node, str] | Fact:
    """Make what the lm_head reads an output; return the lm_head and the old name of the tensor, or why it cannot be."""
    lm_head = lm_head_of(graph)
    if isinstance(lm_head, Fact):
        return lm_head
    x = nodes_of_product(lm_head)[-1].inputs[0]
    assert x is not None
    if x.is_graph_output():
        return OUTPUT_ALREADY(tensor=x.name)
    if any(value.name == HIDDEN for node in graph for value in node.outputs):
        return NAME_TAKEN(tensor=HIDDEN)
    old_name, x.name = str(x.name), HIDDEN
    graph.outputs.append(x)
    return lm_head, old_name
