"""``GroupQueryAttention``, onnxruntime's own, becomes the standard ops that it fuses.

    y, present_k, present_v = GroupQueryAttention([q | k | v], past_k, past_v, seqlens_k, total, cos, sin; do_rotary)
      ->   q = RotaryEmbedding(Transpose(Reshape(q)), Cos(p w), Sin(p w)), k alike        p: input position_ids
           y, present_k, present_v = Attention(q, k, v, <padding>, past_k, past_v; is_causal=1)
           Reshape(Transpose(y))

A window becomes a mask, boolean; ``scale`` and ``softcap`` stay attributes; norms of queries and keys become nodes.

``seqlens_k`` is each row's number of tokens less 1, which is checked by running what computes it. The operator takes
the first columns of a row for its tokens, so it is wrong for a row that is padded on the left. The mask that takes its
place hides what ``attention_mask`` hides, on either side. Both agree where there is no padding, and in a prefill that
is padded on the right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.analysis.structure.contrib import CUTS_TO_WINDOW, PADDING, contrib_nodes, head_sizes
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, replace, shared_constant
from graphopt.passes.common.masks import MaskEvaluator
from graphopt.passes.common.sinks import MASKED_SCORES, SCORES, scale_by_sinks
from graphopt.passes.lift.canonicalize.heads import join_heads, split_heads, swap_axes
from graphopt.passes.lift.canonicalize.padding import padding_mask
from graphopt.passes.lift.canonicalize.rotary_tables import Angles, position_ids

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.graph.editing import Dims
    from graphopt.passes.context import Context, Ledger

_OPERATOR = "GroupQueryAttention"
_SEQLENS, _TOTAL, _COS, _SIN, _POSITIONS, _BIAS, _SINK, _K_SCALE, _V_SCALE, _Q_NORM, _K_NORM = range(5, 16)
_INPUTS = 16

GROUP_QUERY_LIFT = Rule(
    "canonicalize.attention-lifted", "{op} became Attention", window=", a window of {window} tokens as its mask"
)
OWN_TERM = Rule(
    "canonicalize.own-term",
    "its softmax has an extra term in the denominator (head_sink, smooth_softmax) and a soft cap, and whether the cap "
    "is for that term too is not stated",
)
ADDS_BIAS = Rule("canonicalize.adds-bias", "it adds a bias to scores")
QUANTIZED_CACHE = Rule("canonicalize.quantized-cache", "its cache is quantized in its own way")
NOT_CAUSAL = Rule("canonicalize.not-causal", "it is not causal")
SCORES_READ = Rule("canonicalize.scores-read", "its scores are read elsewhere", also=["op"])
ONE_NORM = Rule("canonicalize.one-norm", "only one of queries and keys has a norm")
HEADS_UNKNOWN = Rule(
    "canonicalize.heads-unknown", "the graph does not state the number and size of its heads", also=["op"]
)
CUT_TO_WINDOW = Rule("canonicalize.cut-to-window", "its cache is cut to a window: the step grow_caches comes first")
NO_CACHE = Rule("canonicalize.no-cache", "it has no cache, or no input for the lengths of its rows")
NO_MASK = Rule("canonicalize.no-mask", "the graph has no attention_mask to compare its lengths with")
LENGTHS_NOT_UNDERSTOOD = Rule("canonicalize.lengths-not-understood", "its lengths {lengths} are not understood: {why}")
OTHER_LENGTHS = Rule("canonicalize.other-lengths", "its length {lengths} is not {expected}, by attention_mask")
NO_TABLES = Rule("canonicalize.no-tables", "it has no tables of angles")
OTHER_POSITIONS = Rule("canonicalize.other-positions", "it takes its positions from {positions}")


def lift_group_query(model: ir.Model, angles: Angles, context: Context) -> None:
    """Lift every ``GroupQueryAttention`` that standard ops can express."""
    evaluator, ledger = MaskEvaluator(model, context), context.ledger
    nodes = contrib_nodes(model.graph, _OPERATOR)
    reasons = [_why_not(node, evaluator) for node in nodes]
    for node, reason in zip(nodes, reasons, strict=True):
        if reason is not None:
            ledger.skipped(node, reason)
            continue
        rotary_size = _angles(model, node, angles, ledger)
        if isinstance(rotary_size, Fact):
            ledger.skipped(node, rotary_size)
            continue
        _lift(model, node, rotary_size, ledger)
    if not contrib_nodes(model.graph, _OPERATOR):
        model.metadata_props.pop(PADDING, None)


def _why_not(node: ir.Node, evaluator: MaskEvaluator) -> Fact | None:
    """Return why standard ops cannot express what ``node`` computes, or ``None``."""
    inputs, attributes = _inputs(node), node.attributes
    softcap = attributes.get_float("softcap", 0.0)
    if _has_own_term(node) and softcap:
        return OWN_TERM()
    if inputs[_BIAS] is not None:
        return ADDS_BIAS()
    if attributes.get_int(CUTS_TO_WINDOW, 0):
        return CUT_TO_WINDOW()
    if inputs[_K_SCALE] is not None or inputs[_V_SCALE] is not None:
        return QUANTIZED_CACHE()
    if attributes.get_int("causal", 1) != 1:
        return NOT_CAUSAL()
    if any(value.uses() or value.is_graph_output() for value in node.outputs[3:]):
        return SCORES_READ(op=_OPERATOR)
    if (inputs[_Q_NORM] is None) != (inputs[_K_NORM] is None):
        return ONE_NORM()
    if head_sizes(node) is None or (inputs[1] is None) != (inputs[2] is None):
        return HEADS_UNKNOWN(op=_OPERATOR)
    if any(inputs[index] is None for index in (3, 4, _SEQLENS, _TOTAL)):
        return NO_CACHE()
    if not any(value.name == "attention_mask" for value in evaluator.model.graph.inputs):
        return NO_MASK()
    return _lengths(inputs[_SEQLENS], inputs[_TOTAL], evaluator)


def _lengths(seqlens: ir.Value | None, total: ir.Value | None, evaluator: MaskEvaluator) -> Fact | None:
    """Return why the operator's lengths are not those of ``attention_mask``, or ``None`` where they are."""
    assert seqlens is not None and total is not None
    for value in (seqlens, total):
        results = evaluator.run(value)
        if isinstance(results, Fact):
            return LENGTHS_NOT_UNDERSTOOD(lengths=value.name, why=results)
        for instance, array in results:
            tokens, keys = instance.padding.sum(axis=-1).reshape(-1) - 1, instance.padding.shape[-1]
            if not np.array_equal(np.asarray(array).reshape(-1), tokens if value is seqlens else [keys]):
                expectation = "the number of a row's tokens less 1" if value is seqlens else "the number of columns"
                return OTHER_LENGTHS(lengths=value.name, expected=expectation)
    return None


def _angles(
    model: ir.Model, node: ir.Node, angles: Angles, ledger: Ledger
) -> tuple[ir.Value, ir.Value] | tuple[()] | Fact:
    """Return cosines and sines, ``()`` where ``node`` has no rotary embedding, or why it cannot be lifted."""
    if node.attributes.get_int("do_rotary", 0) != 1:
        return ()
    inputs = _inputs(node)
    cos, sin, positions = inputs[_COS], inputs[_SIN], inputs[_POSITIONS]
    if cos is None or sin is None:
        return NO_TABLES()
    rows_of_positions = position_ids(model, ledger) if positions is None else positions
    if isinstance(rows_of_positions, Fact):
        return rows_of_positions
    if rows_of_positions.name != "position_ids":
        return OTHER_POSITIONS(positions=rows_of_positions.name)
    return angles.look_up(cos, sin, rows_of_positions)


def _lift(model: ir.Model, node: ir.Node, angles: tuple[ir.Value, ...], ledger: Ledger) -> None:
    graph, sizes = model.graph, head_sizes(node)
    assert sizes is not None
    heads, groups, size = sizes
    inputs, attributes = _inputs(node), node.attributes
    insert = Inserter(graph, node, node.name or "attention")
    rows = _rows(insert, inputs, heads, groups, size)
    batch, length = rows[0].shape[:2]  # type: ignore[index]
    parts: list[ir.Value] = []
    for role, count, norm in (("query", heads, _Q_NORM), ("key", groups, _K_NORM), ("value", groups, None)):
        part = split_heads(insert, rows[len(parts)], count, size, f"{role}.heads")
        gain = None if norm is None else inputs[norm]
        if gain is not None:
            epsilon = attributes.get_float("qk_norm_epsilon", 1e-6)
            dims = [batch, length, count, size]
            part = insert.op(
                "RMSNormalization", [part, gain], dims, part.dtype, f"{role}.norm", axis=-1, epsilon=epsilon
            )
        part = swap_axes(insert, part, f"{role}.turned")
        if role != "value" and angles:
            part = _rotary(insert, part, angles, attributes.get_int("rotary_interleaved", 0), f"{role}.rotary")
        parts.append(part)
    window = attributes.get_int("local_window_size", -1)
    dtype = parts[0].dtype
    caches = [(value.shape, value.dtype) for value in node.outputs[1:3]]
    outputs: list[tuple[Dims, ir.DataType | None]] = [([batch, heads, length, size], dtype)]
    outputs += [(list(dims or []), kind or dtype) for dims, kind in caches]
    numbers: dict[str, float] = _numbers(node, size)
    if _has_own_term(node):
        keys = None if caches[0][0] is None else caches[0][0][2]
        outputs.append(([batch, heads, length, keys], dtype))
        numbers["qk_matmul_output_mode"] = MASKED_SCORES
    attention = insert.node(
        "Attention",
        [*parts, padding_mask(model, max(0, window)), inputs[3], inputs[4]],
        outputs,
        "Attention",
        is_causal=1,
        **numbers,
    )
    y = attention.outputs[0]
    if _has_own_term(node):
        y = scale_by_sinks(insert, y, attention.outputs[SCORES], _own_term(model.graph, node, heads))
    y = join_heads(insert, y, "output")
    replace(node, insert.nodes, dict(zip(node.outputs, [y, *attention.outputs[1:3]], strict=False)))
    ledger.changed(attention, GROUP_QUERY_LIFT(op=_OPERATOR, window=max(0, window)), [node])


def _has_own_term(node: ir.Node) -> bool:
    """Return whether a term without a value joins the softmax: ``head_sink``, or e^0 for every head."""
    return _inputs(node)[_SINK] is not None or node.attributes.get_int("smooth_softmax", 0) == 1


def _own_term(graph: ir.Graph, node: ir.Node, heads: int) -> ir.Value:
    """Return the logits of that term, float32 [query heads]."""
    sink = _inputs(node)[_SINK]
    return shared_constant(graph, f"zeros.{heads}", np.zeros(heads, np.float32)) if sink is None else sink


def _rows(insert: Inserter, inputs: list[ir.Value | None], heads: int, groups: int, size: int) -> list[ir.Value]:
    """Return queries, keys and values [batch, length, heads x size]."""
    query, key, value = inputs[:3]
    assert query is not None and query.shape is not None
    if key is not None and value is not None:
        return [query, key, value]
    widths = [heads * size, groups * size, groups * size]
    outputs = [([*query.shape[:2], width], query.dtype) for width in widths]
    return list(insert.node("Split", [query, insert.integers(widths)], outputs, axis=-1).outputs)


def _rotary(insert: Inserter, x: ir.Value, angles: tuple[ir.Value, ...], interleaving: int, suffix: str) -> ir.Value:
    assert x.shape is not None and angles[0].shape is not None
    rotary_size = 2 * int(str(angles[0].shape[-1]))
    attributes = {} if rotary_size == x.shape[3] else {"rotary_embedding_dim": rotary_size}
    dims, heads = list(x.shape), x.shape[1]
    return insert.op(
        "RotaryEmbedding",
        [x, *angles],
        dims,
        x.dtype,
        suffix,
        interleaved=interleaving,
        num_heads=heads,
        **attributes,
    )


def _numbers(node: ir.Node, size: int) -> dict[str, float]:
    """Return the attributes scale and softcap where they differ from their defaults."""
    scale, softcap = node.attributes.get_float("scale", 0.0), node.attributes.get_float("softcap", 0.0)
    numbers = {"softcap": softcap} if softcap else {}
    return {"scale": scale or size**-0.5, **numbers}


def _inputs(node: ir.Node) -> list[ir.Value | None]:
    return [*node.inputs, *[None] * _INPUTS][:_INPUTS]
