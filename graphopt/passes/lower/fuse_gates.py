"""The gated activation of a product that makes both halves becomes one node."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import replace
from graphopt.graph.weights import weight_of
from graphopt.passes.base import Pass
from graphopt.runtime_ops.swiglu.spec.op import SWIGLU
from graphopt.util.targets import Target

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context, Ledger

GATE_FUSED = Rule("fuse_gates.fused", "splits {input}, and multiplies by the gate")
NOT_HALVES = Rule("fuse_gates.not-halves", "{input} is not the first half of the columns of one product")
READ_ELSEWHERE = Rule("fuse_gates.read-elsewhere", "{value} is read in other ways too")
NO_GATE = Rule("fuse_gates.no-gate", "its product with {input} multiplies no other half")


class FuseGates(Pass):
    """Compute a gated activation in one node, where one product makes the gate and what it lets through.

    before::

        g, u = Split(x, [n, n])
        y = Mul(Mul(g, Sigmoid(g)), u)

    after::

        y = ai.graphopt::SwiGLU(x)

    The second is the definition of the first: y = g sigmoid(g) u in both. Of four nodes one is left; onnxruntime has
    ``QuickGelu`` for two of them, and none for SiLU that splits. In float16 it rounds once where the
    first rounds three times. Other activations than SiLU stay, and so do gates of
    products of their own: the step ``merge_products`` makes one of those that agree.
    """

    name: ClassVar[str] = "fuse_gates"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("merge_products", "lower")
    targets: ClassVar[tuple[Target, ...]] = ("ort-cuda",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Fuse each gate; say why the others stay."""
        for node in list(model.graph):
            if node.op_type == "Sigmoid" and not node.domain:
                reason = _fuse(node, context.ledger)
                if reason is not None:
                    context.ledger.skipped(node, reason)


def _fuse(sigmoid: ir.Node, ledger: Ledger) -> Fact | None:
    """Fuse what is around a sigmoid, or return why not."""
    gate = sigmoid.inputs[0]
    split = None if gate is None else gate.producer()
    if gate is None or split is None or not _halves(split) or gate is not split.outputs[0]:
        return NOT_HALVES(input="?" if gate is None else gate.name)
    silu = _only_product(sigmoid.outputs[0])
    if silu is None or gate not in silu.inputs:
        return NO_GATE(input=gate.name)
    up = split.outputs[1]
    product = _only_product(silu.outputs[0])
    if product is None or up not in product.inputs:
        return NO_GATE(input=gate.name)
    for value, count in ((gate, 2), (up, 1)):
        if len(value.uses()) != count or value.is_graph_output():
            return READ_ELSEWHERE(value=value.name)
    new = SWIGLU.node([split.inputs[0]], name=product.name)
    ledger.changed(
        new, GATE_FUSED(input=split.inputs[0].name if split.inputs[0] else "?"), [split, sigmoid, silu, product]
    )
    replace(product, new)
    return None


def _halves(split: ir.Node) -> bool:
    """Return whether a node cuts the last axis of floats into two halves."""
    x = split.inputs[0]
    if split.op_type != "Split" or split.domain or len(split.outputs) != 2 or x is None or x.shape is None:
        return False
    columns = x.shape[-1]
    is_last = split.attributes.get_int("axis", 0) in (-1, len(x.shape) - 1)
    sizes = weight_of(split, 1)
    if not is_last or not isinstance(columns, int) or columns % 2 or x.dtype not in SWIGLU.schema.inputs[0].types:
        return False
    if sizes is None or sizes.const_value is None:
        return len(split.inputs) == 1
    return bool(sizes.const_value.numpy().tolist() == [columns // 2] * 2)


def _only_product(value: ir.Value) -> ir.Node | None:
    """Return the product of two different tensors that alone reads ``value``."""
    uses = list(value.uses())
    node = uses[0].node if len(uses) == 1 and not value.is_graph_output() else None
    return node if node is not None and node.op_type == "Mul" and not node.domain else None
