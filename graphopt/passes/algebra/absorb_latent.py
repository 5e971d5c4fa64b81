"""Attention over a latent reads the latent itself: what made keys and values of it moves to queries and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import onnx_ir as ir

from graphopt.analysis.structure.ports import past_port
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import Inserter, replace
from graphopt.graph.weights import Reshape, Slice, Transpose, WeightTensor, expression_of, new_weight, weight_of
from graphopt.passes.base import Pass
from graphopt.passes.common.masks import MaskEvaluator, drop_guard
from graphopt.passes.common.nodes import attentions
from graphopt.passes.common.sinks import SCORES, scale_by_sinks, sinks_of

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression
    from graphopt.passes.context import Context, Ledger
    from graphopt.passes.recipe import Recipe

_QUERY, _KEY, _VALUE, _MASK, _PAST_KEY = range(5)
_BY_HEAD = (0, 2, 1, 3)

LATENT_ABSORBED = Rule(
    "absorb_latent.absorbed",
    "{heads} query heads read one latent of {rank} and {common} more numbers of each token, not keys of {key} and "
    "values of {value} numbers for each head",
)
NO_LATENT = Rule("absorb_latent.no-latent", "its keys and values are not made of one latent for all heads")
OWN_CACHE = Rule("absorb_latent.own-cache", "its cache holds keys and values per head, which a latent cannot replace")
SCORES_READ = Rule("absorb_latent.scores-read", "its scores are read elsewhere")
NO_SCALE = Rule("absorb_latent.no-scale", "the size of its query heads is not known")


class _Columns(NamedTuple):
    """Keys or values of all heads as columns of the product of a latent and a weight.

    Attributes:
        latent: float [batch, 1, keys, rank].
        weight: [rank, heads x all columns of a head].
        heads: how many.
        start: the first of the columns of a head.
        width: how many of them.
    """

    latent: ir.Value
    weight: ir.Value
    heads: int
    start: int
    width: int


class _Part(NamedTuple):
    """Some of the channels of keys.

    Attributes:
        start: the first of them.
        width: how many.
        columns: what they are of a latent, or
        for_all_heads: what they are for all heads, float [batch, 1, keys, width].
    """

    start: int
    width: int
    columns: _Columns | None
    for_all_heads: ir.Value | None


class AbsorbLatent(Pass):
    """Let attention read the latent that keys and values are made of, once for all heads.

    For each head h, with the latent c [keys, rank] and the rotary part r [keys, size] from the cache,

    before::

        k_h = Concat(c U_h, r);  v_h = c V_h                                       U_h, V_h: columns of one weight
        y_h = Softmax(q_h k_h^T) v_h                                               q_h = Concat(p_h, t_h)

    after::

        y_h = (Softmax(Concat(p_h U_h^T, t_h) Concat(c, r)^T) c) V_h

    since p_h (c U_h)^T = (p_h U_h^T) c^T and P (c V_h) = (P c) V_h (DeepSeek-V2, DeepSeek-AI 2024, section 2.1.2). It
    is attention with one KV head that all query heads share: a key is the row (c, r), a value the first numbers of it.

    Before, each call makes the keys and values of all stored tokens again, in rank (size_k + size_v) multiplications
    per token and head. After, nothing is made of stored tokens. A new token costs the same products, on the side of its
    query and its output. Scores and sums take rank + size of r, and rank, multiplications for each stored token instead
    of the sizes of keys and values: more in attention itself, 3.4 times for DeepSeek-V3. One graph serves prefills and
    decode steps all the same: a chunk behind a past saves its expansion, and only a long prefill without past pays.

    Logits that join the softmax without a value (:mod:`graphopt.passes.common.sinks`) are a factor of each head, which
    goes in front of V_h.

    The weight that made keys and values becomes two constants, [heads, size of p, rank] and [heads, rank, size of v].
    The latent is found by what reads it: a product with a constant whose columns are, head by head, keys and values.
    """

    name: ClassVar[str] = "absorb_latent"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("fold_norms", "rotate", "scale_channels")

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether a product with a constant reads a cache, and the recipe makes the graph canonical."""
        has_canonicalize = any(step.name == "canonicalize" for step in recipe.steps)
        return has_canonicalize and any(_is_expanded(value) for value in graph.inputs)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Absorb the latent of every ``Attention``; say why others stay."""
        evaluator, ledger = MaskEvaluator(model, context), context.ledger
        for node in attentions(model):
            reason = _absorb(model.graph, node, evaluator, ledger)
            if reason is not None:
                ledger.skipped(node, reason)


def _is_expanded(value: ir.Value) -> bool:
    """Return whether a cache with the new tokens behind it is read by a product with a constant."""
    port = past_port(value)
    if port is None or port.is_recurrent:
        return False
    presents = [use.node.outputs[0] for use in value.uses() if use.node.op_type == "Concat"]
    return any(use.node.op_type == "MatMul" and weight_of(use.node, 1) for x in presents for use in x.uses())


def _absorb(graph: ir.Graph, node: ir.Node, evaluator: MaskEvaluator, ledger: Ledger) -> Fact | None:
    inputs = [*node.inputs, *[None] * 6][:6]
    query, key, value, mask = inputs[:4]
    if query is None or key is None or value is None or query.shape is None or len(query.shape) != 4:
        return NO_LATENT()
    values = _columns(value)
    keys = None if values is None else _key_parts(key, values)
    if values is None or keys is None:
        return NO_LATENT()
    if inputs[_PAST_KEY] is not None:
        return OWN_CACHE()
    sinks = sinks_of(node)
    if sinks is not None and sinks[0].const_value is None:
        return SCORES_READ()
    if sinks is None and any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return SCORES_READ()
    latent_part, rotary = keys
    size = _last_or_none(query)
    if size != latent_part.width + (0 if rotary is None else rotary.width):
        return NO_SCALE()
    if mask is not None:
        drop_guard(evaluator, node, mask, ledger)
    assert latent_part.columns is not None
    fact = LATENT_ABSORBED(
        heads=values.heads,
        rank=_last(values.latent),
        common=0 if rotary is None else rotary.width,
        key=size,
        value=values.width,
    )
    ledger.changed(_rewrite(graph, node, latent_part, rotary, values), fact, [node])
    return None


def _rewrite(graph: ir.Graph, node: ir.Node, latent_part: _Part, rotary: _Part | None, values: _Columns) -> ir.Node:
    """Return the node that takes the place of ``node``."""
    query, mask = node.inputs[_QUERY], node.inputs[_MASK] if len(node.inputs) > _MASK else None
    assert query is not None and query.shape is not None and latent_part.columns is not None
    insert = Inserter(graph, node, node.name or "attention")
    dims, rank, latent = list(query.shape), _last(values.latent), latent_part.columns.latent
    size = int(str(dims[-1]))
    up = _by_head(graph, latent_part.columns, f"{node.name}.key_up", (1, 2, 0))
    down = _by_head(graph, values, f"{node.name}.value_up", (1, 0, 2))
    parts = _query_parts(insert, query, latent_part, rotary)
    row = [insert.op("MatMul", [parts[0], up], [*dims[:3], rank], query.dtype, "query_of_latent")]
    key = [latent]
    if rotary is not None and rotary.for_all_heads is not None:
        row.append(parts[1])
        key.append(rotary.for_all_heads)
        width = rank + rotary.width
        row = [insert.op("Concat", row, [*dims[:3], width], query.dtype, "query_row", axis=-1)]
        tokens = [None] * 3 if latent.shape is None else list(latent.shape)[:3]
        key = [insert.op("Concat", key, [*tokens, width], latent.dtype, "latent_row", axis=-1)]
    attributes = dict(node.attributes)
    attributes["scale"] = ir.AttrFloat32("scale", node.attributes.get_float("scale", 0.0) or size**-0.5)
    attention = ir.node(
        "Attention",
        [*row, *key, latent, *([] if mask is None else [mask])],
        attributes,
        num_outputs=len(node.outputs),
        name=node.name,
    )
    graph.insert_before(node, attention)
    insert.nodes.append(attention)
    y, old = attention.outputs[0], node.outputs[0]
    y.name, y.type, y.shape = f"{node.name}.latent_output", old.type, ir.Shape([*dims[:3], rank])
    for number, (new, output) in enumerate(zip(attention.outputs[1:], node.outputs[1:], strict=True), 1):
        new.name, new.type, new.shape = f"{node.name}.latent_output{number}", output.type, output.shape
    sinks = sinks_of(node)
    if sinks is not None:  # one factor for all numbers of a head, before or behind what makes them of the latent
        logits, scaling = sinks
        y, old = scale_by_sinks(insert, y, attention.outputs[SCORES], logits), scaling.outputs[0]
        node = scaling
    output = insert.op("MatMul", [y, down], [*dims[:3], values.width], old.dtype, "output_of_latent")
    replace(node, insert.nodes, {old: output})
    return attention


def _query_parts(insert: Inserter, query: ir.Value, latent_part: _Part, rotary: _Part | None) -> list[ir.Value]:
    """Return the parts of queries that meet the latent and the shared part of keys."""
    if rotary is None:
        return [query]
    order = sorted((latent_part, rotary), key=lambda part: part.start)
    widths = [part.width for part in order]
    node = query.producer()
    sources = list(node.inputs) if node is not None and node.op_type == "Concat" and not node.domain else []
    is_last = node is not None and node.attributes.get_int("axis", 0) in (-1, 3)
    parts = [value for value in sources if value is not None and _last_or_none(value) is not None]
    if not is_last or [_last_or_none(value) for value in parts] != widths:
        assert query.shape is not None
        outputs = [([*query.shape[:3], width], query.dtype) for width in widths]
        parts = list(insert.node("Split", [query, insert.integers(widths)], outputs, "query_parts", axis=-1).outputs)
    return parts if order[0] is latent_part else parts[::-1]


def _by_head(graph: ir.Graph, columns: _Columns, name: str, order: tuple[int, int, int]) -> ir.Value:
    """Return the columns as a constant of three axes, [rank, heads, width] in another order."""

    def cut(weight: Expression) -> Expression:
        head_columns = Reshape.to_dims(weight, [weight.shape[0], columns.heads, -1])
        return Transpose(Slice.cut(head_columns, {2: slice(columns.start, columns.start + columns.width)}), order)

    expression = cut(expression_of(columns.weight.const_value))
    return new_weight(graph, name, WeightTensor(expression))


def _key_parts(key: ir.Value, values: _Columns) -> tuple[_Part, _Part | None] | None:
    """Return the part of keys that is made of the latent of ``values``, and the one that all heads share."""
    whole = _columns(key)
    if whole is not None:
        return (_Part(0, whole.width, whole, None), None) if _is_same_latent(whole, values) else None
    node = key.producer()
    if node is None or node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    if node.attributes.get_int("axis", 0) not in (-1, 3):
        return None
    parts, start = [], 0
    for value in node.inputs:
        width = None if value is None else _last_or_none(value)
        if value is None or width is None:
            return None
        columns = _columns(value)
        parts.append(
            _Part(start, width, columns, None if columns is not None else _common_to_heads(value, values.heads))
        )
        start += width
    of_latent = [(part, part.columns) for part in parts if part.columns is not None]
    for_all = [part for part in parts if part.for_all_heads is not None]
    if len(of_latent) != 1 or len(for_all) != 1 or not _is_same_latent(of_latent[0][1], values):
        return None
    return of_latent[0][0], for_all[0]


def _is_same_latent(keys: _Columns, values: _Columns) -> bool:
    return keys.latent is values.latent and keys.heads == values.heads


def _common_to_heads(value: ir.Value, heads: int) -> ir.Value | None:
    """Return [batch, 1, keys, size] of which ``value`` has a copy for each head."""
    node = value.producer()
    if node is None or node.op_type != "Expand" or node.domain or value.shape is None:
        return None
    x = node.inputs[0]
    if x is None or x.shape is None or len(x.shape) != 4 or x.shape[1] != 1 or value.shape[1] != heads:
        return None
    return x if [*x.shape[2:]] == [*value.shape[2:]] else None


def _columns(value: ir.Value) -> _Columns | None:
    """Return what ``value`` [batch, heads, keys, width] is of the product of a latent and a weight."""
    start, width = 0, _last_or_none(value)
    node = value.producer()
    if node is not None and node.op_type == "Split" and node.attributes.get_int("axis", 0) in (-1, 3):
        outputs = list(node.outputs)
        widths = [_last_or_none(output) for output in outputs[: outputs.index(value)]]
        if None in widths or node.inputs[0] is None:
            return None
        start = sum(count for count in widths if count is not None)
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Transpose" or tuple(node.attributes.get_ints("perm", ())) != _BY_HEAD:
        return None
    head_columns = node.inputs[0]
    reshape = None if head_columns is None else head_columns.producer()
    if head_columns is None or head_columns.shape is None or reshape is None or reshape.op_type != "Reshape":
        return None
    product = None if reshape.inputs[0] is None else reshape.inputs[0].producer()
    weight = None if product is None or product.op_type != "MatMul" else weight_of(product, 1)
    latent = None if product is None else product.inputs[0]
    heads, columns = head_columns.shape[2:] if len(head_columns.shape) == 4 else (None, None)
    if weight is None or weight.shape is None or latent is None or latent.shape is None or width is None:
        return None
    is_whole = isinstance(heads, int) and isinstance(columns, int) and weight.shape[1] == heads * columns
    if not is_whole or not isinstance(heads, int) or len(latent.shape) != 4 or latent.shape[1] != 1:
        return None
    return _Columns(latent, weight, heads, start, width)


def _last(value: ir.Value) -> int:
    width = _last_or_none(value)
    assert width is not None
    return width


def _last_or_none(value: ir.Value) -> int | None:
    width = None if value.shape is None else value.shape[-1]
    return width if isinstance(width, int) else None
