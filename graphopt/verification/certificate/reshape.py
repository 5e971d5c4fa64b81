"""Reshapes, followed for every size of the symbolic dimensions although labels have size 1 there."""

from __future__ import annotations

from itertools import groupby
from math import prod

from graphopt.verification.certificate.coordinates import Coordinates, Tag
from graphopt.verification.certificate.reasons import INDICES, RESHAPE, SHAPE_UNKNOWN
from graphopt.verification.certificate.site import Dims, Site, static, text_of


def reshape(site: Site) -> list[Tag]:
    """Where runs of symbolic dimensions keep their places between runs of numbers, each run maps onto itself.

    Otherwise, whatever becomes of the leading axes, rows that are all in the same coordinates may stay whole.
    """
    x, target = only_rotated(site), site.output_dims()
    source = site.input_dims(0)
    if source is None:
        site.refuse(SHAPE_UNKNOWN(tensor=site.name(0)))
    if _follows(source, target):
        return [x.move(lambda plane: plane.reshape(static(target)))]
    for first in range(len(source)):
        row, width = x.reduce(range(first)), prod(x.shape[first:])
        for last in range(len(target)):
            whole = all(isinstance(dim, int) for dim in (*source[first:], *target[last:]))
            if row is not None and whole and prod(static(target[last:])) == width:
                lead = (1,) * last + static(target[last:])
                return [Coordinates(row.labels.reshape(3, *lead)).spread(static(target))]
    site.refuse(RESHAPE(shape=text_of(source), target=text_of(target)))


def only_rotated(site: Site) -> Coordinates:
    """Return the labels of the only input that may have any."""
    x = site.tags[0]
    if x is None or any(tag is not None for tag in site.tags[1:]):
        site.refuse(INDICES())
    return x


def _follows(source: Dims, target: Dims) -> bool:
    """Return whether runs of numbers have equal products, and runs of names are the same, all but one at most.

    The one that may differ is then equal too, since both shapes have the same number of elements.
    """
    source_runs, target_runs = _runs(source), _runs(target)
    if len(source_runs) != len(target_runs) or any(
        isinstance(a, int) is not isinstance(b, int) for a, b in zip(source_runs, target_runs, strict=True)
    ):
        return False
    unequal = [
        (a, b) for a, b in zip(source_runs, target_runs, strict=True) if a != b or (isinstance(a, tuple) and None in a)
    ]
    return not unequal or (len(unequal) == 1 and isinstance(unequal[0][0], tuple))


def _runs(dims: Dims) -> list[int | tuple[str | None, ...]]:
    """Return products of neighbouring numbers and tuples of neighbouring names; a 1 is no boundary."""
    runs: list[int | tuple[str | None, ...]] = []
    for _, run in groupby((dim for dim in dims if dim != 1), key=lambda dim: isinstance(dim, int)):
        parts = list(run)
        numbers = [dim for dim in parts if isinstance(dim, int)]
        runs.append(prod(numbers) if numbers else tuple(dim for dim in parts if not isinstance(dim, int)))
    return runs
