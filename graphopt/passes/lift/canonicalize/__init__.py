"""What exporters spell out becomes the standard ops for it."""

from graphopt.passes.lift.canonicalize.canonicalize import Canonicalize

__all__ = [
    "Canonicalize",
]
