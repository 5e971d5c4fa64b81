"""What depends on constants alone is computed once, and stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.constant_parts import constant_results
from graphopt.analysis.structure.value_types import type_of
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import drop
from graphopt.graph.weights import new_weight
from graphopt.ort.runner import part_of
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context

FOLDING = Rule("fold_constants.folded", "{nodes} node(s) computed once, {bytes} bytes")
TYPE_UNKNOWN = Rule("fold_constants.type-unknown", "its type is not stated")
NOT_RUN = Rule("fold_constants.not-run", "onnxruntime does not compute it on its own ({error})")
TOO_LARGE = Rule("fold_constants.too-large", "its {bytes} bytes are more than what they are computed from")

_ROOM = 4096
"""Bytes that a result may have whatever it is made of."""


class FoldConstants(Pass):
    """Compute what depends on constants alone, in onnxruntime, and store the result.

    before::

        W = Transpose(Mul(A, s));  y = MatMul(x, W)              A, s: constants

    after::

        y = MatMul(x, W)                                         W: a constant, the bytes that onnxruntime computes

    onnxruntime does so each time that it opens the file, and then holds both. A result that is larger than what it is
    made of stays as it is, and so does what draws random numbers, decodes codes, or lies in a branch.
    """

    name: ClassVar[str] = "fold_constants"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Fold each value that a node reads which depends on inputs."""
        graph = model.graph
        for result in constant_results(graph):
            value = result.value
            kind = type_of(value)
            if kind is None:
                context.ledger.skipped(value, TYPE_UNKNOWN())
                continue
            value.type = ir.TensorType(kind)  # onnxruntime wants the types of outputs
            try:
                ((array,),) = context.runner.run(part_of(model, value), [{}])
            except Exception as error:  # whatever onnxruntime raises: what it does not compute here stays
                context.ledger.skipped(value, NOT_RUN(error=str(error).split("\n")[0]))
                continue
            if array.nbytes > max(_ROOM, result.source_bytes):
                context.ledger.skipped(value, TOO_LARGE(bytes=array.nbytes))
                continue
            new = new_weight(graph, f"{value.name}.folded", ir.tensor(array))
            value.replace_all_uses_with(new)
            drop(graph, value)
            context.ledger.changed(new, FOLDING(nodes=len(result.nodes), bytes=array.nbytes), result.nodes)
