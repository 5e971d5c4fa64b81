"""An lm_head that is the transposed token embedding, both in floats, is stored once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.products import token_lookups
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import drop, name_output
from graphopt.graph.weights import weight_of
from graphopt.passes.base import Pass
from graphopt.passes.common.tied_embedding import tied_lookups

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

TIED = Rule("tie_embedding.tied", "the transposed {table}, in the place of {weight}: both are stored once")


class TieEmbedding(Pass):
    """Let an lm_head in floats read the token embedding that it is the transpose of.

    before::

        y = MatMul(x, W)                                   e = Gather(E, ids)                       W = E^T, to the byte

    after::

        y = MatMul(x, Transpose(E))                        e = Gather(E, ids)

    ``canonicalize`` makes a matrix of its own of a transposed embedding, as every step wants products, and a file would
    hold both. onnxruntime folds the ``Transpose`` when it loads the model, so what runs is the same. Codes that both
    share are stored once by ``quantize_weights`` and ``keep_codes``; a rotation makes the two differ.

    A recipe that leaves weights as they are gets this step where a model has such an embedding.
    """

    name: ClassVar[str] = "tie_embedding"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("lower",)

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether another node reads, or read, the transposed token embedding, and no step changes weights."""
        if recipe.phases & {"algebra", "codes"}:
            return False
        tables = {node.inputs[0] for node in token_lookups(graph)}
        is_transposed = any(node.op_type == "Transpose" and node.inputs[0] in tables for node in graph)
        return is_transposed or bool(tied_lookups(graph))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Transpose the embedding in front of each lm_head that is tied to it."""
        graph = model.graph
        for product, lookups in tied_lookups(graph).items():
            table, weight = weight_of(lookups[0], 0), weight_of(product, 1)
            assert table is not None and weight is not None
            transpose = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{product.name}.tied")
            graph.insert_before(product, transpose)
            product.replace_input_with(1, name_output(transpose, weight))
            context.ledger.changed(transpose, TIED(table=table.name, weight=weight.name), [product, table])
            drop(graph, weight)
