"""Recurrent states of requests that share a graph: rows of equal length in front of a state, tokens again behind it.

    y, s' = LinearRecurrence(x [batch, length, ...], mask, s)
      ->
    x' [batch, longest, ...] = Gather(x [1, tokens, ...], rows);  y', s' = LinearRecurrence(x', mask', s)
    y [1, tokens, ...] = Gather(y' as [1, batch x longest, ...], columns)

Padding neither reads nor touches a state wherever it stands, so the new tokens of a request may stand in front of it. A
state belongs to a request and has a row in a pool of the engine, which puts zeros there when the request begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.ports import GROWING, CachePort, past_port
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, name_output
from graphopt.runtime_ops import DOMAIN, OPERATORS, Role, port, schema_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.context import Ledger
    from graphopt.passes.interface.serve.packed_tokens import PackedTokens

BY_REQUEST = Rule("serve.by-request", "its state {state} has a row for each request")
STATE_READER = Rule(
    "serve.state-reader",
    "{state} belongs to one request, and {op} {node}, which reads it, takes the tokens of all requests for one text",
)
EMPTY_BLOCKS = Rule(
    "serve.empty-blocks", "blocks of {block} tokens that hold nothing, which an engine counts tokens by"
)

_BATCH, _LONGEST = "batch_size", "longest"


def recurrent_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs that take recurrent states."""
    return [value for value in graph.inputs if (cache := past_port(value)) is not None and cache.is_recurrent]


def recurrent_nodes(graph: ir.Graph) -> list[ir.Node] | Fact:
    """Return the nodes with recurrent states, or what else reads one of these."""
    nodes: list[ir.Node] = []
    for state in recurrent_inputs(graph):
        for use in state.uses():
            node = use.node
            if node.domain != DOMAIN or node.op_type not in OPERATORS or port(node, "state") is not state:
                return STATE_READER(state=state.name, op=node.op_type, node=node.name)
            if not node.outputs[schema_of(node).output_index("new_state")].is_graph_output():
                return STATE_READER(state=state.name, op=node.op_type, node=node.name)
            nodes.append(node)
    return nodes


def give_each_request_a_row(graph: ir.Graph, nodes: Sequence[ir.Node], tokens: PackedTokens, ledger: Ledger) -> None:
    """Let nodes with a state take the new tokens of each request as a row.

    Args:
        graph: with tokens in one row.
        nodes: from :func:`recurrent_nodes`.
        tokens: of the graph.
        ledger: what is told of each.
    """
    for node in nodes:
        schema, insert = schema_of(node), Inserter(graph, node, f"{node.name}.by_request")
        for index, value in enumerate(node.inputs):
            if value is None or value.is_initializer() or schema.inputs[index].role != Role.DATA:
                continue
            dims = None if value.shape is None else list(value.shape)[2:]
            name = schema.inputs[index].name
            wide = None if dims is None else [1, _BATCH, _LONGEST, *dims]
            rows = insert.op("Gather", [value, tokens.rows], wide, value.dtype, f"{name}.gathered", axis=1)
            rows = insert.op(
                "Squeeze", [rows, insert.integers([0])], None if wide is None else wide[1:], value.dtype, name
            )
            node.replace_input_with(index, rows)
        node.replace_input_with(schema.index("mask"), tokens.mask)
        state, new_state = port(node, "state"), node.outputs[schema.output_index("new_state")]
        assert state is not None
        assert state.shape is not None
        state.shape = ir.Shape([_BATCH, *list(state.shape)[1:]])
        new_state.shape = state.shape
        _as_one_row(graph, node, tokens)
        ledger.changed(node, BY_REQUEST(state=state.name), [node])


def _as_one_row(graph: ir.Graph, node: ir.Node, tokens: PackedTokens) -> None:
    """Put the tokens of all requests one behind the other again, behind the output of ``node``."""
    y, name = node.outputs[0], f"{node.name}.of_tokens"
    assert y.shape is not None
    dims = list(y.shape)[2:]
    sizes = Inserter(graph, node, name).integers([1, -1, *(int(str(dim)) for dim in dims)])
    flat = ir.node("Reshape", [y, sizes], name=f"{name}.flat")
    gather = ir.node("Gather", [flat.outputs[0], tokens.columns], {"axis": 1}, name=f"{name}.gathered")
    name_output(flat, y, [1, "columns", *dims])
    name_output(gather, y, [1, "tokens", *dims])
    for use in list(y.uses()):
        if use.node is not flat:
            use.node.replace_input_with(use.idx, gather.outputs[0])
    graph.insert_after(node, [flat, gather])
    y.shape = ir.Shape([_BATCH, _LONGEST, *dims])


def number_states(graph: ir.Graph) -> None:
    """Give a layer's second state of a kind a number of its own: an engine tells states apart by kind and layer."""
    ports = [(value, cache) for value in graph.inputs if (cache := past_port(value)) is not None]
    number = 1 + max(cache.layer for _, cache in ports)
    presents = {value.name: value for value in graph.outputs}
    for value, cache in ports:
        kind = cache.part.rstrip("0123456789").rstrip("_")
        if cache.is_recurrent and kind != cache.part:
            new = CachePort(number, kind)
            value.name, presents[cache.present].name = new.past, new.present
            number += 1


def add_empty_blocks(graph: ir.Graph, block: int, ledger: Ledger) -> None:
    """Give a graph without attention a cache of blocks that nothing reads: an engine has no requests without blocks.

    One number of a token is there, since no size may be 0.
    """
    number = 1 + max(cache.layer for value in graph.inputs if (cache := past_port(value)) is not None)
    for part in GROWING:
        cache = CachePort(number, part)
        pool = ir.val(cache.past, ir.DataType.FLOAT, ["num_blocks", block, 1, 1])
        node = ir.node("Identity", [pool], name=f"{cache.past}.kept")
        present = node.outputs[0]
        present.name, present.dtype, present.shape = cache.present, ir.DataType.FLOAT, pool.shape
        graph.append(node)
        graph.inputs.append(pool)
        graph.outputs.append(present)
        ledger.changed(node, EMPTY_BLOCKS(block=block), [])
