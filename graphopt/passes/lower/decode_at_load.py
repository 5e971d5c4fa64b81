"""Weights that are codes in the file only are decoded when it is opened, and not in each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.decoded_weights import decoders
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import drop, shared_constant
from graphopt.graph.weights import Reshape, WeightTensor, expression_of, new_weight
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

DECODING = Rule("decode_at_load.folded", "{codes} decoded once, when the file is opened")

_MAKERS = ("quantize_convolutions", "compress_weights")


class DecodeAtLoad(Pass):
    """Decode weights that are read as floats by operators that onnxruntime folds.

    before::

        W = DequantizeLinear(codes, scales; axis)

    after::

        W = Mul(Cast(codes; to float32), scales')                        scales' [1, out, 1, ...]

    onnxruntime computes nodes of constants once, when it opens a file, but never ``DequantizeLinear``, which it keeps
    for kernels that read codes. Where there is none, as of ``LSTM`` or a convolution of floats, it decodes the weight
    in each run, and the operator cannot pack it beforehand. Both forms are the same products of a code and a scale. The
    file is as small; a session holds the floats.

    The weights are the same to the bit. The pass counts as lossy, and is measured, since of a constant weight
    onnxruntime takes another kernel, which adds in another order: a last bit becomes a step where a rounding is behind.

    Recipes with ``quantize_convolutions`` or ``compress_weights`` get this step at their end.
    """

    name: ClassVar[str] = "decode_at_load"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("lower", "compact_scales", "level_scales")

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether the recipe stores weights that kernels may read as floats."""
        del graph
        return any(step.name in _MAKERS for step in recipe.steps)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Replace each decoder; those of one weight become one, in the graph itself."""
        graph = model.graph
        values: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        for node in decoders(model):
            codes, scales = node.inputs[:2]
            assert codes is not None and scales is not None
            pair = (codes, scales)
            if pair not in values:
                values[pair] = self._decode(graph, node, codes, scales)
            weight = values[pair]
            decoder = weight.producer()
            assert decoder is not None and node.graph is not None
            context.ledger.changed(decoder, DECODING(codes=codes.name), [node])
            node.outputs[0].replace_all_uses_with(weight)
            node.graph.remove(node, safe=True)
        for codes, scales in values:
            drop(graph, codes)
            drop(graph, scales)

    def _decode(self, graph: ir.Graph, node: ir.Node, codes: ir.Value, scales: ir.Value) -> ir.Value:
        """Write the decoding of a weight at the head of the graph; return the floats."""
        assert codes.const_value is not None and scales.const_value is not None
        shape = tuple(map(int, codes.const_value.shape.numpy()))
        of_codes, of_scales = expression_of(codes.const_value), expression_of(scales.const_value)
        axis, block = node.attributes.get_int("axis", 1) % len(shape), node.attributes.get_int("block_size", 0)
        floats, name = ir.TensorType(ir.DataType.FLOAT), codes.name or "codes"
        if block:  # [..., blocks, block, ...] times [..., blocks, 1, ...]
            split_shape = (*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])
            blocks = Reshape.to_dims(of_codes, split_shape)
            codes = new_weight(graph, f"{name}.blocks", WeightTensor(blocks))
            factors = Reshape.to_dims(of_scales, (*of_scales.shape[: axis + 1], 1, *of_scales.shape[axis + 1 :]))
        else:
            split_shape = shape
            dims = tuple(size if index == axis else 1 for index, size in enumerate(shape))
            factors = Reshape.to_dims(of_scales, dims if of_scales.shape else (1,) * len(shape))
        factor = new_weight(graph, f"{scales.name}.factors", WeightTensor(factors))
        cast = ir.node("Cast", [codes], {"to": ir.DataType.FLOAT}, name=f"{name}.cast")
        product = ir.node("Mul", [cast.outputs[0], factor], name=f"{name}.scaled")
        nodes = [cast, product]
        if block:
            target = shared_constant(graph, f"{name}.shape", np.array(shape, np.int64))
            nodes.append(ir.node("Reshape", [product.outputs[0], target], name=f"{name}.reshaped"))
        for new_node in nodes:
            output = new_node.outputs[0]
            output.name, output.type, output.shape = f"{new_node.name}.output", floats, ir.Shape(split_shape)
        nodes[-1].outputs[0].shape = ir.Shape(shape)
        graph.insert_before(graph[0], nodes)
        return nodes[-1].outputs[0]
