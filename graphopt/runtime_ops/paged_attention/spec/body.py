"""The bodies of ``ai.graphopt::PagedAttention``, of standard ONNX operators: for floats, integers, and latents.

    places of new tokens -> ScatterND -> blocks -> Gather by the table -> K, V [B, Hk, L, D]
    tokens, one behind the other -> rows of equal length -> attention -> tokens again

One ``ScatterND`` alone reads each old cache, so that onnxruntime may write where it lies; all else reads the new. Only
residuals are read before it, as new tokens take their slots: its indices wait for them. The overload tells bodies
apart, as those of ``KVAttention``.
"""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.attributes import LANES, MOST_LATENT, PAGES
from graphopt.runtime_ops.paged_attention.spec.body_blocks import (
    append_latents,
    append_tokens,
    append_with_residuals,
    latents_of,
    pages_of,
    residual_places,
    residuals_of,
)
from graphopt.runtime_ops.paged_attention.spec.layout import STORAGES, most_channels
from graphopt.runtime_ops.paged_attention.spec.schema import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onnxscript import OpBuilder

_FIELDS = {
    ir.AttributeType.INT: "value_int",
    ir.AttributeType.FLOAT: "value_float",
    ir.AttributeType.STRING: "value_string",
}
_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


def overload(**attributes: Any) -> str:
    """Return the name of the body for these attributes: the storage of integers, "" for floats, or their value_size.

    And behind it whether its window is a chunk, and whether it has slopes.

    Raises:
        ValueError: there is no such storage.
    """
    storage = attributes["storage"]
    if storage not in STORAGES:
        raise ValueError(f"PagedAttention: storage is one of {', '.join(STORAGES)}, not {storage!r}")
    is_float, value_size = STORAGES[storage].levels is None, attributes.get("value_size", 0)
    if value_size and not is_float:
        raise ValueError(f"PagedAttention: with a value_size storage is one of floats, not {storage!r}")
    parts = [f"value_size={value_size}"] if value_size else [] if is_float else [str(storage)]
    if attributes.get("key_feedback", 0) and is_float:
        raise ValueError(f"PagedAttention: key_feedback is 0, or 1 for integers; it is 1 for {storage!r}")
    if attributes.get("chooses", 0) and (not value_size or attributes.get("window", 0)):
        raise ValueError("PagedAttention: chooses is 0, or 1 with a value_size and no window")
    if attributes.get("residuals", 0) and is_float:
        raise ValueError(f"PagedAttention: residuals is 0, or 1 for integers; it is 1 for {storage!r}")
    parts += [f"{name}=1" for name in ("chunks", "key_feedback", "chooses", "residuals") if attributes.get(name, 0)]
    parts += ["slopes=1"] if attributes.get("slopes") else []
    return ",".join(parts)


def function(opset: int, **attributes: Any) -> ir.Function:
    """Return the body for a node with these attributes, as a function of the given ONNX opset.

    Its attributes are references to those of the node.

    Raises:
        ValueError: as :func:`overload`.
    """
    # heavy, and needed only where a model is made
    from graphopt.runtime_ops.builder import build_body

    name, value_size = overload(**attributes), attributes.get("value_size", 0)
    storage = attributes["storage"] if STORAGES[attributes["storage"]].levels is not None else ""
    is_chunked, has_residuals = (bool(attributes.get(name, 0)) for name in ("chunks", "residuals"))
    trailing = 2 if attributes.get("chooses", 0) else 1 if attributes.get("key_feedback", 0) else 0
    required_count = sum(not port.is_trailing for port in SCHEMA.inputs)
    has_slopes = bool(attributes.get("slopes"))
    types = {**SCHEMA.attributes, **({"slopes": ir.AttributeType.FLOATS} if has_slopes else {})}
    schema = replace(SCHEMA, inputs=SCHEMA.inputs[: required_count + trailing], attributes=types)
    return build_body(
        schema,
        name,
        opset,
        lambda op, inputs: _write(op, storage, value_size, is_chunked, has_residuals, has_slopes, inputs),
    )


def _write(  # noqa: PLR0915, the whole of the operator, in order
    op: OpBuilder,
    storage: str,
    value_size: int,
    is_chunked: bool,
    has_residuals: bool,
    has_slopes: bool,
    inputs: Mapping[str, ir.Value],
) -> tuple[ir.Value, ...]:
    starts, past, table = (op.Cast(inputs[name], to=_INT64) for name in ("starts", "past", "block_table"))
    heads = op.Reshape(_of_node(op, "kv_heads"), [1])
    page = op.Shape(inputs["keys"], start=1, end=2)
    query, key, value = (op.Cast(inputs[name], to=_FLOAT) for name in ("query", "key", "value"))
    count = op.Reshape(op.Div(op.Size(key), op.Max(op.Squeeze(op.Shape(key, start=-1), [0]), 1)), [1])
    key = op.Reshape(key, op.Concat(count, heads, [-1], axis=0))
    size = op.Shape(key, start=2, end=3)
    first, ends = op.Slice(starts, [0], [-1]), op.Slice(starts, [1], [2**62])
    lengths = op.Sub(ends, first)
    total = op.Add(past, lengths)

    row, column, block, slot, is_shared = _slots_of(op, first, ends, past, table, count, page)
    refusal = _refusal(op, storage, value_size, inputs["keys"], starts, past, table, lengths, total, count, is_shared)
    block = op.Add(block, refusal)
    choice = inputs.get("choice")
    if choice is not None:
        choice = op.Reshape(op.Cast(choice, to=_INT64), op.Concat(count, op.Shape(choice, start=-1), axis=0))
        block = op.Add(block, _refusal_of_chosen(op, choice, op.Add(op.Gather(past, row), column)))
    new_residuals: list[ir.Value] = []
    old_residuals: list[ir.Value] = []
    pools, scales = (inputs["keys"], inputs["values"]), (inputs["key_scales"], inputs["value_scales"])
    if value_size:
        keys, values = append_latents(op, pools, key, block, slot)
        key_scales, value_scales = (op.Identity(tensor) for tensor in scales)
    else:
        value = op.Reshape(value, op.Shape(key))
        feedback = inputs.get("feedback")
        if has_residuals:
            last_block = op.Sub(op.Shape(inputs["keys"], start=0, end=1), 1)
            entry = op.Min(op.Div(past, page), op.Sub(op.Shape(table, start=1, end=2), 1))
            of_past = op.GatherElements(table, op.Unsqueeze(op.Max(entry, 0), [1]), axis=1)
            of_past = op.Max(op.Min(op.Squeeze(of_past, [1]), last_block), 0)
            stored_count = op.Mod(past, page)
            for index, are_keys in enumerate((True, False)):
                of_block = residuals_of(
                    op, storage, pools[index], scales[index], of_past, stored_count, are_keys=are_keys
                )
                old_residuals.append(of_block)
                was_read = op.ReduceMax(op.Cast(op.IsNaN(of_block), to=_INT64), keepdims=0)
                block = op.Add(block, op.Min(was_read, 0))  # 0: blocks are written after that
            lasting = _lasting_residuals(op, op.Gather(past, row), op.Gather(total, row), column, slot, page)
            destination = block, slot
            keys, key_scales, new = append_with_residuals(
                op, storage, (pools[0], scales[0]), key, destination, lasting, are_keys=True, feedback=feedback
            )
            new_residuals.append(new)
            values, value_scales, new = append_with_residuals(
                op, storage, (pools[1], scales[1]), value, destination, lasting
            )
            new_residuals.append(new)
        else:
            destination = block, slot
            keys, key_scales = append_tokens(
                op, storage, pools[0], scales[0], key, destination, are_keys=True, feedback=feedback
            )
            values, value_scales = append_tokens(op, storage, pools[1], scales[1], value, destination)

    # tokens as rows of the longest new length, pages as far as the longest request needs them
    longest = op.ReduceMax(lengths, keepdims=1)
    step = _range(op, longest)
    token_indices = op.Min(op.Add(op.Unsqueeze(first, [1]), step), op.Sub(count, 1))  # B, S
    q = op.Gather(op.Reshape(query, op.Concat(count, heads, [-1], size, axis=0)), token_indices)  # B, S, H, G, D
    q = op.Transpose(q, perm=[0, 2, 3, 1, 4])  # B, H, G, S, D
    page_count = op.Div(op.Add(op.ReduceMax(total, keepdims=1), op.Sub(page, 1)), page)
    in_use = op.Slice(table, [0], page_count, [1])
    safe = op.Max(op.Min(in_use, op.Sub(op.Shape(inputs["keys"], start=0, end=1), 1)), 0)
    if value_size:
        K = latents_of(op, (keys, values), safe)
        V = op.Slice(K, [0], [value_size], [-1])
    else:
        K = pages_of(op, storage, keys, key_scales, safe, are_keys=True)
        V = pages_of(op, storage, values, value_scales, safe)
    query_positions = op.Reshape(op.Add(op.Unsqueeze(past, [1]), step), [0, -1, 1])  # B, S, 1
    key_positions = _range(op, op.Shape(K, start=2, end=3))
    is_read = _is_read(op, query_positions, key_positions, is_chunked)
    if choice is not None:
        are_chosen = _are_chosen(op, choice, op.Shape(K, start=2, end=3))
        is_read = op.And(is_read, op.Gather(are_chosen, token_indices))
    biases = _biases(op, query_positions, key_positions, heads) if has_slopes else None
    second_codes = None
    if has_residuals:
        span, position = op.Shape(K, start=2, end=3), op.Add(op.Gather(past, row), column)
        tensors = [
            _residuals_of_rows(op, old, new, past, (row, position), span)
            for old, new in zip(old_residuals, new_residuals, strict=True)
        ]
        second_codes = *tensors, op.Unsqueeze(_is_twice(op, query_positions, key_positions, page), [1])
    y = _attend(op, q, K, V, op.Unsqueeze(is_read, [1]), inputs["sink_logits"], heads, biases, second_codes)
    y = op.Transpose(y, perm=[0, 3, 1, 2, 4])
    tensor = op.Concat(op.Unsqueeze(row, [1]), op.Unsqueeze(column, [1]), axis=1)
    shape = op.Concat(op.Shape(query, end=-1), [-1], axis=0) if value_size else op.Shape(query)
    y = op.Reshape(op.GatherND(y, tensor), shape)
    return op.CastLike(y, inputs["query"]), keys, values, key_scales, value_scales


def _slots_of(
    op: OpBuilder, first: ir.Value, ends: ir.Value, past: ir.Value, table: ir.Value, count: ir.Value, page: ir.Value
) -> tuple[ir.Value, ...]:
    """Return the request of each token, its number among the new ones there, its block and its slot, int64 [T].

    And whether a block is written by two requests, or twice by one, bool [1].
    """
    token = _range(op, count)
    is_later = op.Cast(op.GreaterOrEqual(op.Unsqueeze(token, [1]), ends), to=_INT64)
    last_row = op.Sub(op.Shape(past), 1)
    row = op.Min(op.ReduceSum(is_later, [1], keepdims=0), last_row)
    column = op.Sub(token, op.Gather(first, row))
    position = op.Add(op.Gather(past, row), column)
    last_page = op.Sub(op.Shape(table, start=1, end=2), 1)
    entry = op.Max(op.Min(op.Div(position, page), last_page), 0)
    block = op.GatherND(table, op.Concat(op.Unsqueeze(row, [1]), op.Unsqueeze(entry, [1]), axis=1))
    # as many blocks as entries of the table that are written
    entries = op.Unique(op.Add(op.Mul(row, op.Add(last_page, 1)), entry), _outputs=4)[0]
    is_shared = op.Less(op.Shape(op.Unique(block, _outputs=4)[0]), op.Shape(entries))
    return row, column, block, op.Mod(position, page), is_shared


def _is_read(op: OpBuilder, query_positions: ir.Value, key_positions: ir.Value, is_chunked: bool) -> ir.Value:
    """Return which keys each query reads, bool [B, S, L], for positions [B, S, 1] and [L]."""
    window = op.Reshape(_of_node(op, "window"), [1])
    no_chunks = op.Where(op.Equal(window, 0), 2**40, window)
    reach = op.Add(op.Mod(query_positions, window), 1) if is_chunked else no_chunks
    is_near = op.Greater(key_positions, op.Sub(query_positions, reach))
    return op.And(op.LessOrEqual(key_positions, query_positions), is_near)


def _are_chosen(op: OpBuilder, choice: ir.Value, length: ir.Value) -> ir.Value:
    """Return which of so many positions each token chooses, bool [T, L], for choice [T, K]."""
    indices = op.Where(op.Less(choice, 0), length, op.Min(choice, length))
    zeros = op.Expand(0.0, op.Concat(op.Shape(choice, start=0, end=1), op.Add(length, 1), axis=0))
    marks = op.ScatterElements(zeros, indices, op.Expand(1.0, op.Shape(choice)), axis=1)
    return op.Cast(op.Slice(marks, [0], length, [1]), to=_BOOL)


def _refusal_of_chosen(op: OpBuilder, choice: ir.Value, positions: ir.Value) -> ir.Value:
    """Return 0, int64 [1]; a Gather fails if what tokens at positions [T] choose, [T, K], does not fit them."""
    values, next_values = op.Slice(choice, [0], [-1], [1]), op.Slice(choice, [1], [2**62], [1])
    is_real, falls = op.GreaterOrEqual(next_values, 0), op.Or(op.LessOrEqual(next_values, values), op.Less(values, 0))
    counts = op.ReduceSum(op.Cast(op.GreaterOrEqual(choice, 0), to=_INT64), [1], keepdims=0)
    wrong = [
        op.Or(op.Less(choice, -1), op.Greater(choice, op.Unsqueeze(positions, [1]))),
        op.And(is_real, falls),
        op.Less(counts, 1),
    ]
    flat = op.Concat(*(op.Reshape(condition, [-1]) for condition in wrong), axis=0)
    error_count = op.ReduceSum(op.Cast(flat, to=_INT64), keepdims=1)
    return op.Gather([0], op.Min(error_count, 1))


def _lasting_residuals(
    op: OpBuilder, past: ir.Value, total: ir.Value, column: ir.Value, slot: ir.Value, page: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return which new tokens have a residual in their block after the call, and in which slots, int64 [n] each.

    Args:
        op: makes nodes.
        past: of the request of each token, int64 [T]; so is total.
        total: tokens of that after the call.
        column: of each token among the new ones of its request, int64 [T].
        slot: in its block, int64 [T].
        page: P, int64 [1].
    """
    counts = op.Min(op.Sub(total, op.Sub(op.Add(past, column), slot)), page)
    is_lasting = op.And(op.GreaterOrEqual(slot, op.Sub(op.Mul(counts, 2), page)), op.Less(slot, op.Sub(page, 1)))
    indices = op.Squeeze(op.NonZero(is_lasting), [0])
    return indices, op.Gather(residual_places(op, slot, page), indices)


def _residuals_of_rows(
    op: OpBuilder,
    old: ir.Value,
    new: ir.Value,
    past: ir.Value,
    indices_of_new: tuple[ir.Value, ir.Value],
    span: ir.Value,
) -> ir.Value:
    """Return what residuals add to the tokens of each request, float [B, H, L, D], 0 where none is read.

    Args:
        op: makes nodes.
        old: of the block that is filled further, [B, H, P, D].
        new: of new tokens, [T, H, D].
        past: int64 [B].
        indices_of_new: of new tokens, the request and the position, int64 [T] each.
        span: L, int64 [1].
    """
    page, batch = op.Shape(old, start=2, end=3), op.Shape(old, start=0, end=1)
    # a block more, where that of a request lies that is full
    dims = op.Concat(batch, op.Add(span, page), op.Shape(new, start=1), axis=0)
    row = op.Reshape(_range(op, batch), [-1, 1, 1])
    begin = op.Sub(past, op.Mod(past, page))
    position = op.Unsqueeze(op.Add(op.Unsqueeze(begin, [1]), _range(op, page)), [2])
    indices = op.Concat(op.Expand(row, op.Shape(position)), position, axis=2)
    rows = op.ScatterND(op.Expand(0.0, dims), indices, op.Transpose(old, perm=[0, 2, 1, 3]))
    rows = op.ScatterND(rows, op.Concat(*(op.Unsqueeze(index, [1]) for index in indices_of_new), axis=1), new)
    return op.Transpose(op.Slice(rows, [0], span, [1]), perm=[0, 2, 1, 3])


def _is_twice(op: OpBuilder, query_positions: ir.Value, key_positions: ir.Value, page: ir.Value) -> ir.Value:
    """Return whether queries at positions p [B, S, 1] read both codes of the tokens at j [L], bool [B, S, L]."""
    counts = op.Add(op.Mod(query_positions, page), 1)
    is_newest = op.GreaterOrEqual(op.Mod(key_positions, page), op.Sub(op.Mul(counts, 2), page))
    is_own = op.Equal(op.Div(query_positions, page), op.Div(key_positions, page))
    return op.And(is_newest, is_own)


def _biases(op: OpBuilder, query_positions: ir.Value, key_positions: ir.Value, heads: ir.Value) -> ir.Value:
    """Return slope (j - p), float [B, H, G, S, L], for positions p [B, S, 1] and j [L]."""
    distance = op.Cast(op.Sub(key_positions, query_positions), to=_FLOAT)
    slopes = op.Constant(value_floats=ir.RefAttr("value_floats", "slopes", ir.AttributeType.FLOATS))
    by_head = op.Reshape(slopes, op.Concat([1], heads, [-1, 1, 1], axis=0))
    return op.Mul(by_head, op.Unsqueeze(distance, [1, 2]))


def _attend(
    op: OpBuilder,
    q: ir.Value,
    K: ir.Value,
    V: ir.Value,
    is_read: ir.Value,
    sinks: ir.Value,
    heads: ir.Value,
    biases: ir.Value | None,
    second_codes: tuple[ir.Value, ir.Value, ir.Value] | None,
) -> ir.Value:
    """Return y [B, H, G, S, V] for queries [B, H, G, S, D], K [B, H, L, D], V [B, H, L, V], is_read [B, 1, S, L].

    Biases [B, H, G, S, L] are added to scores. ``second_codes`` has residuals of keys and of values, shapes as K and V,
    and whether a query reads them, [B, 1, S, L].
    """
    bad_keys, bad_values = (op.IsNaN(op.Mul(indices, 0.0)) for indices in (K, V))
    # a weight of 0 times a value that is not finite would make NaN
    clean_keys, clean_values = op.Where(bad_keys, 0.0, K), op.Where(bad_values, 0.0, V)
    is_lost = op.Cast(op.ReduceMax(op.Cast(bad_keys, to=ir.DataType.UINT8), [-1], keepdims=1), to=_BOOL)
    clean_keys = op.Where(is_lost, 0.0, clean_keys)
    scores = op.MatMul(q, op.Unsqueeze(op.Transpose(clean_keys, perm=[0, 1, 3, 2]), [2]))
    of_values = is_twice = None
    if second_codes is not None:
        of_keys, of_values, is_twice = second_codes
        is_twice = op.Cast(op.Unsqueeze(is_twice, [2]), to=_FLOAT)
        of_keys, of_values = (op.Where(op.IsNaN(op.Mul(x, 0.0)), 0.0, x) for x in (of_keys, of_values))
        second_scores = op.MatMul(q, op.Unsqueeze(op.Transpose(of_keys, perm=[0, 1, 3, 2]), [2]))
        scores = op.Add(scores, op.Mul(second_scores, is_twice))
    scores = op.Mul(scores, _of_node(op, "scale"))
    cap = _of_node(op, "softcap")
    has_none = op.Equal(cap, 0.0)
    soft_scores = op.Mul(op.Tanh(op.Div(scores, op.Where(has_none, 1.0, cap))), cap)
    scores = op.Where(has_none, scores, soft_scores)
    if biases is not None:
        scores = op.Add(scores, biases)
    scores = op.Where(op.Unsqueeze(is_read, [2]), scores, -math.inf)
    logits = op.Concat(scores, _sink_column(op, q, sinks, heads), axis=-1)
    weights = op.Slice(op.Softmax(logits, axis=-1), [0], [-1], [-1])
    y = op.MatMul(weights, op.Unsqueeze(clean_values, [2]))
    if of_values is not None and is_twice is not None:
        y = op.Add(y, op.MatMul(op.Mul(weights, is_twice), op.Unsqueeze(of_values, [2])))
    bad = op.Cast(op.Or(is_lost, bad_values), to=_FLOAT)
    reads = op.MatMul(op.Cast(is_read, to=_FLOAT), bad)  # B, H, S, D
    return op.Where(op.Unsqueeze(op.Greater(reads, 0.5), [2]), math.nan, y)


def _sink_column(op: OpBuilder, q: ir.Value, sinks: ir.Value, heads: ir.Value) -> ir.Value:
    """Return the logits of the sinks as a column of the scores [B, H, G, S, 1]; -inf where there are none."""
    all_heads = op.Mul(op.Shape(q, start=2, end=3), heads)
    absent = op.Expand(-math.inf, op.Sub(all_heads, op.Shape(sinks)))
    logits = op.Reshape(op.Concat(sinks, absent, axis=0), op.Concat([1], heads, [-1, 1, 1], axis=0))
    return op.Expand(logits, op.Concat(op.Shape(q, start=0, end=4), [1], axis=0))


def _refusal(
    op: OpBuilder,
    storage: str,
    value_size: int,
    blocks: ir.Value,
    starts: ir.Value,
    past: ir.Value,
    table: ir.Value,
    lengths: ir.Value,
    total: ir.Value,
    count: ir.Value,
    is_shared: ir.Value,
) -> ir.Value:
    """Return 0, int64 [1]; if numbers do not fit one another a Gather fails: ONNX has no other error."""
    page, columns = op.Shape(blocks, start=1, end=2), op.Shape(table, start=1, end=2)
    begins = op.Mul(_range(op, columns), page)
    outside = op.Or(op.Less(table, 0), op.GreaterOrEqual(table, op.Shape(blocks, start=0, end=1)))
    wide, pages = op.Shape(blocks, start=3, end=4), PAGES[1:] if value_size else PAGES
    step, largest = (
        (48 if storage == "int6" else LANES),
        STORAGES[storage or "float32"].elements(most_channels(storage or "float32")),
    )
    if value_size:
        step, largest = LANES // 2, MOST_LATENT // 2  # half of a latent
    wrong = [
        op.Or(op.Not(op.Equal(op.Mod(wide, step), 0)), op.Or(op.Less(wide, step), op.Greater(wide, largest))),
        op.Equal(op.ReduceSum(op.Cast(op.Equal(page, [*pages]), to=_INT64), keepdims=1), 0),
        op.Not(op.Equal(op.Gather(starts, [0]), 0)),
        op.Not(op.Equal(op.Gather(starts, [-1]), count)),
        op.Less(lengths, 0),
        op.Less(past, 0),
        op.Greater(total, op.Mul(columns, page)),
        op.Reshape(op.And(outside, op.Less(begins, op.Unsqueeze(total, [1]))), [-1]),
        is_shared,
    ]
    if value_size:
        wrong.append(op.Less(op.Mul(wide, 2), value_size))
    if storage:  # onnxruntime 1.18 to 1.24 give nodes of all storages the same body
        is_same = op.Equal(_of_node(op, "storage"), op.Constant(value_string=storage))
        wrong.append(op.Reshape(op.Not(is_same), [1]))
    error_count = op.ReduceSum(op.Cast(op.Concat(*wrong, axis=0), to=_INT64), keepdims=1)
    return op.Gather([0], op.Min(error_count, 1))


def _range(op: OpBuilder, size: ir.Value) -> ir.Value:
    """Return 0 .. size - 1 for a size int64 [1]."""
    return op.Range(0, op.Squeeze(size, [0]), 1)


def _of_node(op: OpBuilder, name: str) -> Any:
    """Return an attribute of the node, a scalar."""
    field = _FIELDS[SCHEMA.attributes[name]]
    return op.Constant(**{field: ir.RefAttr(field, name, SCHEMA.attributes[name])})
