"""Claims turned into labels; a claim that makes no sense is a failure, not an error."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from graphopt.verification.certificate.coordinates import Coordinates, Tag, canonical, planes
from graphopt.verification.certificate.rotations import Rotations, of_claim
from graphopt.verification.certificate.site import Dims, static

if TYPE_CHECKING:
    from graphopt.numerics.rotations.claims import Claims, TensorClaim


class ClaimedTags:
    """The coordinates claimed of each tensor, built when they are asked for.

    Args:
        claims: what the rewriter says.
        rotations: where the matrices that it names are put.

    Attributes:
        unseen: names of tensors with claims that nobody has asked for yet.
    """

    def __init__(self, claims: Claims, rotations: Rotations) -> None:
        self._claims, self._rotations = claims, rotations
        self._tensors: dict[str, list[TensorClaim]] = defaultdict(list)
        self._numbers: dict[str, int] = {}
        for claim in claims.tensors:
            self._tensors[claim.tensor].append(claim)
        self.unseen = set(self._tensors)

    def tag(self, name: str | None, dims: Dims | None) -> Tag:
        """Return the claimed coordinates of a tensor of shape ``dims``, nothing where there is no claim.

        Raises:
            ValueError: the claims do not fit the tensor, or each other, or name no orthogonal matrix.
        """
        if name not in self._tensors:
            return None
        self.unseen.discard(name)
        if dims is None:
            raise ValueError(f"{name} is claimed to be rotated, but the graph does not state its shape")
        labels = planes(None, static(dims))
        for claim in self._tensors[name]:
            new = self._along_axis(claim, dims).spread(static(dims)).labels
            if np.any(labels[0] * new[0]):
                raise ValueError(f"two claims of {name} are about the same coordinates")
            new[1] += labels[1].max() * (new[0] > 0)
            labels += new
        return canonical(labels)

    def _along_axis(self, claim: TensorClaim, dims: Dims) -> Coordinates:
        rank = len(dims)
        size = dims[claim.axis] if -rank <= claim.axis < rank else None
        if not isinstance(size, int):
            raise ValueError(f"the claim of {claim.tensor} is about axis {claim.axis}, whose size is not known")
        number = self._number(claim.rotation)
        width, order = self._claims.rotations[claim.rotation].width, self._rotations[number].width
        if claim.start < 0 or claim.copies < 1 or claim.copies * width > size:
            raise ValueError(
                f"{claim.copies} copies of {width} are no part of the {size} coordinates of {claim.tensor}"
            )
        offset = np.arange(width)
        coordinates = (claim.start + claim.stride * np.arange(claim.copies)[:, None] + offset).ravel()
        if coordinates.min() < 0 or coordinates.max() >= size or len(np.unique(coordinates)) < len(coordinates):
            raise ValueError(f"copies overlap, or leave the {size} coordinates of {claim.tensor}")
        labels = planes(None, (size,))
        labels[0, coordinates] = number
        labels[1, coordinates] = np.arange(len(coordinates)) // order + 1
        labels[2, coordinates] = np.tile(offset % order, claim.copies)
        shape = [size if axis == claim.axis % rank else 1 for axis in range(rank)]
        tag = canonical(labels.reshape(3, *shape))
        assert tag is not None
        return tag

    def _number(self, name: str) -> int:
        if name not in self._claims.rotations:
            raise ValueError(f"no rotation is called {name}")
        if name not in self._numbers:
            self._numbers[name] = self._rotations.number(of_claim(self._claims.rotations[name]))
        return self._numbers[name]
