"""Caches in pages become a pool of blocks that requests share: what an engine that batches continuously feeds."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter

from graphopt.analysis.structure.paged_caches import describe, kv_nodes, layer_of
from graphopt.analysis.structure.ports import ATTENTION_MASK, INPUT_IDS, LOGITS, NEW_LENGTH, PAST_LENGTH, POOL
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import Inserter, name_output, shared_constant
from graphopt.passes.base import Pass
from graphopt.passes.common.lm_head_path import nodes_of_product, path_to_lm_head
from graphopt.passes.common.nodes import attentions
from graphopt.passes.common.paging.paged_attention import is_of_indexer, page_attention, why_masks_stay
from graphopt.passes.common.paging.wider_heads import widen
from graphopt.passes.interface.serve.chosen_tokens import ChosenTokens, why_not_chosen
from graphopt.passes.interface.serve.equal_heads import WIDER_BLOCKS, equal_layers
from graphopt.passes.interface.serve.packed_tokens import END, PackedTokens
from graphopt.passes.interface.serve.request_states import (
    add_empty_blocks,
    give_each_request_a_row,
    number_states,
    recurrent_nodes,
)
from graphopt.passes.interface.serve.shared_blocks import block_bytes, share_blocks, why_not_shared, why_not_stored
from graphopt.runtime_ops import bodies_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.passes.common.choices import Choice
    from graphopt.passes.context import Context

_PAGE = 64
_BLOCK = 64
"""Tokens of a block, where the recipe does not say."""
_BLOCK_WITH_RESIDUALS = 128
"""The same where the newest tokens of a block have second codes: the longer a block is, the more of them do."""
_WITH_RESIDUALS = ("int4",)
_EMPTY_BLOCKS = 1 << 14
"""Blocks of a graph without attention: they hold nothing, and bound the tokens of all requests together."""

SHARES = Rule(
    "serve.shares",
    "its cache lies in blocks of {block} tokens, of {blocks} that requests share",
    widened="; {widened}",
    rounded="; {rounded}",
    chosen="; a token reads {chosen} of all, which an indexer chooses by keys behind those of attention",
)
LAST_OF_EACH = Rule("serve.last-of-each", "logits of the last token of each request")
TOKEN_SCALES = Rule("serve.rounded", "each token is stored as {storage} with scales of its own", newest=", {newest}")
RESIDUALS = Rule("serve.residuals", "the newest of a block that is not full with second codes in its free slots")
NO_RESIDUALS = Rule(
    "serve.no-residuals",
    "without second codes: on GPUs standard operators read blocks, and would copy them all to read some before writing",
)
LATER_KEYS = Rule(
    "serve.later-keys",
    "{node} chooses what it reads by keys that no layer up to it stores behind those of attention",
)
NO_BLOCKS = Rule("serve.no-blocks", "a block of all layers takes {block} bytes, and the memory for caches is {memory}")
OTHER_STORAGE = Rule(
    "serve.other-storage",
    "layers store their caches as {storages:and}, and an engine gives all layers one kind of block",
)
OTHER_LAYER = Rule("serve.other-layer", "{node} has to stay, and a graph has one kind of cache")
NO_TOKENS = Rule("serve.no-tokens", "it reads embeddings, and an engine feeds tokens")
NO_STATE = Rule(
    "serve.no-state", "it has neither attention over a cache nor a recurrent state that requests could have"
)
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

    A cache that ``quantize_kv`` stores as int8, int6 or int4 becomes blocks of integers with a scale for each token and
    head, in caches of their own under the same table: key[t, c] = scale[t] (code[t, c] - L / 2), L = 255, 63 or 15,
    values likewise. So a block never changes once it is full, and any request may read it; but there is no scale for a
    channel that is large throughout, as in pages: rotate queries and keys first (QuaRot, Ashkboos et al. 2024). That
    rounds otherwise than the pages did, and the newest tokens too, so the step is lossy then. int6 takes heads of a
    multiple of 64 channels.

    What int4 loses it loses by the newest tokens, which attention reads most. So while a block has free slots these
    hold what the codes of its newest tokens leave, rounded once more: of all as long as half of the block is free, then
    of as many as there are free slots. A query reads the sum of both::

        code(x) + code(x - code(x))            for tokens from 2 n - P on, of a block of P tokens that has n

    That takes no memory, is gone when the block is full, and hangs on positions alone: what a request reads is the same
    in any company, in any pieces and behind any prefix.

    Standard attention is rewritten as by ``page_kv`` first. The engine runs the artifact by its ``genai_config.json``;
    graphopt's own commands do not.

    A recurrent state has a row for each request, and what has it takes the new tokens of each request as a row, padded
    to the longest: padding touches no state::

        y, s' = LinearRecurrence(Gather(x, rows) [batch, longest, ...], mask, s [batch, ...])
        Gather(y, columns)                                                                   [1, tokens, ...]

    A latent (``absorb_latent``) is one row of a token, of which values are a part, and is stored once: half of a
    block's tokens lie among the keys and half among the values, which engines give the same bytes.

    The key of a trained indexer stands behind the latent of its token, where queries have zeros. Its scores are made by
    the nodes that the model has for them, of the keys that the blocks hold and the new ones, for each request as a row
    padded to the longest, and attention reads the tokens of the best::

        scores = f(K [batch, positions, size], Gather(x, rows) [batch, longest, ...])      f: as it was
        best   = TopK(Where(j <= p + i, scores, -inf))                                     p: past, i: of the new ones
        y, key, value = PagedAttention(..., best [1, tokens, k])

    Layers that share a choice have it from the layer with the indexer. What a mask means is found out by running it:
    causal, not padding, and among the tokens that are chosen.

    An engine gives all layers blocks of one shape. Where layers differ in the number or the size of their heads (Gemma
    4), queries, keys and values of the narrow ones get zeros behind them, and their output is cut. Narrow latents get
    zeros behind their rows.

    A model without attention gets blocks that hold nothing, since an engine counts tokens by blocks.

    Attributes:
        block: tokens of a block. By default 64, and 128 where the newest tokens have second codes, which more of them
            have in long blocks. Short ones waste less at the end of a request, and a prefix of fewer tokens is shared;
            blocks of 16 were read at 1.2 times the time of longer ones.
        memory: bytes of all caches together, such as ``4GB``: the number of blocks that an engine allocates.
        residuals: whether blocks of int4 keep second codes of their newest tokens in slots that are free.
    """

    name: ClassVar[str] = "serve"
    effect: ClassVar[Effect] = "exact"

    block: Literal[16, 32, 64, 128] | None = None
    memory: Annotated[int, BeforeValidator(_bytes_of), Field(ge=1)] = 1 << 30
    residuals: bool = True

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rewrite all states of the graph, or none."""
        graph, ledger = model.graph, context.ledger
        recurrent = recurrent_nodes(graph) if _reads_tokens(graph) else NO_TOKENS()
        if isinstance(recurrent, Fact):
            ledger.skipped("graph", recurrent)
            return
        has_attention = bool(attentions(model) or kv_nodes(graph))
        path = path_to_lm_head(graph, next(value for value in graph.outputs if value.name == LOGITS))
        refuse = partial(self._why_not_chosen, path, context.target)
        choices = page_attention(model, context, _PAGE, refuse) if has_attention else {}
        layers = {node: layer_of(node) for node in kv_nodes(graph)}
        if has_attention and not layers:
            return
        stored_layers = equal_layers(layers)
        block = self._tokens_of_block(stored_layers, context.target)
        refusals = {
            node: refusal
            for node, layer in stored_layers.items()
            if (refusal := why_not_shared(node, layer, block)) is not None
        }
        size = 0 if refusals else _bytes_of_block(stored_layers, block)
        blocks = self.memory // size if size else _EMPTY_BLOCKS
        reason = self._why_not(path, refusals, size) or _why_not_alike(layers)
        if reason is None and not layers:
            reason = why_masks_stay(model, context) if recurrent else NO_STATE()
        if reason is not None:
            for node in layers:
                ledger.skipped(node, refusals.get(node, reason))
            if not layers:
                ledger.skipped("graph", reason)
            return
        assert not isinstance(path, Fact)
        tokens = PackedTokens(graph)
        chosen_tokens = ChosenTokens(graph, tokens, block)
        for node, layer in stored_layers.items():
            has_residuals = self._has_residuals(layer)
            keeps_residuals = has_residuals and _can_read_residuals(context.target)
            rounding = _rounding(layer, RESIDUALS() if keeps_residuals else NO_RESIDUALS() if has_residuals else None)
            widening = _widen_layer(graph, node, layers[node], layer)
            choose, count = _way_to_choose(chosen_tokens, choices.get(node), node, layers[node])
            attention = share_blocks(graph, node, layer, tokens, block, choose, has_residuals=keeps_residuals)
            fact = SHARES(block=block, blocks=blocks, widened=widening, rounded=rounding, chosen=count)
            ledger.changed(attention, fact, [node])
            if rounding is not None:
                ledger.report.effect = "lossy"
        give_each_request_a_row(graph, recurrent, tokens, ledger)
        number_states(graph)
        if not layers:
            add_empty_blocks(graph, block, ledger)
        _last_of_each(graph, path, tokens.starts)
        ledger.changed(path[-1], LAST_OF_EACH(), [path[-1]])
        _drop_unread(model)
        describe(model)
        model.metadata_props[POOL] = json.dumps({"block_size": block, "num_blocks": int(blocks)})

    def _has_residuals(self, layer: PagedLayer) -> bool:
        """Return whether the newest tokens of a block are to have second codes: those of few bits."""
        return self.residuals and layer.attributes.storage in _WITH_RESIDUALS

    def _tokens_of_block(self, layers: Mapping[ir.Node, PagedLayer], target: str) -> int:
        """Return the tokens of a block of these layers."""
        if self.block is not None:
            return self.block
        has_residuals = any(self._has_residuals(layer) for layer in layers.values())
        return _BLOCK_WITH_RESIDUALS if has_residuals and _can_read_residuals(target) else _BLOCK

    def _why_not_chosen(
        self,
        path: Sequence[ir.Node] | Fact,
        target: str,
        layers: Mapping[ir.Node, PagedLayer],
        choices: Mapping[ir.Node, Choice],
    ) -> Fact | None:
        """Return why blocks cannot store layers of which some read what an indexer chooses, before these change."""
        wide_layers = equal_layers(layers)
        block = self._tokens_of_block(wide_layers, target)
        facts = [why_not_stored(layer, block) for layer in wide_layers.values()]
        sources: set[ir.Node] = set()
        for node, choice in choices.items():
            sources |= {choice.top} if layers[node].number == choice.layer else set()
            facts.append(why_not_chosen(choice) if choice.top in sources else LATER_KEYS(node=choice.top.name))
        refusal = next((fact for fact in facts if fact is not None), None)
        return refusal or self._why_not(path, {}, _bytes_of_block(wide_layers, block))

    def _why_not(self, path: Sequence[ir.Node] | Fact, refusals: Mapping[ir.Node, Fact], size: int) -> Fact | None:
        """Return what keeps a graph as it is whose block of all layers takes ``size`` bytes."""
        if refusals:
            return OTHER_LAYER(node=next(iter(refusals)).name)
        if isinstance(path, Fact):
            return NO_LAST_LOGITS(why=path)
        return NO_BLOCKS(block=size, memory=int(self.memory)) if size > self.memory else None


def _can_read_residuals(target: str) -> bool:
    """Return whether blocks of a target may have second codes: not where standard operators read them."""
    return target != "ort-cuda"


def _bytes_of_block(layers: Mapping[ir.Node, PagedLayer], block: int) -> int:
    """Return the bytes of a block of so many tokens, of all layers."""
    return sum(block_bytes(layer, block) for layer in layers.values())


def _way_to_choose(
    chosen_tokens: ChosenTokens, choice: Choice | None, node: ir.Node, layer: PagedLayer
) -> tuple[Callable[[Sequence[ir.Value]], ir.Value] | None, int | None]:
    """Return what makes the positions that a layer reads, of its blocks, and how many; ``None`` where it reads all."""
    if choice is None:
        return None, None
    # the key of an indexer is the end of a row of its layer; others share what that one chose
    first = layer.head_size - choice.size if choice.layer == layer.number else 0
    return partial(chosen_tokens.choose, choice, node, first), choice.count


def _drop_unread(model: ir.Model) -> None:
    """Drop nodes that nothing reads, and the ports that one row of blocks, lengths and tokens takes the place of."""
    graph = model.graph
    for value in [value for value in graph.outputs if is_of_indexer(value)]:
        graph.outputs.remove(value)
    with bodies_aside(model):
        RemoveUnusedNodesPass()(model)
    unread = (ATTENTION_MASK, PAST_LENGTH, NEW_LENGTH)
    for value in [value for value in graph.inputs if value.name in unread or is_of_indexer(value)]:
        graph.inputs.remove(value)


def _rounding(layer: PagedLayer, newest: Fact | None) -> Fact | None:
    """Return how blocks round what a layer stores, and its newest tokens; ``None`` for floats."""
    return None if layer.attributes.levels is None else TOKEN_SCALES(storage=layer.attributes.storage, newest=newest)


def _widen_layer(graph: ir.Graph, node: ir.Node, old: PagedLayer, new: PagedLayer) -> Fact | None:
    """Give a ``KVAttention`` the heads of ``new``; return what is told of it, ``None`` where it has them already."""
    if new == old:
        return None
    widen(graph, node, old, new)
    heads, most_heads = old.attributes.kv_heads, new.attributes.kv_heads
    return WIDER_BLOCKS(heads=heads, size=old.head_size, most_heads=most_heads, most=new.head_size)


def _why_not_alike(layers: Mapping[ir.Node, PagedLayer]) -> Fact | None:
    storages = sorted({layer.attributes.storage for layer in layers.values()})
    return OTHER_STORAGE(storages=storages) if len(storages) > 1 else None


def _reads_tokens(graph: ir.Graph) -> bool:
    return any(value.name == INPUT_IDS for value in graph.inputs)


def _last_of_each(graph: ir.Graph, path: list[ir.Node], starts: ir.Value) -> None:
    """Make logits [batch, vocabulary] of the last token of each request."""
    # what rounds or rotates the input of the lm_head is a part of it
    parts = nodes_of_product(path[-1])
    first, x = parts[-1], parts[-1].inputs[0]
    assert x is not None and x.shape is not None
    make = Inserter(graph, first, "last")
    bounds = make.integers([1]), make.integers([END])
    ends = make.op("Slice", [starts, *bounds], ["batch_size"], starts.dtype, "ends")
    unit = shared_constant(graph, "serve.one_int32", np.array(1, np.int32))
    newest = make.op("Sub", [ends, unit], ["batch_size"], starts.dtype, "newest")
    newest_rows = make.op("Gather", [x, newest], [1, "batch_size", x.shape[2]], x.dtype, "rows", axis=1)
    first.replace_input_with(0, newest_rows)
    for node in (*path, *parts[1:]):
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
