"""In which coordinates a tensor is: a label at each of its coordinates.

A tensor x' of the graph after stands for a tensor x of the graph before. Labels say how: where the rotation is 0, x'
and x agree; the coordinates that share a copy number, in the order of their index, hold the same coordinates of x times
Q [width, width], the rotation of that copy. Labels have the shape of the tensor, with 1 for a symbolic dimension:
whatever its size is, the labels hold at each position along it, each position with copies of its own. Copy numbers mean
nothing but that equal ones belong together, so labels are kept with copies numbered as they first occur.

An op that only moves elements moves the labels likewise: fused projections, heads and repeated heads come out by
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphopt.verification.certificate.rotations import Doubles, Rotations

Plane = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Labels int64 [3, *shape] of a tensor: rotation, copy (0 where there is none) and index within the copy."""

    labels: Plane

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor, 1 for symbolic dimensions."""
        return self.labels.shape[1:]

    def move(self, function: Callable[[Plane], Plane]) -> Tag:
        """Apply an op that moves elements, as a NumPy function, to the labels."""
        return canonical(np.stack([function(plane) for plane in self.labels]))

    def spanned_axes(self) -> set[int]:
        """Return the axes along which some copy has more than one position."""
        copies = self.labels[1]
        _, first, inverse = np.unique(copies, return_index=True, return_inverse=True)
        axes = set()
        for axis, size in enumerate(self.shape):
            positions = np.arange(size).reshape([-1 if a == axis else 1 for a in range(copies.ndim)])
            position = np.broadcast_to(positions, self.shape).ravel()
            if np.any((position != position[first[inverse.ravel()]]) & (copies.ravel() > 0)):
                axes.add(axis)
        return axes

    def reduce(self, axes: Sequence[int]) -> Coordinates | None:
        """Return the labels at one position of ``axes``, of size 1 there; ``None`` if they differ along them."""
        labels: Coordinates = self
        for axis in (axis % len(self.shape) for axis in axes):
            if labels.shape[axis] == 1:
                continue
            if axis in labels.spanned_axes():
                return None
            parts = [canonical(labels.labels.take([i], axis + 1)) for i in range(labels.shape[axis])]
            if parts[0] is None or not all(same_coordinates(parts[0], part) for part in parts[1:]):
                return None
            labels = parts[0]
        return labels

    def spread(self, shape: Sequence[int]) -> Coordinates:
        """Return the labels of the tensor broadcast to ``shape``: each new position gets copies of its own.

        Raises:
            ValueError: it cannot be broadcast so.
        """
        shape = tuple(shape)
        lead = (1,) * (len(shape) - len(self.shape)) + self.shape
        new = [size if lead[axis] == 1 else 1 for axis, size in enumerate(shape)]
        position = np.arange(prod(new)).reshape(new)
        rotation, copy, index = (np.broadcast_to(plane.reshape(lead), shape) for plane in self.labels)
        tag = canonical(np.stack([rotation, np.where(copy > 0, copy * prod(new) + position, 0), index]))
        assert tag is not None
        return tag

    def along_last(self) -> Coordinates | None:
        """Return the labels [n] of the last axis if they are the same, with copies of its own, in each row."""
        row = self.reduce(range(len(self.shape) - 1)) if self.shape else None
        return None if row is None else Coordinates(row.labels.reshape(3, -1))

    def is_complete(self, rotations: Rotations) -> bool:
        """Return whether each copy has one rotation and each of its indices once."""
        rotation, copy, index = (plane.ravel()[self.labels[0].ravel() > 0] for plane in self.labels)
        order = np.lexsort((index, copy))
        rotation, copy, index = rotation[order], copy[order], index[order]
        start = np.flatnonzero(np.diff(copy, prepend=0))
        count = np.diff(start, append=len(copy))
        width = np.array([rotations[number].width for number in rotation[start]])
        ranks = np.arange(len(copy)) - np.repeat(start, count)
        is_uniform = np.array_equal(rotation, np.repeat(rotation[start], count))
        return is_uniform and np.array_equal(count, width) and np.array_equal(index, ranks)

    def apply(self, values: Doubles, rotations: Rotations, *, inverse: bool = False) -> Doubles:
        """Return x' for x, or x for x' where ``inverse``; ``values`` is [coordinates, vectors], one column a tensor."""
        rotation, copy, index = (plane.ravel() for plane in self.labels)
        result = values.copy()
        for number in np.unique(rotation[rotation > 0]):
            positions = np.flatnonzero(rotation == number)
            positions = positions[np.lexsort((index[positions], copy[positions]))]
            rows = values[positions].T.reshape(values.shape[1], -1, rotations[int(number)].width)
            result[positions] = rotations[int(number)].apply(rows, inverse=inverse).reshape(values.shape[1], -1).T
        return result

    def key(self) -> tuple[object, ...]:
        """Return what is equal for equal labels."""
        return (self.shape, self.labels.tobytes())


Tag = Coordinates | None
"""The coordinates of a tensor; ``None`` where it is what it was before."""


def canonical(labels: Plane) -> Tag:
    """Return ``labels`` [3, *shape] with copies numbered from 1 as they first occur."""
    rotation, copy, index = labels
    is_rotated = rotation > 0
    if not is_rotated.any():
        return None
    _, first, inverse = np.unique(np.where(is_rotated, copy, -1), return_index=True, return_inverse=True)
    # The unrotated coordinates are one group; it must not take a number.
    number = np.empty(len(first), np.int64)
    number[np.argsort(np.where(is_rotated.ravel()[first], first, is_rotated.size))] = np.arange(1, len(first) + 1)
    copy_numbers = np.where(is_rotated, number[inverse].reshape(copy.shape), 0)
    return Coordinates(np.stack([rotation, copy_numbers, np.where(is_rotated, index, 0)]))


def same_coordinates(first: Tag, second: Tag) -> bool:
    """Return whether two tags are the same coordinates of tensors of the same shape."""
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and np.array_equal(first.labels, second.labels)


def planes(tag: Tag, shape: Sequence[int]) -> Plane:
    """Return the labels int64 [3, *shape] of a tag, zeros where it is none."""
    return np.zeros((3, *shape), np.int64) if tag is None else tag.labels


def in_blocks(number: int, width: int, size: int) -> Coordinates:
    """Return the labels [size] of copies of a rotation side by side; ``width`` divides ``size``."""
    position = np.arange(size)
    tag = canonical(np.stack([np.full(size, number), position // width + 1, position % width]))
    assert tag is not None
    return tag
