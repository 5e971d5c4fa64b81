"""Ops that only move elements: what they do to elements, done to labels.

A rule here is right for every size of the symbolic dimensions, although labels have size 1 there: along such a
dimension all positions have the same labels, each with copies of its own.
"""

from __future__ import annotations

from itertools import groupby
from math import prod

import numpy as np

from graphopt.certificate.coordinates import Coordinates, Tag, canonical, planes
from graphopt.certificate.site import Dims, Rule, Site, static


def reshape(site: Site) -> list[Tag]:
    """Runs of symbolic dimensions keep their places between runs of numbers, so each run maps onto itself."""
    x, target = _data(site), site.output_dims()
    source = site.input_dims(0)
    if source is None or not _follows(source, target):
        site.refuse(f"a reshape from {_text(source)} to {_text(target)} cannot be followed")
    return [x.moved(lambda plane: plane.reshape(static(target)))]


def transpose(site: Site) -> list[Tag]:
    """Axes change places."""
    x = _data(site)
    order = site.node.attributes.get_ints("perm", range(len(x.shape))[::-1])
    return [x.moved(lambda plane: plane.transpose(tuple(order)))]


def split(site: Site) -> list[Tag]:
    """Each part takes its labels."""
    x = _data(site)
    axis = site.attribute("axis", 0) % len(x.shape)
    sizes = [site.output_shape(index)[axis] for index in range(len(site.node.outputs))]
    source = site.input_dims(0)
    if source is None or not isinstance(source[axis], int) or sum(sizes) != x.shape[axis]:
        site.refuse("a split along an axis of unknown size, or into parts that are not all of it")
    parts = np.split(x.labels, np.cumsum(sizes)[:-1], axis + 1)
    return [canonical(part) for part in parts]


def slice_(site: Site) -> list[Tag]:
    """Coordinates between constants; along an axis without labels, any."""
    x, shape = _data(site), site.output_shape()
    rank = len(x.shape)
    starts = site.constants.get(1)
    axes = site.constants.get(3)
    if len(shape) != rank or (starts is None and axes is None):
        site.refuse("a slice along axes that are not constant")
    count = starts[0].size if starts is not None else 0
    for position, axis in enumerate(axes[0].numpy().tolist() if axes is not None else range(count)):
        axis %= rank
        row = x.reduced([axis])
        if row is not None:
            x = row.spread([size if a != axis else shape[axis] for a, size in enumerate(x.shape)])
            continue
        if any(
            i < len(site.node.inputs) and site.node.inputs[i] is not None and i not in site.constants for i in (1, 2, 4)
        ):
            site.refuse("a slice of rotated coordinates at places that are not constant")
        start, end, step = (
            site.constants[i][0].numpy().tolist()[position] if i in site.constants else 1 for i in (1, 2, 4)
        )
        where = (slice(None),) * (axis + 1) + (slice(start, end, step),)
        moved = canonical(x.labels[where])
        if moved is None:
            return [None]
        x = moved
    return [x]


def expand(site: Site) -> list[Tag]:
    """Repeated elements are copies of their own."""
    try:
        return [_data(site).spread(site.output_shape())]
    except ValueError:
        site.refuse(f"an expansion to {_text(site.output_dims())} cannot be followed")


def concat(site: Site) -> list[Tag]:
    """Along an axis of unknown size all inputs have the same labels at each position; else labels come side by side."""
    target = site.output_dims()
    axis = site.attribute("axis", 0) % len(target)
    shape = static(target)
    if not isinstance(target[axis], int):
        rows = [tag and tag.reduced([axis]) for tag in site.tags]
        first = rows[0]
        if first is None or any(row is None or row.key() != first.key() for row in rows):
            site.refuse("it puts tensors in different coordinates one behind the other")
        return [first]
    parts, copies = [], 0
    for index, tag in enumerate(site.tags):
        dims = site.input_dims(index)
        size = None if dims is None else dims[axis]
        if not isinstance(size, int):
            site.refuse(f"the graph does not state the shape of {site.name(index)}")
        part = planes(tag, [*shape[:axis], size, *shape[axis + 1 :]]).copy()
        part[1] += copies
        copies += prod(part.shape)
        parts.append(part)
    try:
        return [canonical(np.concatenate(parts, axis + 1))]
    except ValueError:
        site.refuse("it joins tensors of different shapes")


def same_elements(site: Site) -> list[Tag]:
    """``Identity``, ``Neg`` and ``Cast`` between floating-point types: x Q stays x Q, and -(x Q) = (-x) Q."""
    types = [value.dtype for value in (site.before.inputs[0], site.before.outputs[0]) if value is not None]
    if site.node.op_type == "Cast" and not all(dtype is not None and dtype.is_floating_point() for dtype in types):
        site.refuse("it turns rotated coordinates into another type than floating point")
    return [_data(site)]


def _data(site: Site) -> Coordinates:
    """Return the labels of the only input that may have any."""
    x = site.tags[0]
    if x is None or any(tag is not None for tag in site.tags[1:]):
        site.refuse("its shape or indices are in rotated coordinates")
    return x


def _follows(source: Dims, target: Dims) -> bool:
    """Return whether runs of numbers have equal products, and runs of names are the same, all but one at most.

    The one that may differ is then equal too, since both shapes have the same number of elements.
    """
    one, other = _runs(source), _runs(target)
    if len(one) != len(other) or any(
        isinstance(a, int) is not isinstance(b, int) for a, b in zip(one, other, strict=True)
    ):
        return False
    unequal = [(a, b) for a, b in zip(one, other, strict=True) if a != b or (isinstance(a, tuple) and None in a)]
    return not unequal or (len(unequal) == 1 and isinstance(unequal[0][0], tuple))


def _runs(dims: Dims) -> list[int | tuple[str | None, ...]]:
    """Return products of neighbouring numbers and tuples of neighbouring names; a 1 is no boundary."""
    wide = [dim for dim in dims if dim != 1]
    runs: list[int | tuple[str | None, ...]] = []
    for fixed, run in groupby(wide, key=lambda dim: isinstance(dim, int)):
        parts = list(run)
        runs.append(
            prod(dim for dim in parts if isinstance(dim, int))
            if fixed
            else tuple(d for d in parts if not isinstance(d, int))
        )
    return runs


def _text(dims: Dims | None) -> str:
    return "an unknown shape" if dims is None else f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


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
