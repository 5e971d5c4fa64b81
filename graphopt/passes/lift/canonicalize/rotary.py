"""Rotary embeddings (RoFormer, Su et al. 2021) that are spelled out become ``RotaryEmbedding``.

With halves x = [x1, x2], or with neighbours, x1 = x[0::2] and x2 = x[1::2], as in Cohere:

    c = Cos(Concat(f, f));  s = Sin(Concat(f, f));  x * c + Concat(-x2, x1) * s
      ->   RotaryEmbedding(x, Cos(f), Sin(f))

    c = Cos(<f, each twice>);  s = Sin(<f, each twice>);  x * c + <-x2 and x1 in turn> * s
      ->   RotaryEmbedding(x, Cos(f), Sin(f); interleaved=1)

onnxscript has the first rule, the second is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from onnxscript.rewriter import MatchResult, onnx_fusions, pattern

from graphopt.graph.diagnostics import Rule
from graphopt.passes.phases import CANONICAL_OPSETS

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Ledger

NEIGHBOURS_LIFTED = Rule("canonicalize.neighbours-lifted", "part of a spelled-out rotation of neighbours, {op} now")
ROTARY_LIFTED = Rule("canonicalize.rotary-lifted", "{count} spelled-out part(s) became {by}")
OTHER_OPSET = Rule("canonicalize.other-opset", "onnxscript lifts rotary embeddings in opset {opset} only")


class _InterleavedRotation(pattern.RewriteRuleClassBase):
    """Lift a rotary embedding of neighbours."""

    def __init__(self, ledger: Ledger) -> None:
        # Cosine and sine are shared by queries and keys of all layers, and stay until the last has been lifted.
        super().__init__("Interleaved", remove_nodes=False)
        self._ledger = ledger

    def pattern(self, op: Any, x: Any, angles: Any, one_end: Any, other_end: Any, shape: Any, pair_shape: Any) -> Any:
        angle_pairs = op.Tile(op.Unsqueeze(angles, [3]), [1, 1, 1, 2])
        angle_pairs = op.Reshape(angle_pairs, pair_shape, _allow_other_attributes=True, _outputs=["angle_pairs"])
        cos, sin = op.Unsqueeze(op.Cos(angle_pairs), [1]), op.Unsqueeze(op.Sin(angle_pairs), [1])
        x1, x2 = op.Slice(x, [0], one_end, [3], [2]), op.Slice(x, [1], other_end, [3], [2])
        pairs = op.Concat(op.Unsqueeze(op.Neg(x2), [-1]), op.Unsqueeze(x1, [-1]), axis=-1)
        output = op.Reshape(pairs, shape, _allow_other_attributes=True, _outputs=["output"])
        return op.Add(op.Mul(x, cos), op.Mul(output, sin))

    def check(
        self, op: Any, x: ir.Value, angles: ir.Value, angle_pairs: ir.Value, output: ir.Value, **_: Any
    ) -> MatchResult:
        result = MatchResult()
        if x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[1], int) or not isinstance(x.shape[3], int):
            return result.fail("its heads and their size are not known", x)
        # So the slices end where x does: every second coordinate, twice, makes up its size.
        if output.shape != x.shape:
            return result.fail("the rotated output is put back in another shape", output)
        if angles.shape is None or len(angles.shape) != 3 or angle_pairs.shape != [*angles.shape[:2], x.shape[3]]:
            return result.fail("its angles are not repeated one by one", angle_pairs)
        return result

    def rewrite(self, op: Any, x: ir.Value, angles: ir.Value, output: ir.Value, **_: Any) -> ir.Value:
        old = output.producer()
        assert x.shape is not None and old is not None
        cos, sin = op.Cos(angles), op.Sin(angles)
        embedding: ir.Value = op.RotaryEmbedding(x, cos, sin, interleaved=1, num_heads=x.shape[1])
        for value in (cos, sin, embedding):
            node = value.producer()
            assert node is not None
            node.name = f"{old.name}.{node.op_type}"
            self._ledger.changed(node, NEIGHBOURS_LIFTED(op=node.op_type), [x, angles])
        for value in (cos, sin):
            value.name, value.type, value.shape = f"{value.producer().name}.output", angles.type, angles.shape
        return embedding


def lift_rotary(model: ir.Model, ledger: Ledger) -> None:
    """Lift every rotary embedding of neighbours, and every one that onnxscript recognizes."""
    rule = _InterleavedRotation.rule(ledger)  # type: ignore[no-untyped-call]
    if pattern.RewriteRuleSet([rule]).apply_to_model(model):
        CommonSubexpressionEliminationPass()(model)
    if model.opset_imports.get("") != CANONICAL_OPSETS[0]:
        ledger.skipped("graph", OTHER_OPSET(opset=CANONICAL_OPSETS[0]))
        return
    for name, count in onnx_fusions.fuse(model).items():
        if count:
            ledger.report_change("graph", ROTARY_LIFTED(count=count, by=name))
    for node in model.graph:
        # onnxscript sets neither type nor shape
        if node.op_type in ("Cos", "Sin") and node.outputs[0].dtype is None and node.inputs[0] is not None:
            node.outputs[0].type, node.outputs[0].shape = node.inputs[0].type, node.inputs[0].shape
