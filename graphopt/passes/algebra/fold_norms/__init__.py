"""Norms lose what they multiply, add and subtract to the weights around them."""

from graphopt.passes.algebra.fold_norms.fold_norms import FoldNorms

__all__ = [
    "FoldNorms",
]
