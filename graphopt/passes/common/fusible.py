"""Two neighbours that keep onnxruntime from fusing a product with stored codes, in other words that it does fuse.

    before:  Relu(MatMul(x, DequantizeLinear(codes, ...)))
    after:   Max(MatMul(x, DequantizeLinear(codes, ...)), 0)

    before:  e = DequantizeLinear(...);  MatMul(e, DequantizeLinear(codes, ...))          rows of an embedding
    after:   MatMul(Reshape(e, Shape(e)), DequantizeLinear(codes, ...))

onnxruntime (1.31, 1.32) sees its own patterns first: a product in front of a Relu, and a product of two dequantized
inputs. What it does not fuse dequantizes the whole weight in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.product_codes import is_dequantize
from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import free_name, insert_behind, insert_in_front, replace, shared_constant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.context import Ledger

RELU_AS_MAX = Rule("lower.relu-as-max", "Max with 0, so that onnxruntime fuses {product}")
INPUT_APART = Rule("lower.input-apart", "apart from {product}, which onnxruntime would not fuse behind it")


def keep_fusible(graph: ir.Graph, products: Sequence[ir.Node], ledger: Ledger) -> None:
    """Rewrite what stands around ``products``, which read ``DequantizeLinear`` as their weight, where it hinders."""
    for node in products:
        x = node.inputs[0]
        producer = None if x is None else x.producer()
        if x is not None and producer is not None and is_dequantize(producer):
            _set_apart(graph, x, [node for node in products if node.inputs[0] is x], ledger)
        for relu in [use.node for use in node.outputs[0].uses() if use.node.op_type == "Relu"]:
            dtype = relu.outputs[0].dtype or ir.DataType.FLOAT
            zero = shared_constant(graph, f"zero.{dtype.name.lower()}", np.zeros((), dtype.numpy()))
            maximum = ir.node("Max", [relu.inputs[0], zero], name=relu.name)
            replace(relu, maximum)
            ledger.changed(maximum, RELU_AS_MAX(product=node.name), [relu])


def _set_apart(graph: ir.Graph, x: ir.Value, products: Sequence[ir.Node], ledger: Ledger) -> None:
    """Let ``products`` read a reshape of ``x`` to its own shape."""
    name = free_name(graph, f"{x.name}.apart")
    reshape = ir.node("Reshape", [x, None], name=name)
    value = insert_behind(x, reshape, products)
    shape = ir.node("Shape", [x], name=f"{name}.shape")
    insert_in_front(reshape, 1, shape)
    shape.outputs[0].name, shape.outputs[0].dtype = f"{name}.shape", ir.DataType.INT64
    assert value.producer() is reshape
    ledger.changed(reshape, INPUT_APART(product=products[0].name), [x])
