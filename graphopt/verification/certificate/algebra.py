"""Sums, scales and norms: which coordinates pass through them, with the algebra that says so; and the table of rules.

The algebra is stated for row vectors, x -> x Q. An op that is not in the table looks at single coordinates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.verification.certificate.attention import attention, recurrence
from graphopt.verification.certificate.coordinates import Coordinates, Tag, same_coordinates
from graphopt.verification.certificate.layout import LAYOUT
from graphopt.verification.certificate.products import gather, gather_rows, matmul
from graphopt.verification.certificate.reasons import (
    ADDS_DIFFERENT,
    CHOOSES_AMONG,
    CHOOSES_BETWEEN,
    CONDITION,
    GAIN,
    MEAN,
    OTHER_AXIS,
    SCALES_MIXED,
    SHAPE_UNKNOWN,
    SINGLE_COORDINATES,
    SPREAD,
    SUM_AXES,
    SUM_DIFFERENT,
)
from graphopt.verification.certificate.site import Rule, Site, static
from graphopt.verification.certificate.weights import apply_to_array

if TYPE_CHECKING:
    from collections.abc import Sequence


def add(site: Site) -> list[Tag]:
    """``a + b``: a Q + b Q = (a + b) Q; a constant b that is added to rotated coordinates is b M."""
    rotated_tags = [tag for tag in site.tags if tag is not None]
    shape = np.broadcast_shapes(
        *(tag.shape for tag in rotated_tags), *(c[0].shape.numpy() for c in site.constants.values())
    )
    if not rotated_tags:
        return [None]
    wide = [tag.spread(shape) for tag in rotated_tags]
    for index, tag in enumerate(site.tags):
        if index in site.constants:
            _add_constant(site, index, wide[0])
        elif tag is None or not same_coordinates(tag.spread(shape), wide[0]):
            site.refuse(ADDS_DIFFERENT(tensors=[site.name(0), site.name(1)]), site.name(index))
    return [wide[0]]


def scale(site: Site) -> list[Tag]:
    """``x c``, ``x / c``: c (x Q) = (c x) Q for one number c for all coordinates that a copy of Q mixes."""
    index = 0 if site.tags[0] is not None else 1
    x, factor = site.tags[index], site.input_dims(1 - index)
    if x is None or site.tags[1 - index] is not None or (site.node.op_type == "Div" and index == 1):
        site.refuse(SINGLE_COORDINATES(op=site.node.op_type))
    if factor is None:
        site.refuse(SHAPE_UNKNOWN(tensor=site.name(1 - index)))
    lead = (1,) * (len(x.shape) - len(factor)) + tuple(factor)
    new_axes = len(lead) - len(x.shape)
    if any(lead[axis + new_axes] != 1 for axis in x.spanned_axes()):
        site.refuse(
            SCALES_MIXED(tensor=site.name(1 - index)),
            site.name(1 - index),
        )
    return [x.spread(np.broadcast_shapes(x.shape, static(lead)))]


def root_mean_square(site: Site) -> list[Tag]:
    """``x / rms(x)``: |x Q| = |x|, so a norm whose gain is one number lets any orthogonal map of its rows through."""
    x = site.tags[0]
    if x is None or not _within_rows(x) or site.attribute("axis", -1) not in (-1, len(x.shape) - 1):
        site.refuse(OTHER_AXIS())
    gain = site.constants.get(1)
    if gain is None or not apply_to_array(gain[0], lambda numbers: bool(np.all(numbers == numbers.flat[0]))):
        site.refuse(GAIN(), site.name(1))
    return [x]


def layer_norm(site: Site) -> list[Tag]:
    """``x - mean(x)`` depends on single coordinates."""
    site.refuse(MEAN())


def select(site: Site) -> list[Tag]:
    """``Where``: one condition for all coordinates that a rotation mixes; zero is zero in any coordinates."""
    condition, rank = site.input_dims(0), len(site.output_dims())
    shape = site.output_shape()
    rotated_tags = [tag.spread(shape) for tag in site.tags[1:] if tag is not None]
    zeros = [i in site.constants and not apply_to_array(site.constants[i][0], np.any) for i in (1, 2)]
    if condition is None or not rotated_tags or site.tags[0] is not None:
        site.refuse(CONDITION())
    lead = (1,) * (rank - len(condition)) + tuple(condition)
    if any(lead[axis] != 1 for axis in rotated_tags[0].spanned_axes()):
        site.refuse(CHOOSES_AMONG())
    for index in (1, 2):
        tag = site.tags[index]
        if not zeros[index - 1] and (tag is None or not same_coordinates(tag.spread(shape), rotated_tags[0])):
            site.refuse(CHOOSES_BETWEEN(), site.name(index))
    return [rotated_tags[0]]


def total(site: Site) -> list[Tag]:
    """``ReduceSum`` and ``ReduceMean`` over an axis along which all is in the same coordinates."""
    x, axes = site.tags[0], site.constants.get(1)
    if x is None or axes is None or not axes[0].size:
        site.refuse(SUM_AXES())
    sum_axes = {int(axis) % len(x.shape) for axis in apply_to_array(axes[0], lambda numbers: numbers.tolist())}
    row = x.reduce(sorted(sum_axes))
    if row is None:
        site.refuse(SUM_DIFFERENT())
    keeps_axes = bool(site.attribute("keepdims", 1))
    return [row.move(lambda plane: plane if keeps_axes else plane.squeeze(tuple(sum_axes)))]


def no_values(site: Site) -> list[Tag]:
    """``Shape`` and ``Size`` see no values."""
    return [None] * len(site.node.outputs)


def _within_rows(tag: Coordinates) -> bool:
    return tag.spanned_axes() <= {len(tag.shape) - 1}


def _add_constant(site: Site, index: int, labels: Coordinates) -> None:
    shape: Sequence[int] = site.constants[index][0].shape.numpy()
    rank = len(labels.shape)
    lead = (1,) * (rank - len(shape)) + tuple(shape)
    narrow = labels.reduce([axis for axis in range(rank) if lead[axis] == 1])
    if narrow is None:
        site.refuse(SPREAD(tensor=site.name(index)), site.name(index))
    site.fused_inputs.add(index)
    site.fuse_entries(site, index, Coordinates(narrow.labels.reshape(3, *shape)))


RULES: dict[str, Rule] = {
    **LAYOUT,
    "Add": add,
    "Attention": attention,
    "Div": scale,
    "Gather": gather,
    "GatherND": gather_rows,
    "LayerNormalization": layer_norm,
    "MatMul": matmul,
    "Mul": scale,
    "RMSNormalization": root_mean_square,
    "ReduceMean": total,
    "ReduceSum": total,
    "Shape": no_values,
    "Size": no_values,
    "Sub": add,
    "Where": select,
}

OWN_RULES: dict[str, Rule] = {"LinearRecurrence": recurrence}
"""Of operators of the domain ``ai.graphopt``, whose bodies are looked at apart."""
