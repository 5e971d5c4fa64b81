"""Products with weights and of activations, and rows that are looked up: where coordinates are written and read.

The algebra is stated for row vectors, x -> x Q.
"""

from __future__ import annotations

import numpy as np

from graphopt.verification.certificate.coordinates import Coordinates, Tag, same_coordinates
from graphopt.verification.certificate.reasons import (
    BATCH_DIMS,
    LOOKS_UP,
    LOOKS_UP_BY,
    POSITIONS_DIFFER,
    ROWS_DIFFER,
    SHAPE_UNKNOWN,
    SIDES_DIFFER,
    SIDES_NOT_SAME,
    STACKED_WEIGHT,
    VECTOR,
)
from graphopt.verification.certificate.site import Dims, Site, static


def matmul(site: Site) -> list[Tag]:
    """``x W`` with a constant W [m, n]: W' = M_in^T W M_out; else a product of two activations."""
    if 1 not in site.constants:
        return product(site)
    shape = site.constants[1][0].shape.numpy()
    if len(shape) != 2:
        site.refuse(STACKED_WEIGHT(axes=len(shape)), site.name(1))
    return [_through_weight(site, 1, _row(site, site.tags[0], shape[0], "reads"), shape[1])]


def gather(site: Site) -> list[Tag]:
    """``table[ids]`` with a constant table [m, n]: table' = table M_out; else rows of an activation are picked."""
    axis = site.attribute("axis", 0)
    if 0 in site.constants and site.tags[1] is None and axis == 0 and len(site.constants[0][0].shape) == 2:
        return [_through_weight(site, 0, None, site.constants[0][0].shape.numpy()[1])]
    x = site.tags[0]
    if x is None or site.tags[1] is not None:
        site.refuse(LOOKS_UP())
    ids, axis = site.input_dims(1), axis % len(x.shape)
    if ids is None:
        site.refuse(SHAPE_UNKNOWN(tensor=site.name(1)))
    return [_pick_rows(site, x, axis, 1, ids)]


def gather_rows(site: Site) -> list[Tag]:
    """``GatherND``: the last axis of the indices says which leading axes they pick from; rows stay whole."""
    x, ids = site.tags[0], site.input_dims(1)
    depth = ids[-1] if ids else None
    if x is None or site.tags[1] is not None or ids is None or not isinstance(depth, int):
        site.refuse(LOOKS_UP_BY())
    if site.attribute("batch_dims", 0):
        site.refuse(BATCH_DIMS())
    return [_pick_rows(site, x, 0, depth, ids[:-1])]


def product(site: Site) -> list[Tag]:
    """``a b``: (a Q)(Q^T b) = a b where both are rotated along the axis that is summed over; a (b Q) = (a b) Q."""
    a, b = site.tags[:2]
    shape = site.output_shape()
    if len(shape) < 2 or any(tag is not None and len(tag.shape) < 2 for tag in (a, b)):
        site.refuse(VECTOR())
    contracts_a, contracts_b = (
        _contraction_labels(tag, axis, reduced_axis) for tag, axis, reduced_axis in ((a, -1, -2), (b, -2, -1))
    )
    if contracts_a is not None and contracts_b is not None:
        batch = np.broadcast_shapes(shape[:-2], contracts_a.shape[:-2], contracts_b.shape[:-2])
        labels_a, labels_b = (tag.labels.reshape(3, *tag.shape[:-2], -1) for tag in (contracts_a, contracts_b))
        if same_coordinates(
            Coordinates(labels_a).spread((*batch, labels_a.shape[-1])),
            Coordinates(labels_b).spread((*batch, labels_b.shape[-1])),
        ):
            return [None]
        site.refuse(SIDES_DIFFER())
    if a is None and b is not None and b.spanned_axes() <= {len(b.shape) - 1}:
        row = b.reduce([-2])
        if row is not None:
            return [row.spread(shape)]
    site.refuse(SIDES_NOT_SAME())


def _pick_rows(site: Site, x: Coordinates, axis: int, depth: int, ids: Dims) -> Tag:
    """Return the labels where ``depth`` axes from ``axis`` on are replaced by those of ``ids``."""
    row = x.reduce(range(axis, axis + depth))
    if row is None:
        site.refuse(POSITIONS_DIFFER())
    before, after = row.shape[:axis], row.shape[axis + depth :]
    labels = row.labels.reshape(3, *before, *(1 for _ in ids), *after)
    return Coordinates(labels).spread((*before, *static(ids), *after))


def _through_weight(site: Site, index: int, rows: Tag, width: int) -> Tag:
    site.fused_inputs.add(index)
    claim = site.claims[0]
    site.fuse(site, index, rows, _row(site, claim, width, "writes"))
    return claim


def _row(site: Site, tag: Tag, width: int, verb: str) -> Tag:
    """Return the labels of the last axis, the same for each row, or nothing if there are none."""
    if tag is None:
        return None
    row = tag.along_last()
    if row is None or row.shape != (width,):
        site.refuse(ROWS_DIFFER(verb=verb, width=width))
    return row


def _contraction_labels(tag: Tag, axis: int, reduced_axis: int) -> Coordinates | None:
    """Return labels that lie along axis ``axis`` alone and are the same at each position of ``reduced_axis``."""
    if tag is None or not tag.spanned_axes() <= {axis % len(tag.shape)}:
        return None
    return tag.reduce([reduced_axis])
