"""Sums, scales and norms: which coordinates pass through them, with the algebra that says so; and the table of rules.

The algebra is stated for row vectors, x -> x Q. An op that is not in the table looks at single coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphopt.checks.certificate.attention import attention
from graphopt.checks.certificate.coordinates import Coordinates, Tag, same
from graphopt.checks.certificate.layout import LAYOUT
from graphopt.checks.certificate.products import gather, gather_rows, matmul
from graphopt.checks.certificate.site import Rule, Site, static
from graphopt.checks.certificate.weights import read


def add(site: Site) -> list[Tag]:
    """``a + b``: a Q + b Q = (a + b) Q; a constant b that is added to rotated coordinates is b M."""
    labelled = [tag for tag in site.tags if tag is not None]
    shape = np.broadcast_shapes(
        *(tag.shape for tag in labelled), *(c[0].shape.numpy() for c in site.constants.values())
    )
    if not labelled:
        return [None]
    wide = [tag.spread(shape) for tag in labelled]
    for index, tag in enumerate(site.tags):
        if index in site.constants:
            _add_constant(site, index, wide[0])
        elif tag is None or not same(tag.spread(shape), wide[0]):
            names = f"{site.name(0)} and {site.name(1)}"
            site.refuse(f"it adds tensors in different coordinates, {names}", site.name(index))
    return [wide[0]]


def scale(site: Site) -> list[Tag]:
    """``x c``, ``x / c``: c (x Q) = (c x) Q for one number c for all coordinates that a copy of Q mixes."""
    which = 0 if site.tags[0] is not None else 1
    x, factor = site.tags[which], site.input_dims(1 - which)
    if x is None or site.tags[1 - which] is not None or (site.node.op_type == "Div" and which == 1):
        site.refuse(f"{site.node.op_type} looks at single coordinates")
    if factor is None:
        site.refuse(f"the graph does not state the shape of {site.name(1 - which)}")
    lead = (1,) * (len(x.shape) - len(factor)) + tuple(factor)
    more = len(lead) - len(x.shape)
    if any(lead[axis + more] != 1 for axis in x.spanned()):
        site.refuse(
            f"{site.name(1 - which)} scales the coordinates that a rotation mixes by different numbers",
            site.name(1 - which),
        )
    return [x.spread(np.broadcast_shapes(x.shape, static(lead)))]


def root_mean_square(site: Site) -> list[Tag]:
    """``x / rms(x)``: |x Q| = |x|, so a norm whose gain is one number lets any orthogonal map of its rows through."""
    x = site.tags[0]
    if x is None or not _within_rows(x) or site.attribute("axis", -1) not in (-1, len(x.shape) - 1):
        site.refuse("it does not normalise over the axis that is rotated, and that alone")
    gain = site.constants.get(1)
    if gain is None or not read(gain[0], lambda numbers: bool(np.all(numbers == numbers.flat[0]))):
        site.refuse(
            "its gain was not folded into the weights behind it: it scales rotated coordinates one by one", site.name(1)
        )
    return [x]


def layer_norm(site: Site) -> list[Tag]:
    """``x - mean(x)`` depends on single coordinates."""
    site.refuse("it subtracts a mean over rotated coordinates: the mean was not folded into the weights before it")


def select(site: Site) -> list[Tag]:
    """``Where``: one condition for all coordinates that a rotation mixes; zero is zero in any coordinates."""
    condition, rank = site.input_dims(0), len(site.output_dims())
    shape = site.output_shape()
    labelled = [tag.spread(shape) for tag in site.tags[1:] if tag is not None]
    zeros = [i in site.constants and not read(site.constants[i][0], np.any) for i in (1, 2)]
    if condition is None or not labelled or site.tags[0] is not None:
        site.refuse("its condition is in rotated coordinates, or has no stated shape")
    lead = (1,) * (rank - len(condition)) + tuple(condition)
    if any(lead[axis] != 1 for axis in labelled[0].spanned()):
        site.refuse("it chooses among the coordinates that a rotation mixes one by one")
    for index in (1, 2):
        tag = site.tags[index]
        if not zeros[index - 1] and (tag is None or not same(tag.spread(shape), labelled[0])):
            site.refuse("it chooses between tensors in different coordinates", site.name(index))
    return [labelled[0]]


def total(site: Site) -> list[Tag]:
    """``ReduceSum`` and ``ReduceMean`` over an axis along which all is in the same coordinates."""
    x, axes = site.tags[0], site.constants.get(1)
    if x is None or axes is None or not axes[0].size:
        site.refuse("it adds up along axes that are not constant")
    over = {int(axis) % len(x.shape) for axis in read(axes[0], lambda numbers: numbers.tolist())}
    row = x.reduced(sorted(over))
    if row is None:
        site.refuse("it adds up what is in different coordinates")
    kept = bool(site.attribute("keepdims", 1))
    return [row.moved(lambda plane: plane if kept else plane.squeeze(tuple(over)))]


def no_values(site: Site) -> list[Tag]:
    """``Shape`` and ``Size`` see no values."""
    return [None] * len(site.node.outputs)


def _within_rows(tag: Coordinates) -> bool:
    return tag.spanned() <= {len(tag.shape) - 1}


def _add_constant(site: Site, index: int, labels: Coordinates) -> None:
    shape: Sequence[int] = site.constants[index][0].shape.numpy()
    rank = len(labels.shape)
    lead = (1,) * (rank - len(shape)) + tuple(shape)
    narrow = labels.reduced([axis for axis in range(rank) if lead[axis] == 1])
    if narrow is None:
        site.refuse(f"{site.name(index)} is spread over rotated coordinates", site.name(index))
    site.fused.add(index)
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
