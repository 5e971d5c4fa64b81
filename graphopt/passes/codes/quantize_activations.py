"""Inputs of products with stored codes are rounded at run time, token by token, so that integers are multiplied."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from pydantic import Field

from graphopt.analysis.structure import coded_nodes, dequantize_of, head_nodes, linear_nodes, router_nodes
from graphopt.editing import drop, shared
from graphopt.facts import Effect
from graphopt.passes.base import Pass, StepOptions
from graphopt.passes.context import Context, Ledger
from graphopt.passes.lower.products import Packed, repack, replace
from graphopt.runtime_ops import DOMAIN, OPERATORS, declare


class QuantizeActivationsOptions(StepOptions):
    """Bits of the inputs, the share of a token's range that they keep, and whether the head's input is rounded too.

    A share below 1 cuts a token's largest numbers off, which leaves a finer scale to all others.
    """

    step: Literal["quantize_activations"] = "quantize_activations"
    bits: Literal[4, 8] = 8
    clip: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    head: bool = False


class QuantizeActivations(Pass[QuantizeActivationsOptions]):
    """Round the inputs of products with quantized weights to integers, one scale per token.

    before::

        y = MatMul(Hadamard(x, left, right), DequantizeLinear(codes, scales; axis=0, block_size=group))

    after::

        y = ai.graphopt::MatMulDynamic(x, codes, scales, table, zero points, 0, left, right; bits, clip)

    For z = x H, with H the rotation that left and right make, a token's scale is s = clip max|z| / (2^(bits-1) - 1),
    its codes are q = round(z / s), cut off at either end, and y = s q W: a product of integers (QuaRot, Ashkboos et al.
    2024, section 4). A rotation that only this product reads runs inside it, any other stays in front. Products in the
    form of ``MatMulTable`` are rewritten likewise, and what they said about activations is replaced. A product that
    chooses experts is left alone, and so is the head unless the options ask for it.
    """

    name: ClassVar[str] = "quantize_activations"
    effect: ClassVar[Effect] = "lossy"
    options_type: ClassVar[type[StepOptions]] = QuantizeActivationsOptions
    after: ClassVar[tuple[str, ...]] = ("quantize_weights",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rewrite every product with stored codes; say why any other product with a matrix stays."""
        ledger = context.ledger
        graph = model.graph
        heads, routers = head_nodes(graph), router_nodes(graph)
        for node in linear_nodes(graph):
            ledger.skipped(node, "its weights are not quantized")
        for node in coded_nodes(graph):
            if node in heads and not self.options.head:
                ledger.skipped(node, "it makes the logits: its input is rounded only if the recipe asks for it")
            elif node in routers - heads:
                ledger.skipped(node, "it chooses experts: its input is left alone")
            elif node.op_type == "MatMulDynamic":
                ledger.skipped(node, f"its input is already rounded to {node.attributes.get_int('bits', 0)} bits")
            else:
                self._rewrite_product(graph, node, ledger)
        declare(model)

    def _rewrite_product(self, graph: ir.Graph, node: ir.Node, ledger: Ledger) -> None:
        x, dequantize = node.inputs[0], dequantize_of(node)
        assert x is not None
        if x.dtype is not None and x.dtype != ir.DataType.FLOAT:
            ledger.skipped(node, f"its input is {x.dtype}, and MatMulDynamic reads float")
            return
        packed = Packed.of_node(node) if dequantize is None else repack(graph, dequantize)
        if isinstance(packed, str):
            ledger.skipped(node, packed)
            return
        one = shared(graph, "no_rotation", np.ones((1, 1), np.int8))
        matrices, rotation, note = (one, one), _rotation_in_front(x), ""
        if rotation is not None:
            x, left, right = (value for value in rotation.inputs if value is not None)
            matrices, note = (left, right), f", {rotation.name} inside"
        attributes = {"bits": self.options.bits, "clip": self.options.clip}
        new = packed.node(OPERATORS["MatMulDynamic"], x, matrices, attributes, node.name or "")
        what = f"its input rounded to int{self.options.bits} per token{note}"
        replace(graph, node, new, what, ledger)
        drop(graph, one)


def _rotation_in_front(x: ir.Value) -> ir.Node | None:
    """Return the ``Hadamard`` that makes ``x`` where nothing else reads it."""
    producer = x.producer()
    if producer is None or producer.domain != DOMAIN or producer.op_type != "Hadamard":
        return None
    return producer if len(x.uses()) == 1 and not x.is_graph_output() else None
