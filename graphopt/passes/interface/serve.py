"""Caches in pages become a pool of blocks that requests share: what an engine that batches continuously feeds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter

from graphopt.analysis.structure.paged_caches import PagedLayer, describe, kv_nodes, layer_of
from graphopt.analysis.structure.ports import (
    BLOCK_TABLE,
    GROWING,
    INPUT_IDS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    PAST_LENGTHS,
    POOL,
    POSITION_IDS,
    SCALES,
    STARTS,
    STATES,
    CachePort,
    past_port,
)
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import Inserter, name_output, shared_constant
from graphopt.passes.base import Pass
from graphopt.passes.common.lm_head_path import path_to_lm_head
from graphopt.passes.common.paging.paged_attention import page_attention
from graphopt.runtime_ops import OPERATORS, bodies_aside
from graphopt.runtime_ops import port as input_of
from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, STREAMING
from graphopt.runtime_ops.paged_attention.spec.layout import width

if TYPE_CHECKING:
    from graphopt.passes.context import Context

_PAGE = 64
_END = 1 << 62
_INT64 = ir.DataType.INT64

SHARES = Rule(
    "serve.shares", "its cache lies in blocks of {block} tokens, of {blocks} that requests share", rounded="; {rounded}"
)
LAST_OF_EACH = Rule("serve.last-of-each", "logits of the last token of each request")
READS_LESS = Rule("serve.reads-less", "it reads a part of its cache: leave out the step sparse_kv")
STORED_AS = Rule("serve.stored-as", "its cache cannot be stored so in blocks that requests share: {why}")
TOKEN_SCALES = Rule("serve.rounded", "each token is stored as {storage} with scales of its own")
NO_BLOCKS = Rule("serve.no-blocks", "a block of all layers takes {block} bytes, and the memory for caches is {memory}")
OTHER_LAYER = Rule("serve.other-layer", "{node} has to stay, and a graph has one kind of cache")
RECURRENT_STATES = Rule(
    "serve.recurrent-states",
    "{state} belongs to one row: requests that share a row of tokens cannot share it, and blocks do not hold it",
)
LATENT_BLOCKS = Rule("serve.latent-blocks", "its cache holds latents, and blocks hold keys and values of the same size")
NO_LAST_LOGITS = Rule("serve.no-last-logits", "logits cannot be made for the last token of each request: {why}")


def _bytes_of(size: object) -> int:
    return int(TypeAdapter(ByteSize).validate_python(size))


class Serve(Pass):
    """Let requests of an engine share a pool of blocks: the graph that onnxruntime-genai's ``Engine`` drives.

    before::

        input_ids, position_ids [batch, length]
        y, keys, values = KVAttention(q, k, v, past_length, new_length, ..., keys, values)   pages of each row
        logits                                                                              [batch, length, vocabulary]

    after::

        input_ids [tokens], cumulative_sequence_lengths [batch + 1], past_sequence_lengths [batch], block_table
        y, key, value = PagedAttention(q, k, v, cumulative_sequence_lengths, past_sequence_lengths, block_table, ...)
        logits                                                                              [batch, vocabulary]

    The new tokens of all requests stand one behind the other, so a prompt and single tokens share a call and nothing is
    padded: the graph computes as one row of all tokens, since all but attention treats each token by itself. The token
    t of request b has the position past[b] + t - cumulative[b]. Its key lies in the block that the table names, and
    requests with a common prefix name the same blocks (PagedAttention, Kwon et al. 2023). Logits are those of the last
    token of each request, so the lm_head sees one row for each.

    A cache that ``quantize_kv`` stores as int8 or int4 becomes blocks of integers with a scale for each token and head,
    in caches of their own under the same table: key[t, c] = scale[t] (code[t, c] - L / 2), L = 255 or 15, values
    likewise. So a block never changes once it is full, and any request may read it; but there is no scale for a channel
    that is large throughout, as in pages: rotate queries and keys first (QuaRot, Ashkboos et al. 2024). That rounds
    otherwise than the pages did, and the newest tokens too, so the step is lossy then.

    Standard attention is rewritten as by ``page_kv`` first. The engine runs the artifact by its ``genai_config.json``;
    graphopt's own commands do not.

    Attributes:
        block: tokens of a block. Short ones waste less at the end of a request, and a prefix of fewer tokens is
            shared; blocks of 16 were read at 1.2 times the time of longer ones.
        memory: bytes of all caches together, such as ``4GB``: the number of blocks that an engine allocates.
    """

    name: ClassVar[str] = "serve"
    effect: ClassVar[Effect] = "exact"

    block: Literal[16, 32, 64, 128] = 64
    memory: Annotated[int, BeforeValidator(_bytes_of), Field(ge=1)] = 1 << 30

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rewrite all caches of the graph, or none."""
        graph, ledger = model.graph, context.ledger
        states = [value for value in graph.inputs if (port := past_port(value)) is not None and port.is_recurrent]
        if states:
            ledger.skipped("graph", RECURRENT_STATES(state=states[0].name))
            return
        page_attention(model, context, _PAGE)
        nodes = kv_nodes(graph)
        if not nodes:
            return
        logits = next(value for value in graph.outputs if value.name == LOGITS)
        path = path_to_lm_head(graph, logits)
        refusals = {node: refusal for node in nodes if (refusal := _why_not(node)) is not None}
        layers = {node: layer_of(node) for node in nodes}
        size = 0 if refusals else sum(_block_bytes(layer, self.block) for layer in layers.values())
        blocks = self.memory // max(1, size)
        reason: Fact | None = None
        if refusals:
            reason = OTHER_LAYER(node=next(iter(refusals)).name)
        elif isinstance(path, Fact):
            reason = NO_LAST_LOGITS(why=path)
        elif not blocks:
            reason = NO_BLOCKS(block=size, memory=int(self.memory))
        if reason is not None:
            for node in nodes:
                ledger.skipped(node, refusals.get(node, reason))
            return
        assert not isinstance(path, Fact)
        ports = _pack_tokens(graph)
        for node, layer in layers.items():
            attention = _share_blocks(graph, node, layer, ports, self.block)
            storage = layer.attributes.storage
            rounding = TOKEN_SCALES(storage=storage) if layer.attributes.levels is not None else None
            ledger.changed(attention, SHARES(block=self.block, blocks=blocks, rounded=rounding), [node])
            if rounding is not None:
                ledger.report.effect = "lossy"
        _last_of_each(graph, path, ports[0])
        ledger.changed(path[-1], LAST_OF_EACH(), [path[-1]])
        for name in (PAST_LENGTH, NEW_LENGTH):
            graph.inputs.remove(next(value for value in graph.inputs if value.name == name))
        with bodies_aside(model):
            RemoveUnusedNodesPass()(model)
        describe(model)
        model.metadata_props[POOL] = json.dumps({"block_size": self.block, "num_blocks": int(blocks)})


def _why_not(node: ir.Node) -> Fact | None:
    kv, sinks = layer_of(node).attributes, input_of(node, "sink_query")
    has_window = set(kv.policies) == {STREAMING} and not kv.sinks and kv.window and kv.recent >= kv.window
    if kv.value_size:
        return LATENT_BLOCKS()
    if not (set(kv.policies) == {DENSE} or has_window) or kv.compensate:
        return READS_LESS()
    if sinks is not None and sinks.shape is not None and len(sinks.shape) > 1:
        return READS_LESS()
    if kv.clip < 1:
        return STORED_AS(why="tokens are rounded one by one, and their codes are not clipped: leave clip out")
    try:
        width(layer_of(node).head_size, kv.storage)
    except ValueError as error:
        return STORED_AS(why=str(error))
    return None


def _block_bytes(layer: PagedLayer, block: int) -> int:
    kv = layer.attributes
    scale = 0 if kv.levels is None else 4
    return 2 * block * kv.kv_heads * (width(layer.head_size, kv.storage) * kv.stored.dtype.itemsize + scale)


def _pack_tokens(graph: ir.Graph) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Let the graph take tokens one behind the other, as its only row; return starts, past and block table."""
    tokens = next(value for value in graph.inputs if value.name == INPUT_IDS)
    position = list(graph.inputs).index(tokens)
    token_rows = ir.val(f"{INPUT_IDS}.packed", tokens.dtype, ["tokens"])
    starts = ir.val(STARTS, ir.DataType.INT32, ["batch_plus_one"])
    past = ir.val(PAST_LENGTHS, ir.DataType.INT32, ["batch_size"])
    table = ir.val(BLOCK_TABLE, ir.DataType.INT32, ["batch_size", "blocks_of_request"])
    _as_one_row(graph, tokens)
    make = Inserter(graph, graph[0], "tokens")
    front = make.integers([0])
    tokens.replace_all_uses_with(make.op("Unsqueeze", [token_rows, front], [1, "tokens"], tokens.dtype, "row"))
    positions = next((value for value in graph.inputs if value.name == POSITION_IDS), None)
    if positions is not None:
        row = make.op("Unsqueeze", [_positions(make, token_rows, starts, past), front], [1, "tokens"], _INT64, "at")
        positions.replace_all_uses_with(row)
        graph.inputs.remove(positions)
    graph.inputs.remove(tokens)
    graph.inputs.insert(position, token_rows)
    token_rows.name = INPUT_IDS
    graph.inputs.extend([starts, past, table])
    return starts, past, table


def _positions(make: Inserter, tokens: ir.Value, starts: ir.Value, past: ir.Value) -> ir.Value:
    """Return the position of each token, int64 [tokens]: past[b] + t - starts[b] for the token t of request b."""
    wide = [make.op("Cast", [value], value.shape, _INT64, f"{value.name}.wide", to=_INT64) for value in (starts, past)]
    count = make.op("Size", [tokens], [], _INT64, "count")
    token = make.op("Range", [make.integers(0), count, make.integers(1)], ["tokens"], _INT64, "number")
    ends = make.op("Slice", [wide[0], make.integers([1]), make.integers([_END])], ["batch_size"], _INT64, "ends")
    column = make.op("Unsqueeze", [token, make.integers([1])], ["tokens", 1], _INT64, "column")
    dims = ["tokens", "batch_size"]
    is_behind = make.op("GreaterOrEqual", [column, ends], dims, ir.DataType.BOOL, "behind")
    counts = make.op("Cast", [is_behind], dims, _INT64, "counted", to=_INT64)
    request = make.op("ReduceSum", [counts, make.integers([1])], ["tokens"], _INT64, "request", keepdims=0)
    first, before = (
        make.op("Gather", [offsets, request], ["tokens"], _INT64, f"{offsets.name}.its") for offsets in wide
    )
    inside = make.op("Sub", [token, first], ["tokens"], _INT64, "inside")
    return make.op("Add", [before, inside], ["tokens"], _INT64, "position")


def _as_one_row(graph: ir.Graph, tokens: ir.Value) -> None:
    """State in all shapes that there is one row, of all tokens."""
    assert tokens.shape is not None
    batch, length = (str(dim) for dim in tokens.shape)
    names: dict[str, int | str] = {batch: 1, length: "tokens"}
    for node in graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([names.get(str(dim), dim) for dim in value.shape])


def _share_blocks(
    graph: ir.Graph, node: ir.Node, layer: PagedLayer, ports: tuple[ir.Value, ...], block: int
) -> ir.Node:
    """Put ``PagedAttention`` where ``KVAttention`` stands, and its blocks where the pages are ports."""
    kv = layer.attributes
    names = ("kv_heads", "window", "scale", "softcap", "storage")
    attributes = {name: getattr(kv, name) for name in names}
    shape: list[int | str | None] = ["num_blocks", block, kv.kv_heads, width(layer.head_size, kv.storage)]
    dtype = ir.DataType.from_numpy(kv.stored.dtype)
    pools = {part: ir.val(CachePort(layer.number, part).past, dtype, shape) for part in GROWING}
    if kv.levels is not None:
        pools |= {part: ir.val(CachePort(layer.number, part).past, ir.DataType.FLOAT, shape[:3]) for part in SCALES}
    inputs = {name: input_of(node, name) for name in ("query", "key", "value", "sink_logits")}
    inputs |= dict(zip(("starts", "past", "block_table"), ports, strict=True))
    no_scales = shared_constant(graph, "serve.no_scales", np.zeros(0, np.float32))
    states = dict(zip((*GROWING, *SCALES), ("keys", "values", "key_scales", "value_scales"), strict=True))
    inputs |= {state: pools.get(part, no_scales) for part, state in states.items()}
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


def _last_of_each(graph: ir.Graph, path: list[ir.Node], starts: ir.Value) -> None:
    """Make logits [batch, vocabulary] of the last token of each request."""
    lm_head = path[-1]
    x = lm_head.inputs[0]
    assert x is not None and x.shape is not None
    make = Inserter(graph, lm_head, "last")
    bounds = make.integers([1]), make.integers([_END])
    ends = make.op("Slice", [starts, *bounds], ["batch_size"], starts.dtype, "ends")
    unit = shared_constant(graph, "serve.one_int32", np.array(1, np.int32))
    newest = make.op("Sub", [ends, unit], ["batch_size"], starts.dtype, "newest")
    newest_rows = make.op("Gather", [x, newest], [1, "batch_size", x.shape[2]], x.dtype, "rows", axis=1)
    lm_head.replace_input_with(0, newest_rows)
    for node in path:
        output = node.outputs[0]
        assert output.shape is not None
        output.shape = ir.Shape([1, "batch_size", output.shape[2]])
    rows = path[0].outputs[0]
    assert rows.shape is not None
    front = make.integers([0])
    flat = ir.node("Squeeze", [rows, front], name="logits.of_requests")
    name_output(flat, rows, ["batch_size", rows.shape[2]], name=LOGITS)
    graph.append(flat)
    position = list(graph.outputs).index(rows)
    graph.outputs.remove(rows)
    graph.outputs.insert(position, flat.outputs[0])
    rows.name = f"{LOGITS}.one_row"
