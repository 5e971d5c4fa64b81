"""Rotary embeddings (RoFormer, Su et al. 2021) that are spelled out become ``RotaryEmbedding``.

    c = Cos(Concat(f, f));  s = Sin(Concat(f, f));  x * c + Concat(-x2, x1) * s,  x = [x1, x2]
      ->   RotaryEmbedding(x, Cos(f), Sin(f))

onnxscript has the rule. What it does not match stays: embeddings that interleave, or cover a part of a head.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import onnx_fusions

from graphopt.passes.base import CANONICAL_OPSETS, Ledger


def lift_rotary(model: ir.Model, ledger: Ledger) -> None:
    """Lift every rotary embedding that onnxscript recognizes."""
    if model.opset_imports.get("") != CANONICAL_OPSETS[0]:
        ledger.skipped("graph", f"onnxscript lifts rotary embeddings in opset {CANONICAL_OPSETS[0]} only")
        return
    for name, count in onnx_fusions.fuse(model).items():
        if count:
            ledger.report_change("graph", f"{count} spelled-out part(s) became {name}")
