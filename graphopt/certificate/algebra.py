"""Ops that compute: which coordinates pass through them, with the algebra that says so, for row vectors x -> x Q.

An op that is not listed here or in :mod:`graphopt.certificate.layout` looks at single coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphopt.certificate.attention import attention
from graphopt.certificate.coordinates import Coordinates, Tag, same
from graphopt.certificate.layout import LAYOUT
from graphopt.certificate.site import Rule, Site, static
from graphopt.certificate.weights import read


def matmul(site: Site) -> list[Tag]:
    """``x W`` with a constant W [m, n]: W' = M_in^T W M_out; else a product of two activations."""
    if 1 not in site.constants:
        return product(site)
    shape = site.constants[1][0].shape.numpy()
    if len(shape) != 2:
        site.refuse(f"its constant has {len(shape)} axes, only matrices are followed", site.name(1))
    return [_through_weight(site, 1, _row(site, site.tags[0], shape[0], "reads"), shape[1])]


def gather(site: Site) -> list[Tag]:
    """``table[ids]`` with a constant table [m, n]: table' = table M_out; else rows of an activation are picked."""
    axis = site.attribute("axis", 0)
    if 0 in site.constants and site.tags[1] is None and axis == 0 and len(site.constants[0][0].shape) == 2:
        return [_through_weight(site, 0, None, site.constants[0][0].shape.numpy()[1])]
    x = site.tags[0]
    if x is None or site.tags[1] is not None:
        site.refuse("it looks up coordinates that are rotated, or looks up by them")
    ids, axis = site.input_dims(1), axis % len(x.shape)
    row = x.reduced([axis])
    if ids is None or row is None:
        site.refuse("it picks among positions that are in different coordinates")
    one = row.labels.reshape(3, *row.shape[:axis], *(1 for _ in ids), *row.shape[axis + 1 :])
    return [Coordinates(one).spread((*row.shape[:axis], *static(ids), *row.shape[axis + 1 :]))]


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


def product(site: Site) -> list[Tag]:
    """``a b``: (a Q)(Q^T b) = a b where both are rotated along the axis that is summed over; a (b Q) = (a b) Q."""
    a, b = site.tags[:2]
    shape = site.output_shape()
    if len(shape) < 2 or any(tag is not None and len(tag.shape) < 2 for tag in (a, b)):
        site.refuse("a product with a vector in rotated coordinates")
    contracts_a, contracts_b = (_contracted(tag, along, other) for tag, along, other in ((a, -1, -2), (b, -2, -1)))
    if contracts_a is not None and contracts_b is not None:
        batch = np.broadcast_shapes(shape[:-2], contracts_a.shape[:-2], contracts_b.shape[:-2])
        left, right = (tag.labels.reshape(3, *tag.shape[:-2], -1) for tag in (contracts_a, contracts_b))
        if same(
            Coordinates(left).spread((*batch, left.shape[-1])), Coordinates(right).spread((*batch, right.shape[-1]))
        ):
            return [None]
        site.refuse("the axis that is summed over is in different coordinates on its two sides")
    if a is None and b is not None and b.spanned() <= {len(b.shape) - 1}:
        row = b.reduced([-2])
        if row is not None:
            return [row.spread(shape)]
    site.refuse("the axis that is summed over is not in the same coordinates on its two sides")


def no_values(site: Site) -> list[Tag]:
    """``Shape`` and ``Size`` see no values."""
    return [None] * len(site.node.outputs)


def _through_weight(site: Site, index: int, rows: Tag, width: int) -> Tag:
    site.fused.add(index)
    claim = site.claims[0]
    site.fuse(site, index, rows, _row(site, claim, width, "writes"))
    return claim


def _row(site: Site, tag: Tag, width: int, what: str) -> Tag:
    """Return the labels of the last axis, the same for each row, or nothing if there are none."""
    if tag is None:
        return None
    row = tag.along_last()
    if row is None or row.shape != (width,):
        site.refuse(f"the coordinates that its weight {what} are not the same for each row of {width}")
    return row


def _within_rows(tag: Coordinates) -> bool:
    return tag.spanned() <= {len(tag.shape) - 1}


def _contracted(tag: Tag, along: int, other: int) -> Coordinates | None:
    """Return labels that lie along axis ``along`` alone and are the same at each position of ``other``."""
    if tag is None or not tag.spanned() <= {along % len(tag.shape)}:
        return None
    return tag.reduced([other])


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
    "LayerNormalization": layer_norm,
    "MatMul": matmul,
    "Mul": scale,
    "RMSNormalization": root_mean_square,
    "Shape": no_values,
    "Size": no_values,
    "Sub": add,
    "Where": select,
}
