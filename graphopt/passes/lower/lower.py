"""Products with stored codes in the form that the target runs fastest."""

from __future__ import annotations

from typing import ClassVar, Literal

import onnx_ir as ir

from graphopt.analysis.structure import coded_nodes, dequantize_of
from graphopt.facts import Effect
from graphopt.passes.base import Pass, StepOptions
from graphopt.passes.codes.quantize_weights import Activations
from graphopt.passes.context import Context, Ledger
from graphopt.passes.lower.costs import Costs, estimate, shipped_costs
from graphopt.passes.lower.products import repack, replace
from graphopt.runtime_ops import OPERATORS, declare
from graphopt.weights import weight_of

Target = Literal["portable", "ort-cpu", "ort-cuda"]


class LowerOptions(StepOptions):
    """What the model is to run on.

    Attributes:
        target: ``portable``: any onnxruntime; every product stays in the standard form where it has one. ``ort-cpu``:
            onnxruntime on a CPU with graphopt's library registered. ``ort-cuda``: the same on an NVIDIA GPU.
        instructions: the instruction set of that CPU, of those that costs were measured with.
        activations: what the inputs of products that become ``MatMulTable`` are rounded to; ``None`` for what the
            recipe says, on a GPU ``float32``.
    """

    step: Literal["lower"] = "lower"
    target: Target = "portable"
    instructions: Literal["avx512", "avx2"] = "avx512"
    activations: Activations | None = None


class Lower(Pass[LowerOptions]):
    """Choose for each product with stored codes between onnxruntime's kernel and graphopt's, by cost.

    before::

        y = MatMul(x, DequantizeLinear(codes, scales; axis=0, block_size=group))

    after, for the target ``ort-cpu`` where graphopt's kernel was measured to be faster, for ``ort-cuda`` where it can::

        y = ai.graphopt::MatMulTable(x, codes, scales, table, zero points, 0; group, activations)

    Codes, scales and zero points are the same numbers in another layout, so W stays bit for bit. What changes is where
    the rounding of x is said: onnxruntime fuses the first form into ``MatMulNBits``, which rounds x to int8 in groups
    unless a session entry forbids it; the second says in the graph what x is rounded to. The graph then means that
    rounding, where before it meant none: the pass counts as lossy, and is measured. For the target ``portable`` nothing
    is rewritten. Nothing was measured on a GPU yet: there the report states an estimate, from bytes and a nominal
    bandwidth.
    """

    name: ClassVar[str] = "lower"
    effect: ClassVar[Effect] = "lossy"
    options_type: ClassVar[type[StepOptions]] = LowerOptions
    after: ClassVar[tuple[str, ...]] = ("last_logits",)

    def __init__(self, options: LowerOptions, costs: Costs | None = None) -> None:
        super().__init__(options)
        self._costs = costs

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rewrite the products whose cost says so, and give the reason for every other."""
        ledger = context.ledger
        for node in coded_nodes(model.graph):
            if (dequantize := dequantize_of(node)) is None:
                continue
            if self.options.target == "portable":
                ledger.skipped(node, "the target is portable: it keeps its standard form")
            else:
                self._choose(model.graph, node, dequantize, ledger)
        declare(model)

    def _choose(self, graph: ir.Graph, node: ir.Node, dequantize: ir.Node, ledger: Ledger) -> None:
        codes, x = weight_of(dequantize, 0), node.inputs[0]
        assert codes is not None and codes.dtype is not None and codes.shape is not None and x is not None
        on_gpu = self.options.target == "ort-cuda"
        if on_gpu:
            rows, columns = codes.shape.numpy()
            choice = estimate(rows, columns, int(codes.dtype.bitwidth))
        else:
            costs = shipped_costs() if self._costs is None else self._costs
            choice = costs.compare(int(codes.dtype.bitwidth), self.options.instructions)
        if not choice.ours:
            ledger.skipped(node, choice.reason)
            return
        if x.dtype is not None and x.dtype != ir.DataType.FLOAT:
            ledger.skipped(node, f"its input is {x.dtype}, and MatMulTable reads float")
            return
        packed = repack(graph, dequantize)
        if isinstance(packed, str):
            ledger.skipped(node, packed)
            return
        activations = "float32" if on_gpu else self.options.activations or "int8"
        new = packed.node(OPERATORS["MatMulTable"], x, (), {"activations": activations}, node.name or "")
        rounding = "inputs as they are" if on_gpu else f"inputs rounded to {activations} in groups of {packed.group}"
        what = f"MatMulTable, {rounding}: {choice.reason}"
        replace(graph, node, new, what, ledger)


__all__ = ["Costs", "Lower", "LowerOptions", "Target", "shipped_costs"]
