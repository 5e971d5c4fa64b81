"""Rotations of bases: fused into the weights around them, or made at run time where no weight can take them."""

from graphopt.passes.algebra.rotate.rotate import STAYS, Rotate

__all__ = [
    "STAYS",
    "Rotate",
]
