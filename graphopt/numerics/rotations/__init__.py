"""Orthogonal maps: constructed Hadamard matrices, and fast ways to apply them."""

from graphopt.numerics.rotations.hadamard import factors, hadamard, has_hadamard
from graphopt.numerics.rotations.orthogonal import HadamardRotation, RandomRotation, Rotation, rotation_for, signs

__all__ = [
    "HadamardRotation",
    "RandomRotation",
    "Rotation",
    "factors",
    "hadamard",
    "has_hadamard",
    "rotation_for",
    "signs",
]
