"""What a rewriter claims about the graph it made: in which rotated coordinates its tensors are.

A checker (:mod:`graphopt.verification.certificate.checker`) takes the graph before, the graph after and the claims, and
believes none of them. Claims are needed only where a tensor gets its coordinates from a weight or from outside:
everywhere else they follow from the graph.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class RotationClaim(BaseModel):
    """An orthogonal matrix Q [width, width], as data from which it can be built again.

    Attributes:
        kind: ``hadamard`` is diag(signs) (I_blocks (x) H_f1 (x) H_f2 ...) / sqrt(f1 f2 ...); ``random`` is drawn dense.
        width: rows and columns.
        factors: the orders f1, f2, ... of the Hadamard matrices, leftmost first; empty for ``random``.
        seed: what signs or entries are drawn from; ``None`` for a Hadamard matrix without signs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["hadamard", "random"]
    width: int
    factors: tuple[int, ...] = ()
    seed: int | None = None


class TensorClaim(BaseModel):
    """Along ``axis`` of ``tensor``, coordinates start + c stride + [0, width) hold x Q, for each c < copies.

    ``rotation`` names Q among :attr:`Claims.rotations`. Coordinates that no claim names are as they were.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor: str
    axis: int
    rotation: str
    start: int = 0
    copies: int = 1
    stride: int = 0


class Claims(BaseModel):
    """All rotations of one pass, and the tensors that weights or graph inputs give rotated coordinates to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rotations: dict[str, RotationClaim] = {}
    tensors: tuple[TensorClaim, ...] = ()
