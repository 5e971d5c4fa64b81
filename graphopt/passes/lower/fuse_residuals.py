"""The sum in front of a norm becomes a part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.contrib import MICROSOFT
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import inherit, remove, take_place
from graphopt.graph.weights import weight_of
from graphopt.passes.base import Pass
from graphopt.util.targets import Target

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger

SUM_INSIDE = Rule("fuse_residuals.fused", "adds what it normalizes, and gives the sum too")
NO_SUM = Rule("fuse_residuals.no-sum", "{input} is no sum of two tensors of one shape [batch, length, width]")
OTHER_AXES = Rule("fuse_residuals.other-axes", "it is not over the last axis alone, in float32, with a constant gain")
STATISTICS_READ = Rule("fuse_residuals.statistics-read", "its mean or deviation is read")

_SKIP_NORMS = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}
_RANK, _SUM = 3, 3


class FuseResiduals(Pass):
    """Let a norm add what it normalizes: one node of onnxruntime's where a residual is added.

    before::

        s = Add(x, y)
        z = RMSNormalization(s, gain)                              or LayerNormalization(s, gain, bias)

    after::

        z, _, _, s = com.microsoft::SkipSimplifiedLayerNormalization(x, y, gain)      or SkipLayerNormalization

    onnxruntime defines the second as the first: its fourth output is the sum, which other nodes read as before. What
    goes are two nodes of a layer, which the host of a GPU starts at each token. On a GPU the option
    ``enable_skip_layer_norm_strict_mode`` of the provider makes float16 models sum up squares in float32, as
    ``RMSNormalization`` does; graphopt's sessions set it.
    """

    name: ClassVar[str] = "fuse_residuals"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("lower",)
    targets: ClassVar[tuple[Target, ...]] = ("ort-cuda",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Fuse each norm with the sum in front of it; say why the others stay."""
        for node in list(model.graph):
            if node.op_type in _SKIP_NORMS and not node.domain:
                reason = _fuse(model, node, context.ledger)
                if reason is not None:
                    context.ledger.skipped(node, reason)


def _fuse(model: ir.Model, norm: ir.Node, ledger: Ledger) -> Fact | None:
    """Fuse a norm with the sum that it reads, or return why not."""
    total = norm.inputs[0]
    add = None if total is None else total.producer()
    if total is None or add is None or not _adds_equal_shapes(add):
        return NO_SUM(input="?" if total is None else total.name)
    gain = weight_of(norm, 1)
    constants = [gain, *norm.inputs[2:]]
    is_last = norm.attributes.get_int("axis", -1) in (-1, _RANK - 1)
    is_wide = norm.attributes.get_int("stash_type", 1) == ir.DataType.FLOAT
    if not is_last or not is_wide or any(value is None or not _is_vector(value, total) for value in constants):
        return OTHER_AXES()
    if any(output.uses() or output.is_graph_output() for output in norm.outputs[1:]):
        return STATISTICS_READ()
    new = ir.node(
        _SKIP_NORMS[norm.op_type],
        [*add.inputs, *constants],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        domain=MICROSOFT,
        num_outputs=4,
        name=norm.name,
    )
    for index, output in enumerate(new.outputs):  # nothing reads those without a name
        output.name = f"{norm.name}.output{index}" if index in (0, _SUM) else ""
    model.graph.insert_before(add, new)
    ledger.changed(new, SUM_INSIDE(), [add, norm])
    inherit(new, norm)
    take_place(norm.outputs[0], new.outputs[0])
    remove(norm)
    if add.graph is not None:  # the norm was not its only reader
        take_place(total, new.outputs[_SUM])
        remove(add)
    else:
        new.outputs[_SUM].name = ""
    model.opset_imports.setdefault(MICROSOFT, 1)
    return None


def _adds_equal_shapes(node: ir.Node) -> bool:
    """Return whether a node adds two tensors [batch, length, width] of the same shape, as far as it is known."""
    if node.op_type != "Add" or node.domain:
        return False
    x, y = node.inputs
    if x is None or y is None or x.shape is None or y.shape is None:
        return False
    is_known = all(isinstance(dim, int) or dim.value is not None for dim in x.shape)
    return is_known and len(x.shape) == _RANK and list(x.shape) == list(y.shape)


def _is_vector(value: ir.Value, total: ir.Value) -> bool:
    """Return whether a constant has a number for each channel of ``total``, of its type."""
    is_constant = value.is_initializer() and not value.is_graph_input()
    shapes_fit = value.shape is not None and total.shape is not None and list(value.shape) == [total.shape[-1]]
    return is_constant and shapes_fit and value.dtype == total.dtype
