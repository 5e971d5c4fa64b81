"""Attention over a cache that grows becomes attention that owns its cache, in pages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.analysis.structure.paged_caches import OPERATOR, PagedLayer, describe, kv_nodes
from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    INDEXER,
    NEW_LENGTH,
    PAST_LENGTH,
    past_port,
    present_port,
    token_port,
)
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, inherit, remove
from graphopt.passes.common.masks import MaskEvaluator, drop_guard
from graphopt.passes.common.nodes import attentions
from graphopt.passes.common.paging.attention import HEAD_SIZE, Latent, Meaning, latent_of, meaning_of
from graphopt.passes.common.paging.rows import as_rows, read_rows
from graphopt.passes.common.paging.states import connect
from graphopt.passes.common.paging.token_masks import mask_by_lengths, masked_recurrences, why_not_by_lengths
from graphopt.passes.common.paging.token_wise import of_new_tokens, token_wise_of
from graphopt.passes.common.paging.wider_heads import pad_heads, widen
from graphopt.passes.common.sinks import by_head, no_sinks, sinks_of
from graphopt.runtime_ops import OPERATORS, bodies_aside, port
from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, MOST_CHANNELS, STREAMING, KVAttributes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from graphopt.passes.common.choices import Choice
    from graphopt.passes.context import Context, Ledger

    WhyNotChosen = Callable[[Mapping[ir.Node, PagedLayer], Mapping[ir.Node, Choice]], Fact | None]

Page = Literal[16, 32, 64, 128]

_KEY, _VALUE, _MASK, _PAST_KEY, _PAST_VALUE = range(1, 6)


OWNS_CACHE = Rule(
    "page_kv.owns-cache",
    "owns its cache, in pages of {page} tokens",
    window=", a window of {window} tokens",
    chunk=", chunks of {chunk} tokens",
    sinks=", with logits of sinks",
    biases=", with biases by distance",
    source=", and stores the keys and values of {source} once more",
    stored=", with heads of {size} numbers stored as {stored}",
    also=["size"],
)
LENGTHS = Rule("page_kv.lengths", "lengths per row say what is padding: past_length, new_length")
BIAS_ON_GPUS = Rule("page_kv.bias-on-gpus", "its scores have a bias by distance, for which GPUs have no kernel")
NO_ATTENTION = Rule("page_kv.no-attention", "it has no standard Attention; canonicalize lifts what exporters spell out")
ONE_KIND = Rule("page_kv.one-kind", "{node} has to stay, and a graph has one kind of cache")
LEFT_OUT = Rule("page_kv.left-out", "it was left out when the other layers got caches in pages")
CHOOSES = Rule(
    "page_kv.chooses",
    "a trained indexer chooses the tokens that it reads, which pages do not know; blocks of the step serve do",
)
READ_TOO = Rule("page_kv.read-too", "{op} {node} reads {input} too, which a graph with a cache in pages does not have")


def page_attention(
    model: ir.Model, context: Context, page: int, why_not_chosen: WhyNotChosen | None = None
) -> dict[ir.Node, Choice]:
    """Rewrite all standard attention over caches to ``KVAttention`` on dense float32 pages, or say why not.

    Args:
        model: to be rewritten.
        context: of the pass.
        page: tokens of a page.
        why_not_chosen: says, of the layers as they would be and of what trained indexers choose for some of them, why
            the caller cannot let these read no more than that; ``None`` where it can. Without it they stay.

    Returns:
        Of each ``KVAttention`` of which an indexer chooses the positions, by what it does. Where there are any, the
        caller drops nodes and ports that nothing reads, keys of indexers and ``attention_mask`` among them.
    """
    graph, nodes, ledger = model.graph, attentions(model), context.ledger
    if not nodes and not kv_nodes(graph):
        ledger.skipped("graph", NO_ATTENTION())
    if not nodes:
        return {}
    evaluator = MaskEvaluator(model, context)
    meanings = {node: meaning_of(node, evaluator) for node in nodes}
    refusals = {
        node: refusal
        for node, meaning in meanings.items()
        if (refusal := meaning if isinstance(meaning, Fact) else _why_not_on(context.target, meaning)) is not None
    }
    layers = {node: meaning for node, meaning in meanings.items() if isinstance(meaning, Meaning)}
    choices = {node: meaning.choice for node, meaning in layers.items() if meaning.choice is not None}
    refusals = refusals or _choices_that_stay(layers, choices, page, why_not_chosen)
    recurrences = masked_recurrences(graph)
    reason: Fact | None = None
    if refusals:
        reason = ONE_KIND(node=next(iter(refusals)).name)
    elif kv_nodes(graph):
        reason = LEFT_OUT()
    else:
        for node in nodes:
            _drop_guards(evaluator, node, ledger)
        _batch_from_tokens(graph)
        reason = why_not_by_lengths(recurrences, evaluator) or _other_reader(graph, recurrences)
    if reason is not None:
        for node in nodes:
            ledger.skipped(node, refusals.get(node, reason))
        return {}
    lengths = [ir.val(name, ir.DataType.INT64, [_rows(graph)]) for name in (PAST_LENGTH, NEW_LENGTH)]
    graph.inputs.extend(lengths)
    mask_by_lengths(graph, recurrences, _tokens(graph), lengths[1], ledger)
    attention_of: dict[ir.Node, ir.Node] = {}
    rows_of: dict[ir.Value, ir.Value] = {}
    for node in choices:  # what makes the mask stays, as the caller makes scores of it, and does not go with the node
        node.replace_input_with(_MASK, None)
    for node, meaning in _with_own_numbers(layers):
        source = None if meaning.source is None else attention_of[meaning.source]
        attention_of[node] = _rewrite(graph, node, meaning, source, lengths, page, ledger, rows_of)
    if choices:
        describe(model)
        return {attention_of[node]: choice for node, choice in choices.items()}
    with bodies_aside(model):
        RemoveUnusedNodesPass()(model)
    for value in [value for value in graph.inputs if value.name == ATTENTION_MASK]:
        graph.inputs.remove(value)
        ledger.report_change(ATTENTION_MASK, LENGTHS())
    describe(model)
    return {}


def _choices_that_stay(
    layers: Mapping[ir.Node, Meaning],
    choices: Mapping[ir.Node, Choice],
    page: int,
    why_not_chosen: WhyNotChosen | None,
) -> dict[ir.Node, Fact]:
    """Return why layers of which an indexer chooses the positions stay, each; none where the caller takes them."""
    if not choices:
        return {}
    refusal: Fact | None = CHOOSES()
    if why_not_chosen is not None:
        refusal = why_not_chosen({node: _layer(meaning, page) for node, meaning in layers.items()}, choices)
    return {} if refusal is None else dict.fromkeys(choices, refusal)


def _why_not_on(target: str, meaning: Meaning) -> Fact | None:
    """Return why a target has no kernel for attention in pages, ``None`` where it has one."""
    if target != "ort-cuda":
        return None
    if meaning.slopes:
        return BIAS_ON_GPUS()
    return HEAD_SIZE(size=meaning.head_size, most=MOST_CHANNELS) if meaning.head_size > MOST_CHANNELS else None


def why_masks_stay(model: ir.Model, context: Context) -> Fact | None:
    """Return why the mask of a graph without attention says more than how many tokens a row has, or what else reads it.

    ``None`` where lengths can say it for all recurrences.
    """
    recurrences = masked_recurrences(model.graph)
    evaluator = MaskEvaluator(model, context)
    return why_not_by_lengths(recurrences, evaluator) or _other_reader(model.graph, recurrences)


def _with_own_numbers(meanings: Mapping[ir.Node, Meaning]) -> Iterator[tuple[ir.Node, Meaning]]:
    """Yield nodes and what they mean, those that read the cache of another one, or one with others, as own layers.

    They stand behind the nodes whose caches they read, and read them no longer.
    """
    numbers = itertools.count(1 + max(meaning.number for meaning in meanings.values()))
    readers = [node for node, meaning in meanings.items() if meaning.source is not None]
    for node in readers:
        for index in (_KEY, _VALUE):
            node.replace_input_with(index, None)
    numbers_in_use = set[int]()
    for node, meaning in meanings.items():
        is_first = meaning.source is None and meaning.number not in numbers_in_use
        yield node, meaning if is_first else replace(meaning, number=next(numbers))
        numbers_in_use.add(meaning.number)


def _rewrite(
    graph: ir.Graph,
    node: ir.Node,
    meaning: Meaning,
    source: ir.Node | None,
    lengths: list[ir.Value],
    page: int,
    ledger: Ledger,
    rows_of: dict[ir.Value, ir.Value],
) -> ir.Node:
    """Put ``KVAttention`` where ``node`` stands; return it.

    What reads the cache of a ``source`` stores the same keys and values in pages of its own.
    """
    placeholder = no_sinks(graph)
    latent = meaning.latent
    if latent is not None:
        rows = [*_latent_rows(graph, node, latent, meaning), placeholder]
    else:
        rows = _rows_of_heads(graph, node, meaning, source, rows_of)
    layer = _layer(meaning, page)
    inputs = dict(zip(("query", "key", "value", "past", "new"), (*rows, *lengths), strict=True))
    y_behind, sources = node.outputs[0], [node]
    inputs |= {"sink_logits": placeholder, "sink_query": placeholder}
    if meaning.sinks is not None:
        _, scaling = sinks_of(node) or (None, node)
        y_behind, sources = scaling.outputs[0], [node, scaling]
        inputs["sink_logits"] = by_head(Inserter(graph, node, node.name or "attention"), meaning.sinks)
    attention = OPERATORS[OPERATOR].node(inputs, layer.attributes.for_node(), name=node.name)
    inherit(attention, node)
    y, old = attention.outputs[0], y_behind
    y.name, y.type = f"{node.name}.rows", old.type
    assert rows[0].shape is not None
    width = meaning.query_heads * (meaning.value_size or meaning.head_size)
    y.shape = ir.Shape([*rows[0].shape[:2], width])
    graph.insert_before(node, attention)
    outside = latent or meaning.token_wise
    pasts = list(node.inputs[_PAST_KEY : _PAST_VALUE + 1]) if outside is None else list(outside.pasts)
    for present in node.outputs[1:3] if outside is None else outside.presents:
        if present.is_graph_output():
            graph.outputs.remove(present)
    if meaning.stored_size != meaning.head_size and latent is None:
        y = widen(graph, attention, replace(layer, head_size=meaning.head_size), layer)
    read_rows(graph, old, y, attention)
    if y_behind is not node.outputs[0] and sources[-1].graph is not None:
        remove(sources[-1])  # and with it all that only it reads
    if node.graph is not None:
        remove(node)
    for past in pasts:
        if past is not None and past.is_graph_input():  # several may read one cache, token by token
            graph.inputs.remove(past)
    connect(graph, attention, layer)
    figures = {
        "sinks": meaning.sinks is not None,
        "biases": True if meaning.slopes else None,
        "source": None if source is None else source.name,
    }
    tokens, is_chunk = meaning.window
    sizes = {"window": 0 if is_chunk else tokens, "chunk": tokens if is_chunk else None}
    if meaning.stored_size != meaning.head_size and not meaning.index_size:
        sizes |= {"size": meaning.head_size, "stored": meaning.stored_size}
    ledger.changed(attention, OWNS_CACHE(page=page, **sizes, **figures), sources)
    return attention


def _layer(meaning: Meaning, page: int) -> PagedLayer:
    """Return the layer that computes what attention means."""
    return PagedLayer(
        number=meaning.number,
        head_size=meaning.stored_size,
        attributes=KVAttributes(
            meaning.kv_heads,
            meaning.scale,
            softcap=meaning.softcap,
            window=meaning.window.tokens,
            chunks=int(meaning.window.is_chunk),
            page=page,
            policies=(STREAMING,) if meaning.window.tokens else (DENSE,),
            recent=max(1, meaning.window.tokens),
            value_size=meaning.value_size,
            slopes=meaning.slopes,
        ),
    )


def _rows_of_heads(
    graph: ir.Graph, node: ir.Node, meaning: Meaning, source: ir.Node | None, rows_of: dict[ir.Value, ir.Value]
) -> list[ir.Value]:
    """Return queries, new keys and new values, [batch, length, heads x size] each.

    Several nodes may read the same: ``rows_of`` holds what was made for others.
    """
    values = [value for value in node.inputs[:_MASK] if value is not None]
    if meaning.token_wise is not None:
        steps_and_new = zip(meaning.token_wise.steps, meaning.token_wise.new, strict=True)
        values[1:] = [of_new_tokens(graph, steps, new, node) for steps, new in steps_and_new]
    rows_of.update({value: as_rows(graph, value, node) for value in values if value not in rows_of})
    rows = [rows_of[value] for value in values]
    return rows if source is None else [*rows, *(new for new in source.inputs[_KEY:_MASK] if new is not None)]


def _latent_rows(graph: ir.Graph, node: ir.Node, latent: Latent, meaning: Meaning) -> list[ir.Value]:
    """Return queries [batch, length, heads x size], and the new rows of the cache [batch, length, size].

    The key of an indexer stands behind those that attention reads, where queries have zeros.
    """
    query = node.inputs[0]
    assert query is not None
    queries, *parts = (as_rows(graph, value, node) for value in (query, *latent.parts))
    insert = Inserter(graph, node, node.name or "attention")
    if meaning.index_size:
        assert meaning.choice is not None
        parts.append(meaning.choice.new)
        heads = meaning.query_heads
        queries = pad_heads(insert, queries, (heads, meaning.head_size), (heads, meaning.stored_size), "query_of_row")
    if len(parts) > 1:
        dims = [None] * 2 if parts[0].shape is None else list(parts[0].shape)[:2]
        widths = [int(str(part.shape[-1])) for part in parts if part.shape is not None]
        parts = [insert.op("Concat", parts, [*dims, sum(widths)], parts[0].dtype, "row", axis=-1)]
    return [queries, *parts]


def _drop_guards(evaluator: MaskEvaluator, node: ir.Node, ledger: Ledger) -> None:
    mask = node.inputs[_MASK] if len(node.inputs) > _MASK else None
    if mask is not None:
        drop_guard(evaluator, node, mask, ledger)


def _tokens(graph: ir.Graph) -> ir.Value:
    """Return the input with a place for each new token."""
    tokens = token_port(graph)
    assert tokens is not None
    return tokens


def _rows(graph: ir.Graph) -> str | int:
    shape = _tokens(graph).shape
    assert shape is not None
    return shape[0] if isinstance(shape[0], int) else str(shape[0].value)


def _batch_from_tokens(graph: ir.Graph) -> None:
    """Let what reads the batch size from a cache or the mask read it from the tokens."""
    tokens = _tokens(graph)
    for node in graph:
        x = node.inputs[0] if node.inputs else None
        if node.op_type == "Shape" and x is not None and x.is_graph_input() and x is not tokens:
            span = node.attributes.get_int("start", 0), node.attributes.get_int("end", 99)
            if span == (0, 1):
                node.replace_input_with(0, tokens)


def is_of_indexer(value: ir.Value) -> bool:
    """Return whether an input or output of a graph has keys of an indexer."""
    port = past_port(value) or present_port(value)
    return port is not None and port.part == INDEXER


def _other_reader(graph: ir.Graph, recurrences: Collection[ir.Node]) -> Fact | None:
    """Return what else reads the inputs that are to go than caches and masks of attention, and masks of recurrences."""
    going = {
        value
        for value in graph.inputs
        if value.name == ATTENTION_MASK or ((cache := past_port(value)) is not None and not cache.is_recurrent)
    }
    latents = {
        node: latent for node in graph if node.op_type == "Attention" and (latent := latent_of(node)) is not None
    }
    readers = {
        node: token_wise
        for node in graph
        if node.op_type == "Attention" and (token_wise := token_wise_of(node)) is not None
    }
    presents = {present for latent in latents.values() for present in latent.presents}
    presents |= {present for token_wise in readers.values() for present in token_wise.presents}
    outputs = [value for value in graph.outputs if value not in presents and not is_of_indexer(value)]
    waiting, visits = [value.producer() for value in outputs], set[ir.Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in visits:
            continue
        visits.add(node)
        inner = [
            value
            for attribute in node.attributes.values()
            if attribute.type == ir.AttributeType.GRAPH
            for inside in attribute.as_graph().all_nodes()
            for value in inside.inputs
        ]
        standard = node.op_type == "Attention" and not node.domain
        inputs = node.inputs[:_MASK] if standard else node.inputs
        if node in latents:
            inputs = [node.inputs[0], *latents[node].parts]
        if node in readers:
            inputs = [node.inputs[0], *readers[node].new]
        if node in recurrences:
            inputs = [value for value in inputs if value is not port(node, "mask")]
        for value in [*inputs, *inner]:
            if value in going and value is not None:
                return READ_TOO(op=node.op_type, node=node.name, input=value.name)
            if value is not None:
                waiting.append(value.producer())
    return None
