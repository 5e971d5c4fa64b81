"""Factors and shifts of channels behind a convolution become a part of its weight and bias."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import drop, remove, take_place
from graphopt.graph.weights import Inline, Scale, new_weight, own_input, rewrite, weight_of
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.graph.diagnostics import Fact
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

FOLDING = Rule("fold_batch_norms.folded", "{op_type} {node} is in weight and bias")
WEIGHT_COMPUTED = Rule("fold_batch_norms.computed", "the weight or bias of the convolution in front of it is computed")
OTHER_READER = Rule("fold_batch_norms.other-reader", "something else reads what the convolution in front of it makes")
TRAINING = Rule("fold_batch_norms.training", "it computes means of its input")
NOT_CONSTANT = Rule("fold_batch_norms.not-constant", "its gain, shift, mean or variance is computed")
NOT_BY_CHANNEL = Rule("fold_batch_norms.not-by-channel", "its constant has not one number a channel")

Doubles = npt.NDArray[np.float64]
_ARITHMETIC = ("Add", "Sub", "Mul", "Div")


class FoldBatchNorms(Pass):
    """Compute batch normalization, and other factors and shifts of channels, inside the convolution in front of it.

    before::

        y = BatchNormalization(Conv(x, W, b), gain, shift, mean, variance; epsilon)
        y = Add(Mul(Conv(x, W, b), factors), shifts)                     constants [1, channels, 1, 1]

    after::

        y = Conv(x, f W, f b + s)           f = gain / sqrt(variance + epsilon), s = shift - f mean; or the constants

    since a convolution is linear in its weight and its bias. onnxruntime does the same when it loads a model in floats,
    and cannot where weights are codes: recipes with ``quantize_convolutions`` have this step before.
    """

    name: ClassVar[str] = "fold_batch_norms"
    effect: ClassVar[Effect] = "exact"

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether the recipe makes codes of convolutions."""
        del graph
        return any(step.name == "quantize_convolutions" for step in recipe.steps)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Fold what follows each convolution; say why a batch normalization stays."""
        graph, ledger = model.graph, context.ledger
        for node in list(graph):
            conv = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
            operand = 0
            if node.op_type in ("Add", "Mul") and not node.domain and not _is_convolution(conv):
                conv, operand = (node.inputs[1].producer() if node.inputs[1] is not None else None), 1
            if node.domain or node.op_type not in ("BatchNormalization", *_ARITHMETIC) or not _is_convolution(conv):
                continue
            assert conv is not None
            terms = _terms_of(node, conv, operand)
            if not isinstance(terms, tuple):
                if node.op_type == "BatchNormalization":
                    ledger.skipped(node, terms)
                continue
            factors, shifts = terms
            weight = own_input(conv, 1)
            rewrite(weight, partial(Scale, factors=Inline.from_array(factors), axis=0))
            bias = weight_of(conv, 2)
            numbers = 0 if bias is None or bias.const_value is None else bias.const_value.numpy().astype(np.float64)
            new_bias = (factors * numbers + shifts).astype(np.float32)
            name = f"{weight.name}.bias" if bias is None else str(bias.name)
            if len(conv.inputs) < 3:
                conv.resize_inputs(3)
            conv.replace_input_with(2, new_weight(graph, f"{name}.folded", ir.tensor(new_bias)))
            if bias is not None:
                drop(graph, bias)
            ledger.changed(conv, FOLDING(op_type=node.op_type, node=node.name), [node, weight])
            take_place(node.outputs[0], conv.outputs[0])
            remove(node)


def _is_convolution(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == ("", "Conv")


def _terms_of(node: ir.Node, conv: ir.Node, operand: int) -> tuple[Doubles, Doubles] | Fact:
    """Return what a node multiplies each channel of a convolution with and then adds, or why that cannot be folded."""
    result, weight = conv.outputs[0], weight_of(conv, 1)
    if len(result.uses()) != 1 or result.is_graph_output():
        return OTHER_READER()
    has_bias = len(conv.inputs) > 2 and conv.inputs[2] is not None
    if weight is None or weight.dtype != ir.DataType.FLOAT or (has_bias and weight_of(conv, 2) is None):
        return WEIGHT_COMPUTED()
    assert weight.const_value is not None
    channels = int(weight.const_value.shape.numpy()[0])
    if node.op_type == "BatchNormalization":
        if node.attributes.get_int("training_mode", 0) or len(node.outputs) > 1:
            return TRAINING()
        vectors = [_numbers(node, index) for index in range(1, 5)]
        if any(vector is None for vector in vectors):
            return NOT_CONSTANT()
        gain, shift, mean, variance = (vector for vector in vectors if vector is not None)
        factors = gain / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
        return factors, shift - factors * mean
    numbers = _numbers(node, 1 - operand)
    if numbers is None:
        return NOT_CONSTANT()
    rank = len(weight.const_value.shape)
    shape = (1,) * (rank - numbers.ndim) + numbers.shape
    if len(shape) != rank or numbers.size not in (1, channels) or (numbers.size > 1 and shape[1] != channels):
        return NOT_BY_CHANNEL()
    terms = np.broadcast_to(numbers.ravel(), channels)
    if node.op_type in ("Add", "Sub"):
        return np.ones(channels), terms if node.op_type == "Add" else -terms
    if node.op_type == "Div" and not terms.all():
        return NOT_CONSTANT()
    return (terms if node.op_type == "Mul" else 1 / terms), np.zeros(channels)


def _numbers(node: ir.Node, index: int) -> Doubles | None:
    value = weight_of(node, index)
    if value is None or value.const_value is None or value.dtype != ir.DataType.FLOAT:
        return None
    numbers: Doubles = value.const_value.numpy().astype(np.float64)
    return numbers
