"""What one token takes at a node: arithmetic operations, and bytes of weights and caches that are read.

One sequence, one new token, ``context`` tokens before it. Counted are products, attention and what reads weights;
elementwise arithmetic and activations are left out. Of a product over chosen experts the share counts that is chosen.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from graphopt.analysis.structure.contrib import head_sizes
from graphopt.analysis.structure.cost import is_weight, reader_of
from graphopt.analysis.structure.folding.labels import dims, matrix_of
from graphopt.analysis.structure.paged_caches import OPERATOR, PagedLayer, layer_of
from graphopt.analysis.structure.products import expert_count
from graphopt.errors import InputError
from graphopt.runtime_ops import DECODING, DOMAIN, Cost

if TYPE_CHECKING:
    from collections.abc import Collection

    import onnx_ir as ir

    from graphopt.analysis.structure.folding import Mixer


def constants_of(node: ir.Node, constant: Collection[ir.Node]) -> list[ir.Value]:
    """Return the initializers that a node reads as a weight, or as scales of one, by itself or through other nodes.

    Args:
        node: reads them.
        constant: the nodes that read nothing but constants.
    """
    constants: dict[ir.Value, None] = {}
    waiting = [value for value in node.inputs if value is not None]
    while waiting:
        value = waiting.pop(0)
        producer = value.producer()
        if producer is not None and producer in constant:
            waiting += [operand for operand in producer.inputs if operand is not None]
        tensor = value.const_value if value.is_initializer() else None
        if tensor is not None and (is_weight(value, tensor) or reader_of(value, DECODING) is not None):
            constants[value] = None
    return list(constants)


def token_cost(node: ir.Node, constant: set[ir.Node], share: float = 1.0) -> Cost | None:
    """Return what a token takes at a node that reads weights; ``None`` for one that reads none.

    Args:
        node: the node.
        constant: the nodes that read nothing but constants.
        share: of the tokens that pass it.
    """
    tensors = [value.const_value for value in constants_of(node, constant) if value.const_value is not None]
    if not tensors:
        return None
    if node.op_type.startswith("Gather"):
        rows = (tensor.nbytes / max(1, tensor.shape.numpy()[0]) for tensor in tensors)
        return Cost(operations=0, bytes=round(share * sum(rows)))
    size = sum(tensor.nbytes for tensor in tensors)
    matrix = matrix_of(node, constant)
    if matrix is None:
        return Cost(operations=0, bytes=round(share * size))
    if (experts := expert_count(node)) is not None:
        return Cost(operations=round(share * 2 * experts * prod(matrix)), bytes=round(share * size))
    # A part of a weight that several products share, such as the experts of one tensor.
    right = node.inputs[1]
    whole = max(prod(tensor.shape.numpy()) for tensor in tensors)
    part = 1.0 if right is not None and right.is_initializer() else min(1.0, prod(matrix) / max(1, whole))
    return Cost(operations=round(share * 2 * prod(matrix)), bytes=round(share * part * size))


def attention_cost(mixer: Mixer, context: int) -> Cost | None:
    """Return what a token takes at an attention, ``context`` tokens before it; ``None`` where its shapes are unknown.

    A query head multiplies and adds each number of the keys and of the values of each token once. The cache is read
    once. A window in a mask is not seen: what is counted is all of the context.
    """
    node = mixer.node
    if node.domain == DOMAIN and node.op_type == OPERATOR:
        try:
            return _paged_cost(layer_of(node), _width(mixer.query), context)
        except InputError:
            return None
    sizes = head_sizes(node) if node.domain == "com.microsoft" else None
    if sizes is not None:
        heads, groups, size = sizes
        query, key = heads * size, groups * size
    else:
        query, key = _width(mixer.query), _width(mixer.key)
    if not query or not key:
        return None
    type_of = None if mixer.key is None else mixer.key.dtype
    item = 4 if type_of is None else type_of.bitwidth / 8
    return Cost(operations=4 * query * context, bytes=round(2 * key * context * item))


def _paged_cost(layer: PagedLayer, query: int, context: int) -> Cost:
    kv = layer.attributes
    visible = min(context, kv.window or context)
    heads = range(len(kv.policies))
    tokens = sum(kv.policy_of(head).tokens_read(kv, visible) for head in heads) / len(heads)
    pages = max(1, -(-context // kv.page))
    density = layer.bytes(1, pages) / (pages * kv.page)
    return Cost(operations=round(4 * query * tokens), bytes=round(density * tokens))


def _width(value: ir.Value | None) -> int:
    """Return heads x head size of a query or key; 0 where it is not known."""
    sizes = [] if value is None else [size for size in dims(value) if size is not None]
    return prod(sizes) if sizes else 0
