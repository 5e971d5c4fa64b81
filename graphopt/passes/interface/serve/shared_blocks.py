"""Attention over pages of each row becomes attention over blocks that requests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.ports import GROWING, SCALES, STATES, CachePort
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import shared_constant
from graphopt.graph.weights import new_weight
from graphopt.runtime_ops import OPERATORS
from graphopt.runtime_ops import port as input_of
from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, STREAMING
from graphopt.runtime_ops.paged_attention.spec.layout import latent_width, width

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.passes.interface.serve.packed_tokens import PackedTokens

READS_LESS = Rule("serve.reads-less", "it reads a part of its cache: leave out the step sparse_kv")
STORED_AS = Rule("serve.stored-as", "its cache cannot be stored so in blocks that requests share: {why}")


def why_not_shared(node: ir.Node, layer: PagedLayer, block: int) -> Fact | None:
    """Return why ``PagedAttention`` on blocks of so many tokens cannot compute what the ``KVAttention`` node does.

    ``None`` where it can.

    Args:
        node: of the layer.
        layer: as it is to be stored.
        block: tokens of a block.
    """
    kv, sinks = layer.attributes, input_of(node, "sink_query")
    has_window = set(kv.policies) == {STREAMING} and not kv.sinks and kv.window and kv.recent >= kv.window
    if not (set(kv.policies) == {DENSE} or has_window) or kv.compensate:
        return READS_LESS()
    if sinks is not None and sinks.shape is not None and len(sinks.shape) > 1:
        return READS_LESS()
    return why_not_stored(layer, block)


def why_not_stored(layer: PagedLayer, block: int) -> Fact | None:
    """Return why blocks of so many tokens cannot store a layer; ``None`` where they can."""
    kv = layer.attributes
    if min(kv.clip, kv.share_of_values) < 1:
        return STORED_AS(why="tokens are rounded one by one, and their codes are not clipped: leave clip out")
    if kv.value_storage:
        return STORED_AS(why=f"blocks store keys and values alike, not {kv.storage_name}: leave value_storage out")
    try:
        _width(layer, block)
    except ValueError as error:
        return STORED_AS(why=str(error))
    return None


def block_bytes(layer: PagedLayer, block: int) -> int:
    """Return the bytes that a layer has in a block of so many tokens."""
    kv = layer.attributes
    scale = 0 if kv.levels is None else 4
    return 2 * block * kv.kv_heads * (_width(layer, block) * kv.stored.dtype.itemsize + scale)


def _width(layer: PagedLayer, block: int) -> int:
    """Return W of blocks of so many tokens.

    Raises:
        ValueError: heads or latents of this layer cannot be stored in them as they are now.
    """
    if layer.attributes.value_size:
        return latent_width(layer.head_size, layer.attributes.storage, block)
    return width(layer.head_size, layer.attributes.storage)


def share_blocks(
    graph: ir.Graph,
    node: ir.Node,
    layer: PagedLayer,
    tokens: PackedTokens,
    block: int,
    choose: Callable[[Sequence[ir.Value]], ir.Value] | None = None,
    *,
    has_residuals: bool = False,
) -> ir.Node:
    """Put ``PagedAttention`` where ``KVAttention`` stands, and its blocks where the pages are ports.

    Args:
        graph: of the node.
        node: the ``KVAttention``.
        layer: as it is to be stored.
        tokens: of the graph.
        block: tokens of a block.
        choose: makes, of the blocks of keys and values, the positions that tokens read; ``None`` where they read all.
        has_residuals: whether the newest tokens of a block of integers have second codes.
    """
    kv = layer.attributes
    names = ("kv_heads", "window", "scale", "softcap", "storage")
    attributes = {name: getattr(kv, name) for name in names}
    attributes |= {name: getattr(kv, name) for name in ("value_size", "chunks", "key_feedback") if getattr(kv, name)}
    if has_residuals:
        attributes["residuals"] = 1
    shape: list[int | str | None] = ["num_blocks", block, kv.kv_heads, _width(layer, block)]
    dtype = ir.DataType.from_numpy(kv.stored.dtype)
    if kv.slopes:
        attributes["slopes"] = list(kv.slopes)
    pools = {part: ir.val(CachePort(layer.number, part).past, dtype, shape) for part in GROWING}
    if kv.levels is not None:
        pools |= {part: ir.val(CachePort(layer.number, part).past, ir.DataType.FLOAT, shape[:3]) for part in SCALES}
    inputs = {name: input_of(node, name) for name in ("query", "key", "value", "sink_logits")}
    inputs |= {"starts": tokens.starts, "past": tokens.past, "block_table": tokens.table}
    no_scales = shared_constant(graph, "serve.no_scales", np.zeros(0, np.float32))
    states = dict(zip((*GROWING, *SCALES), ("keys", "values", "key_scales", "value_scales"), strict=True))
    inputs |= {state: pools.get(part, no_scales) for part, state in states.items()}
    if kv.key_feedback:
        inputs["feedback"] = wide_feedback(graph, node, layer)
    if choose is not None:
        no_feedback = shared_constant(graph, "serve.no_feedback", np.zeros(0, np.float16))
        inputs |= {"feedback": no_feedback, "choice": choose([pools[part] for part in GROWING])}
        attributes["chooses"] = 1
    attention = OPERATORS["PagedAttention"].node(inputs, attributes, name=node.name)
    attention.metadata_props.update(node.metadata_props)
    for state in STATES:
        old = input_of(node, state)
        if old is not None and old.is_graph_input():
            graph.inputs.remove(old)
    for output in node.outputs[1:]:
        if output.is_graph_output():
            graph.outputs.remove(output)
    y = node.outputs[0]
    name = y.name
    attention.outputs[0].type, attention.outputs[0].shape = y.type, y.shape
    graph.insert_before(node, attention)
    y.replace_all_uses_with(attention.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)
    attention.outputs[0].name = name
    for part, value in zip(states, attention.outputs[1:], strict=True):
        port = CachePort(layer.number, part)
        value.name = port.present if part in pools else f"{name}.no_{part}"
        if part in pools:
            value.type, value.shape = pools[part].type, ir.Shape(shape[: 4 if part in GROWING else 3])
            graph.outputs.append(value)
    graph.inputs.extend(pools.values())
    return attention


def wide_feedback(graph: ir.Graph, node: ir.Node, layer: PagedLayer) -> ir.Value:
    """Return the feedback of a node, [Hk, D, D], with zeros for the channels and heads that ``layer`` has besides."""
    value = input_of(node, "feedback")
    assert value is not None and value.const_value is not None
    matrices = value.const_value.numpy()
    heads, channels = layer.attributes.kv_heads - len(matrices), layer.head_size - matrices.shape[1]
    if not heads and not channels:
        return value
    wide = np.pad(matrices, ((0, heads), (0, channels), (0, channels)))
    return new_weight(graph, f"{value.name}.wide", ir.tensor(wide))
