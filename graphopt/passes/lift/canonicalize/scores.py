"""Attention that is spelled out as products and a softmax becomes the standard op.

    s = MatMul(q, Transpose(k)) * a              q and k may be multiplied by numbers too
    s = c * Tanh(s / c)                          soft cap, as in Gemma 2 (Gemma Team 2024, section 2)
    s = s + m                                    or Where(m, s, <lowest>); or several, one after the other
    s = s * b                                    b > 0, as in CodeGen: (x + m) b = x b + m b
    s = s - ReduceMax(s)                         which changes no softmax, as in MiMo-V2
    y = MatMul(Softmax(s), v)
      ->   y = Attention(q, k, v, m; scale=a, softcap=c)

(Vaswani et al. 2017, equation 1.) ``masks.py`` finds out what the masks mean. Probabilities of a row that
sees no key may be NaN, and set to 0 behind the softmax; ``Attention`` gives zeros for such a row.

A logit l of each head, which joins the softmax and has no value (the sinks of gpt-oss), becomes a factor of the output:

    p = Softmax(Concat(s, l));  y = MatMul(Slice(p, <without l>), v)
      ->   y, s = Attention(q, k, v, m);  y * Sigmoid(ReduceLogSumExp(s) - l)

The algebra is in :mod:`graphopt.passes.common.sinks`. Granite writes the second form itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, inherit, replace, shared_constant
from graphopt.graph.weights import weight_of
from graphopt.passes.common.nodes import scalar
from graphopt.passes.common.sinks import MASKED_SCORES, SCORES, scale_by_sinks
from graphopt.passes.lift.canonicalize.mask_input import one_mask, with_queries
from graphopt.passes.lift.canonicalize.sinks import appended_logits, drops_last, factor_of_sinks, without_shift

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.context import Ledger

# Any score set to this or less is hidden: exporters write the lowest float, -inf, or -10000 as GPT-2 did.
_LOWEST = -1e4

SPELLED_OUT = Rule(
    "canonicalize.attention-spelled-out",
    "attention that was spelled out became Attention",
    softcap=", scores capped at {softcap:g}",
    sinks=", with a factor for the logits {sinks} of its sinks",
)
LACKS_INPUT = Rule("canonicalize.lacks-input", "its product lacks an input")
OTHER_LAYOUT = Rule(
    "canonicalize.other-layout",
    "queries and keys are not [batch, heads, length, size], or the softmax is not over keys",
)
PROBABILITIES_READ = Rule("canonicalize.probabilities-read", "its probabilities are read elsewhere too")
PROBABILITIES_GO_INTO = Rule(
    "canonicalize.probabilities-go-into",
    "its probabilities go into {op} {node} and not into a product with values",
)


@dataclass(frozen=True)
class _Scores:
    """What is known of a value that leads from the product of queries and keys to the softmax.

    Attributes:
        product: the ``MatMul``.
        scale: what the product is multiplied by, outside of a ``Tanh`` if there is one.
        inside: what it is multiplied by inside of the ``Tanh``; ``None`` without one.
        masks: what is added, or, boolean, what is visible; whether ``True`` means hidden, and by what the sum was
            multiplied afterwards.
    """

    product: ir.Node
    scale: float = 1.0
    inside: float | None = None
    masks: tuple[tuple[ir.Value, bool, float], ...] = field(default=())


def lift_scores(model: ir.Model, ledger: Ledger) -> None:
    """Lift all attention of the graph that is spelled out."""
    for node in list(model.graph):
        if node.op_type != "Softmax" or node.domain or node.graph is None:
            continue
        logits, sinks = without_shift(node.inputs[0]), None
        scores = _scores(logits)
        if scores is None and (columns := appended_logits(logits)) is not None:
            scores, sinks = _scores(columns[0]), columns[1]
        if scores is None:
            continue
        product = _product_behind(node, has_sinks=sinks is not None)
        query, keys = scores.product.inputs[:2]
        if isinstance(product, Fact) or query is None or keys is None:
            ledger.skipped(node, product if isinstance(product, Fact) else LACKS_INPUT())
            continue
        if node.attributes.get_int("axis", -1) not in (-1, 3) or _rank(query, keys) != 4:
            ledger.skipped(node, OTHER_LAYOUT())
            continue
        last = product
        if sinks is None and (scaling := factor_of_sinks(node, product)) is not None:
            sinks, last = scaling
        _lift(model.graph, scores, sinks, node, [product, last], ledger)


def _scores(value: ir.Value | None) -> _Scores | None:
    """Return how ``value`` comes from a product of two activations, with only scaling, a cap and masks between."""
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "MatMul":
        return None if weight_of(node, 0) or weight_of(node, 1) else _Scores(node)
    if node.op_type == "Cast":
        return _scores(node.inputs[0]) if _is_float(node.inputs[0]) and _is_float(node.outputs[0]) else None
    if node.op_type in ("Mul", "Div"):
        return _scores_with_factor(node)
    if node.op_type == "Max":
        return _scores_above(node)
    if node.op_type == "Tanh":
        inner = _scores(node.inputs[0])
        is_capped = inner is None or inner.inside is not None or bool(inner.masks)
        return None if inner is None or is_capped else dataclasses.replace(inner, scale=1.0, inside=inner.scale)
    if node.op_type in ("Add", "Where"):
        return _scores_with_mask(node)
    return None


def _scores_with_mask(node: ir.Node) -> _Scores | None:
    if node.op_type == "Add":
        for x, mask in (node.inputs[:2], node.inputs[1::-1]):
            inner = _scores(x)
            if inner is not None and mask is not None:
                return dataclasses.replace(inner, masks=(*inner.masks, (mask, False, 1.0)))
    if node.op_type == "Where":
        visible, first, second = node.inputs[:3]
        for x, partner, hidden in ((first, second, False), (second, first, True)):
            inner, number = _scores(x), scalar(partner)
            if inner is not None and visible is not None and number is not None and number <= _LOWEST:
                return dataclasses.replace(inner, masks=(*inner.masks, (visible, hidden, 1.0)))
    return None


def _scores_above(node: ir.Node) -> _Scores | None:
    """Return scores behind a maximum with the lowest number, by which two masks do not add up to -inf (XGLM)."""
    for x, bound in (node.inputs[:2], node.inputs[1::-1]):
        number = scalar(bound)
        if number is not None and len(node.inputs) == 2:
            return _scores(x) if number <= _LOWEST else None
    return None


def _scores_with_factor(node: ir.Node) -> _Scores | None:
    first, second = node.inputs[:2]
    for x, factor in ((first, second), (second, first)):
        number = scalar(factor)
        inner = None if number is None else _scores(x)
        if inner is None or number is None or not number:
            continue
        if node.op_type == "Div" and x is second:
            return None
        number = 1.0 / number if node.op_type == "Div" else number
        are_added = all(_is_float(mask) for mask, _, _ in inner.masks)
        if inner.masks and not (are_added and number > 0 and inner.inside is None):
            return None
        masks = tuple((mask, hidden, factor * number) for mask, hidden, factor in inner.masks)
        return dataclasses.replace(inner, scale=inner.scale * number, masks=masks)
    return None


def _product_behind(softmax: ir.Node, *, has_sinks: bool) -> ir.Node | Fact:
    """Return the product of probabilities and values, or why the reader of the probabilities is not such a product.

    Args:
        softmax: what makes the probabilities.
        has_sinks: whether the last of them is a sink's, and is cut off before the product.
    """
    value = softmax.outputs[0]
    while True:
        users = {use.node for use in value.uses()}
        guard = [
            node for node in users if node.op_type == "Where" and node.inputs[2] is value and _is_blind(node, value)
        ]
        if guard:
            value = guard[0].outputs[0]
            continue
        if len(users) != 1 or value.is_graph_output():
            return PROBABILITIES_READ()
        (node,) = users
        if has_sinks and drops_last(node):
            value, has_sinks = node.outputs[0], False
            continue
        if not has_sinks and node.op_type == "MatMul" and node.inputs[0] is value and weight_of(node, 1) is None:
            return node
        if node.op_type not in ("Cast", "Identity") or not _is_float(node.outputs[0]):
            return PROBABILITIES_GO_INTO(op=node.op_type, node=node.name)
        value = node.outputs[0]


def _is_blind(node: ir.Node, probabilities: ir.Value) -> bool:
    """Return whether ``node`` is Where(IsNaN(p), 0, p)."""
    condition = node.inputs[0].producer() if node.inputs[0] is not None else None
    other_readers = {use.node for use in probabilities.uses()} - {node}
    is_nan = condition is not None and condition.op_type == "IsNaN" and condition.inputs[0] is probabilities
    return is_nan and other_readers == {condition} and scalar(node.inputs[1]) == 0.0


def _lift(
    graph: ir.Graph,
    scores: _Scores,
    sinks: ir.Value | None,
    softmax: ir.Node,
    products: Sequence[ir.Node],
    ledger: Ledger,
) -> None:
    """Put ``Attention`` in the place of the product with values and of what scales its output by sinks, if anything."""
    product, last = products
    insert = Inserter(graph, product, softmax.name or "attention")
    query, keys = scores.product.inputs[:2]
    assert query is not None and keys is not None
    scale, softcap = (scores.scale, 0.0) if scores.inside is None else (scores.scale * scores.inside, scores.scale)
    query, factor = _without_factor(query)
    scale *= factor
    key, factor = _upright(insert, keys)
    attributes = {"scale": scale * factor, **({"softcap": softcap} if softcap else {})}
    mask = one_mask(insert, [(_times(insert, mask, factor), hidden) for mask, hidden, factor in scores.masks])
    inputs = [query, key, product.inputs[1], None if mask is None else with_queries(insert, mask, query)]
    if sinks is not None:
        attributes["qk_matmul_output_mode"] = MASKED_SCORES
    outputs = 1 if sinks is None else SCORES + 1
    attention = ir.node(
        "Attention",
        inputs[: 3 + bool(scores.masks)],
        attributes,
        num_outputs=outputs,
        name=f"{softmax.name}.Attention",
    )
    inherit(attention, softmax)
    spelled_nodes = [scores.product, softmax, product]
    if sinks is None:
        replace(product, attention)
    else:
        _replace_with_sinks(insert, last, attention, sinks)
    name = None if sinks is None else sinks.name
    ledger.changed(attention, SPELLED_OUT(softcap=softcap, sinks=name), spelled_nodes)


def _replace_with_sinks(insert: Inserter, product: ir.Node, attention: ir.Node, sinks: ir.Value) -> None:
    """Put ``attention``, and what brings the sinks in, in the place of what made its output."""
    insert.graph.insert_before(product, attention)
    y, present_key, present_value, scores = attention.outputs
    present_key.name = present_value.name = ""  # absent
    y.name, scores.name = f"{attention.name}.output", f"{attention.name}.scores"
    y.type, y.shape = product.outputs[0].type, product.outputs[0].shape
    scores.type = y.type
    keys, dims = attention.inputs[1], [None] * 4 if y.shape is None else list(y.shape)
    scores.shape = ir.Shape([*dims[:3], None if keys is None or keys.shape is None else keys.shape[2]])
    replace(product, [attention, *insert.nodes], {product.outputs[0]: scale_by_sinks(insert, y, scores, sinks)})


def _times(insert: Inserter, mask: ir.Value, factor: float) -> ir.Value:
    """Return a mask times a factor, itself for 1."""
    if factor == 1.0:
        return mask
    assert mask.dtype is not None
    number = shared_constant(insert.graph, f"mask_factor.{factor:g}", np.array(factor, mask.dtype.numpy()))
    dims = [None] * 4 if mask.shape is None else list(mask.shape)
    return insert.op("Mul", [mask, number], dims, mask.dtype, "mask_times_factor")


def _without_factor(value: ir.Value) -> tuple[ir.Value, float]:
    """Return ``value`` before it is multiplied by a number, and the number; itself and 1 where it is not."""
    node = value.producer()
    if node is None or node.domain or node.op_type not in ("Mul", "Div"):
        return value, 1.0
    first, second = node.inputs[:2]
    for x, factor in ((first, second), (second, first)):
        number = scalar(factor)
        if x is None or number is None or not number or (node.op_type == "Div" and x is second):
            continue
        return x, 1.0 / number if node.op_type == "Div" else number
    return value, 1.0


def _upright(insert: Inserter, keys: ir.Value) -> tuple[ir.Value, float]:
    """Return keys [batch, heads, keys, size] of [batch, heads, size, keys], and a number that these were scaled by."""
    value, outer = _without_factor(keys)
    node = value.producer()
    is_transpose = node is not None and node.op_type == "Transpose"
    permutation = tuple(node.attributes.get_ints("perm", ())) if node is not None and is_transpose else ()
    if node is not None and node.inputs[0] is not None and permutation in _TURNS:
        source, back = node.inputs[0], _TURNS[permutation]
        if back is None:
            source, inner = _without_factor(source)
            return source, outer * inner
    else:
        source, back = value, (0, 1, 3, 2)
    dims = [None] * 4 if source.shape is None else [source.shape[axis] for axis in back]
    return insert.op("Transpose", [source], dims, source.dtype, "keys", perm=list(back)), outer


_TURNS: dict[tuple[int, ...], tuple[int, ...] | None] = {(0, 1, 3, 2): None, (0, 2, 3, 1): (0, 2, 1, 3)}
"""How keys are transposed for the product, and what they need instead: nothing where they lie as they are read."""


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def _rank(query: ir.Value, keys: ir.Value) -> int | None:
    for value in (query, keys):
        if value.shape is not None:
            return len(value.shape)
    node = keys.producer()
    perm = node.attributes.get_ints("perm", ()) if node is not None and node.op_type == "Transpose" else ()
    return len(perm) or None
