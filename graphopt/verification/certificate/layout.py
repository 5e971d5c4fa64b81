"""Ops that only move elements: what they do to elements, done to labels.

A rule here is right for every size of the symbolic dimensions, although labels have size 1 there: along such a
dimension all positions have the same labels, each with copies of its own.
"""

from __future__ import annotations

from math import prod

import numpy as np

from graphopt.verification.certificate.coordinates import Tag, canonical, planes
from graphopt.verification.certificate.reasons import (
    CAST,
    EXPANSION,
    JOINS_SHAPES,
    PUT_BEHIND,
    SHAPE_UNKNOWN,
    SLICE_AXES,
    SLICE_PLACES,
    SPLIT,
)
from graphopt.verification.certificate.reshape import only_rotated, reshape
from graphopt.verification.certificate.site import Rule, Site, static, text_of
from graphopt.verification.certificate.weights import apply_to_array


def transpose(site: Site) -> list[Tag]:
    """Axes change places."""
    x = only_rotated(site)
    order = site.node.attributes.get_ints("perm", range(len(x.shape))[::-1])
    return [x.move(lambda plane: plane.transpose(tuple(order)))]


def split(site: Site) -> list[Tag]:
    """Each part takes its labels."""
    x = only_rotated(site)
    axis = site.attribute("axis", 0) % len(x.shape)
    sizes = [site.output_shape(index)[axis] for index in range(len(site.node.outputs))]
    source = site.input_dims(0)
    if source is None or not isinstance(source[axis], int):
        site.refuse(SPLIT())
    parts = np.split(x.labels, np.cumsum(sizes)[:-1], axis + 1)
    return [canonical(part) for part in parts]


def slice_(site: Site) -> list[Tag]:
    """Coordinates between constants; along an axis without labels, any."""
    x, shape = only_rotated(site), site.output_shape()
    starts, ends, axes, steps = (_numbers(site, index) for index in (1, 2, 3, 4))
    if len(shape) != len(x.shape) or (starts is None and axes is None):
        site.refuse(SLICE_AXES())
    for position, axis in enumerate(axes if axes is not None else range(len(starts or ()))):
        axis %= len(shape)
        row = x.reduce([axis])
        if row is not None:
            x = row.spread([*x.shape[:axis], shape[axis], *x.shape[axis + 1 :]])
            continue
        if starts is None or ends is None or (steps is None and len(site.node.inputs) > 4):
            site.refuse(SLICE_PLACES())
        positions = slice(starts[position], ends[position], steps[position] if steps else 1)
        slice_tag = canonical(x.labels[(slice(None),) * (axis + 1) + (positions,)])
        if slice_tag is None:
            return [None]
        x = slice_tag
    return [x]


def expand(site: Site) -> list[Tag]:
    """Repeated elements are copies of their own."""
    try:
        return [only_rotated(site).spread(site.output_shape())]
    except ValueError:
        site.refuse(EXPANSION(target=text_of(site.output_dims())))


def concat(site: Site) -> list[Tag]:
    """Along an axis of unknown size all inputs have the same labels at each position; else labels come side by side."""
    target = site.output_dims()
    axis = site.attribute("axis", 0) % len(target)
    shape = static(target)
    if not isinstance(target[axis], int):
        rows = [tag and tag.reduce([axis]) for tag in site.tags]
        first = rows[0]
        if first is None or any(row is None or row.key() != first.key() for row in rows):
            site.refuse(PUT_BEHIND())
        return [first]
    parts, copies = [], 0
    for index, tag in enumerate(site.tags):
        dims = site.input_dims(index)
        size = None if dims is None else dims[axis]
        if not isinstance(size, int):
            site.refuse(SHAPE_UNKNOWN(tensor=site.name(index)))
        part = planes(tag, [*shape[:axis], size, *shape[axis + 1 :]]).copy()
        part[1] += copies
        copies += prod(part.shape)
        parts.append(part)
    try:
        return [canonical(np.concatenate(parts, axis + 1))]
    except ValueError:
        site.refuse(JOINS_SHAPES())


def same_elements(site: Site) -> list[Tag]:
    """``Identity``, ``Neg`` and ``Cast`` between floating-point types: x Q stays x Q, and -(x Q) = (-x) Q."""
    types = [value.dtype for value in (site.before.inputs[0], site.before.outputs[0]) if value is not None]
    if site.node.op_type == "Cast" and not all(dtype is not None and dtype.is_floating_point() for dtype in types):
        site.refuse(CAST())
    return [only_rotated(site)]


def _numbers(site: Site, index: int) -> list[int] | None:
    """Return the numbers of an input that is a constant vector."""
    pair = site.constants.get(index)
    return None if pair is None else apply_to_array(pair[0], lambda numbers: [int(number) for number in numbers])


LAYOUT: dict[str, Rule] = {
    "Cast": same_elements,
    "Concat": concat,
    "Expand": expand,
    "Flatten": reshape,
    "Identity": same_elements,
    "Neg": same_elements,
    "Reshape": reshape,
    "Slice": slice_,
    "Split": split,
    "Squeeze": reshape,
    "Transpose": transpose,
    "Unsqueeze": reshape,
}
