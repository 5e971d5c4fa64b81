"""Attention: scores are products of queries and keys, so both may be rotated alike; outputs are sums of values.

For each query head h and the key-value head h // (H / G) that it reads: (q Q)(k Q)^T = q k^T, and p (v R) = (p v) R.
The past is in the coordinates of what is appended to it. Scale, mask, soft cap and window see only scores.

A linear recurrence sums up values too, weighed by keys, queries, decays and betas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.verification.certificate.coordinates import Coordinates, Tag, canonical, planes, same_coordinates
from graphopt.verification.certificate.reasons import (
    GROUPS,
    HEADS_DIFFER,
    HEADS_MIXED,
    HEADS_UNKNOWN,
    MASK,
    PAST_DIFFERS,
    TOKENS_DIFFER,
    WEIGHS_VALUES,
)
from graphopt.verification.certificate.site import Site, static

if TYPE_CHECKING:
    from collections.abc import Sequence

_QUERY, _KEY, _VALUE, _DECAY, _BETA, _MASK, _STATE = range(7)  # inputs of LinearRecurrence
_HEADS = ("q_num_heads", "kv_num_heads", "kv_num_heads")


def attention(site: Site) -> list[Tag]:
    """Follow ``Attention`` with inputs [batch, heads, length, width] or [batch, length, heads x width]."""
    if any(tag is not None for tag in (site.tag(3), *site.tags[6:])):
        site.refuse(MASK())
    queries, keys, values = (_heads(site, index) for index in range(3))
    counts = [_count(site, index) for index in range(3)]
    if counts[1] != counts[2] or not counts[1] or counts[0] % counts[1]:
        site.refuse(GROUPS(queries=counts[0], keys=counts[1], values=counts[2]))
    group = counts[0] // counts[1]
    for head in range(counts[0]):
        if not same_coordinates(_head(queries, head), _head(keys, head // group)):
            site.refuse(
                HEADS_DIFFER(query=head, key=head // group, queries=site.name(0), keys=site.name(1)),
                site.name(0) if keys is not None else site.name(1),
            )
    for past, tag, role in ((4, keys, "keys"), (5, values, "values")):
        has_past = past < len(site.node.inputs) and site.node.inputs[past] is not None
        if has_past and not same_coordinates(_heads(site, past), tag):
            site.refuse(PAST_DIFFERS(what=role, past=site.name(past)), site.name(past))
    outputs: list[Tag] = [_repeat_heads(site, values, group)]
    outputs += [None if tag is None else _in_cache(site, tag, index) for index, tag in ((1, keys), (2, values))]
    return [*outputs, None][: len(site.node.outputs)]


def recurrence(site: Site) -> list[Tag]:
    """Follow ``LinearRecurrence``: S = a S + b k (v - S^T k)^T and y = S^T q, so S R and y R for v R, head by head."""
    for index in (_QUERY, _KEY, _DECAY, _BETA, _MASK):
        if site.tag(index) is not None:
            site.refuse(WEIGHS_VALUES(tensor=site.name(index)), site.name(index))
    values = _heads_along(site, _VALUE, 2)
    if not same_coordinates(values, _heads_along(site, _STATE, 1)):
        site.refuse(PAST_DIFFERS(what="values", past=site.name(_STATE)), site.name(_STATE))
    if values is None:
        return [None, None]
    output, state = values.labels[:, None, None], values.labels[:, None, :, None]
    return [_broadcast(output, site.output_shape(0)), _broadcast(state, site.output_shape(1))]


def _heads_along(site: Site, index: int, axis: int) -> Tag:
    """Return the labels [heads, width] of a tensor of four axes, whose heads lie along ``axis``."""
    tag = site.tag(index)
    if tag is None:
        return None
    row = tag.reduce([i for i in range(3) if i != axis]) if len(tag.shape) == 4 else None
    if row is None:
        site.refuse(TOKENS_DIFFER(tensor=site.name(index)), site.name(index))
    heads = Coordinates(row.labels.reshape(3, tag.shape[axis], -1))
    if not heads.spanned_axes() <= {1}:
        site.refuse(HEADS_MIXED(tensor=site.name(index)), site.name(index))
    return canonical(heads.labels)


def _heads(site: Site, index: int) -> Tag:
    """Return the labels [heads, width] of queries, keys, values or a past; each head has copies of its own."""
    tag = site.tag(index)
    if tag is None:
        return None
    rank = len(tag.shape)
    is_flat = rank == 3
    row = tag.reduce([0, 1] if is_flat else [0, 2])
    if rank not in (3, 4) or row is None:
        site.refuse(TOKENS_DIFFER(tensor=site.name(index)), site.name(index))
    heads = Coordinates(row.labels.reshape(3, _count(site, index), -1))
    if not heads.spanned_axes() <= {1}:
        site.refuse(HEADS_MIXED(tensor=site.name(index)), site.name(index))
    return heads


def _count(site: Site, index: int) -> int:
    """Return the number of heads of an input."""
    dims = site.input_dims(index)
    heads: int | str | None = None
    if dims is not None:
        heads = dims[1] if len(dims) == 4 else site.attribute(_HEADS[index], 0)
    if not isinstance(heads, int):
        site.refuse(HEADS_UNKNOWN(tensor=site.name(index)))
    return heads


def _head(heads: Tag, head: int) -> Tag:
    """Return the labels [width] of one head."""
    return None if heads is None else canonical(heads.labels[:, head])


def _repeat_heads(site: Site, values: Tag, group: int) -> Tag:
    """Return the coordinates of the output: query head h has those of value head h // group."""
    if values is None:
        return None
    heads = planes(values, values.shape).repeat(group, axis=1)
    # What was repeated are copies of their own.
    heads[1] = np.where(heads[1] > 0, heads[1] * group + np.arange(heads.shape[1])[:, None] % group, 0)
    shape = site.output_shape()
    if len(shape) == 3:
        return _broadcast(heads.reshape(3, 1, 1, -1), shape)
    return _broadcast(heads[:, None, :, None, :], shape)


def _in_cache(site: Site, heads: Coordinates, output: int) -> Tag:
    if output >= len(site.node.outputs) or not site.node.outputs[output].name:
        return None
    return _broadcast(heads.labels[:, None, :, None, :], static(site.output_dims(output)))


def _broadcast(labels: np.typing.NDArray[np.int64], shape: Sequence[int]) -> Tag:
    tag = canonical(labels)
    return None if tag is None else tag.spread(shape)
