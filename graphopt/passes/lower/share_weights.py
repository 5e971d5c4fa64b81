"""Weights that are the same numbers are stored once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.repeated_weights import repeated_weights
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context

SHARING = Rule("share_weights.shared", "{weight} in the place of {count} copies, {bytes} bytes")


class ShareWeights(Pass):
    """Let all nodes read one of several weights that are equal to the byte.

    before::

        y = MatMul(x, A),  z = MatMul(x, B)          B = A in type, shape and every byte

    after::

        y = MatMul(x, A),  z = MatMul(x, A)

    Weights of branches and loops are read from the graph around them, which gets those that only branches have.
    Exporters write a weight once for each module that holds it; a file then has it as often.
    """

    name: ClassVar[str] = "share_weights"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("lower", "compact_scales", "level_scales", "tie_embedding")

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Keep the first of equal weights."""
        for first, copies in repeated_weights(model):
            _move_out(first, model)
            size = sum(copy.const_value.nbytes for copy in copies if copy.const_value is not None)
            for copy in copies:
                graph = copy.graph
                copy.replace_all_uses_with(first)
                if graph is not None:
                    del graph.initializers[copy.name or ""]
            context.ledger.changed(first, SHARING(weight=first.name, count=len(copies), bytes=size), copies)


def _move_out(weight: ir.Value, model: ir.Model) -> None:
    """Store a weight of a branch or loop in the graph around all of them, which they read."""
    if weight.graph is model.graph or weight.graph is None:
        return
    results = (output for node in model.graph.all_nodes() for output in node.outputs)
    ports = (value for graph in model.graphs() for value in (*graph.inputs, *graph.initializers.values()))
    names = {value.name for value in (*ports, *results) if value is not weight}
    del weight.graph.initializers[weight.name or ""]
    while weight.name in names:  # branches beside one another may use a name twice, a graph and its branches may not
        weight.name = f"{weight.name}.shared"
    model.graph.register_initializer(weight)
