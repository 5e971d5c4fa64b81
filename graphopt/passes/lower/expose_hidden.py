"""The last hidden state beside the logits: what heads read that guess further tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

import onnx_ir as ir

from graphopt.analysis.ports import HIDDEN, LOGITS
from graphopt.analysis.structure import lm_head_nodes
from graphopt.facts import Effect, Fact, Rule
from graphopt.passes.base import Pass, StepOptions
from graphopt.passes.context import Context
from graphopt.passes.lower.last_logits import BY_POSITION, same_for_all_positions

EXPOSED = Rule("expose_hidden.exposed", "{tensor}, which {lm_head} reads, is the output {output}")
NO_LOGITS = Rule("expose_hidden.no-logits", "the graph has no output of this name")
NO_PRODUCT = Rule("expose_hidden.no-product", "no product with a matrix makes the logits")
SEVERAL_PRODUCTS = Rule("expose_hidden.several-products", "{count} products make the logits: {lm_heads}")
BEHIND_PRODUCT = Rule("expose_hidden.behind-product", "{op} {node} stands behind the product that makes the logits")
NOT_BY_POSITION = Rule("expose_hidden.not-by-position", "{tensor} is not known to be floats [batch, length, width]")
OUTPUT_ALREADY = Rule("expose_hidden.output-already", "{tensor}, which the lm_head reads, is an output already")
NAME_TAKEN = Rule("expose_hidden.name-taken", "the graph has another tensor called {tensor}")


class ExposeHiddenOptions(StepOptions):
    """There is nothing to choose."""

    step: Literal["expose_hidden"] = "expose_hidden"


class ExposeHidden(Pass[ExposeHiddenOptions]):
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
    options_type: ClassVar[type[StepOptions]] = ExposeHiddenOptions
    after: ClassVar[tuple[str, ...]] = ("lower", "last_logits", "float16")

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Name the input of the lm_head and make it an output; say why it cannot be where it cannot."""
        done = expose(model.graph)
        if isinstance(done, Fact):
            context.ledger.skipped(LOGITS, done)
        else:
            lm_head, was = done
            context.ledger.changed(lm_head, EXPOSED(tensor=was, lm_head=lm_head.name, output=HIDDEN))


def expose(graph: ir.Graph) -> tuple[ir.Node, str] | Fact:
    """Make what the lm_head reads an output; return the lm_head and the old name of the tensor, or why it cannot be."""
    lm_head = lm_head_of(graph)
    if isinstance(lm_head, Fact):
        return lm_head
    x = lm_head.inputs[0]
    assert x is not None
    if x.is_graph_output():
        return OUTPUT_ALREADY(tensor=x.name)
    if any(value.name == HIDDEN for node in graph for value in node.outputs):
        return NAME_TAKEN(tensor=HIDDEN)
    was, x.name = str(x.name), HIDDEN
    graph.outputs.append(x)
    return lm_head, was


def lm_head_of(graph: ir.Graph) -> ir.Node | Fact:
    """Return the product that makes the logits of each position of its input, or why there is no such product."""
    value = next((value for value in graph.outputs if value.name == LOGITS), None)
    if value is None:
        return NO_LOGITS()
    lm_heads = lm_head_nodes(graph)
    if len(lm_heads) > 1:
        names = ", ".join(sorted(str(node.name) for node in lm_heads))
        return SEVERAL_PRODUCTS(count=len(lm_heads), lm_heads=names)
    while (node := value.producer()) not in lm_heads:
        if node is None or not lm_heads:
            return NO_PRODUCT()
        varying = [each for each in node.inputs if each is not None and not same_for_all_positions(each)]
        if node.op_type not in BY_POSITION or node.domain or len(varying) != 1:
            return BEHIND_PRODUCT(op=node.op_type, node=node.name)
        value = varying[0]
    assert node is not None
    x = node.inputs[0]
    floats = x is not None and x.dtype is not None and x.dtype.is_floating_point()
    if x is None or not floats or x.shape is None or len(x.shape) != 3 or x.is_initializer():
        return NOT_BY_POSITION(tensor=None if x is None else x.name)
    return node
