"""Caches that fused attention cuts to its window become caches that grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.contrib import CUTS_TO_WINDOW, WINDOWS, cache_inputs, windowed_nodes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

GROWS = Rule("grow_caches.grows", "its cache was cut to {window} tokens and grows now; the window stays")


class GrowCaches(Pass):
    """Let caches grow that ``GroupQueryAttention`` itself cuts to its window, as all other caches do.

    before::

        y, present = GroupQueryAttention(q, k, v, past; local_window_size=W, sliding_window_cache=1)

    after::

        y, present = GroupQueryAttention(q, k, v, past; local_window_size=W)

    Caches are [batch, heads, C, size] with C >= W before, [batch, heads, tokens, size] after. The query at position t
    reads the keys t-W+1 to t. A cache of C tokens drops older keys only, and the window hides just those, so y stays.
    graphopt adds this step itself to every recipe for a graph with such caches: drafts that are taken back, and passes
    that store caches in pages, need all keys.
    """

    name: ClassVar[str] = "grow_caches"
    effect: ClassVar[Effect] = "exact"

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether a cache is cut to a window."""
        del recipe
        return bool(windowed_nodes(graph))

    def requires(self, model: ir.Model) -> None:
        """Demand nothing: the opset is raised later."""

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Drop the attribute, and the length from shapes that state it."""
        for node in windowed_nodes(model.graph):
            del node.attributes[CUTS_TO_WINDOW]
            for value in (*cache_inputs(node), *node.outputs[1:3]):
                if value is not None and value.shape is not None and len(value.shape) == 4:
                    batch, heads, length, size = value.shape
                    new_length = None if isinstance(length, int) else length
                    value.shape = ir.Shape([batch, heads, new_length, size])
            context.ledger.changed(node, GROWS(window=node.attributes.get_int("local_window_size", 0)))
        model.metadata_props.pop(WINDOWS, None)
