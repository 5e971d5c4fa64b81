"""Rotary positions of a frozen model are stretched, so that it reads longer texts than it was trained on."""

from graphopt.passes.lift.rescale_rope.rescale_rope import RescaleRope

__all__ = [
    "RescaleRope",
]
