"""Rotations that are multiplied into weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from graphopt.analysis.axes import WeightAxis
from graphopt.rotations import Rotation
from graphopt.weights import Weight, along, own, rewrite_in_steps

Step = tuple[Callable[[Weight], Weight], int]


class Fuser:
    """Collects what is to be multiplied into each weight, so that a weight between two bases is rounded once."""

    def __init__(self) -> None:
        self._steps: dict[ir.Value, list[Step]] = {}

    def add(self, site: WeightAxis, rotation: Rotation) -> ir.Value:
        """Multiply ``rotation`` into one axis of a weight, W Q for a writer, Q^T W for a reader; return the weight."""
        weight = own(site.node, site.input)
        turn = along(partial(rotation.apply, axis=site.axis), site.axis, site.starts, rotation.width)
        self._steps.setdefault(weight, []).append((turn, site.axis))
        return weight

    def finish(self) -> None:
        """Let the weights be what was collected."""
        for weight, steps in self._steps.items():
            rewrite_in_steps(weight, steps)


def fuse(site: WeightAxis, rotation: Rotation) -> ir.Value:
    """Multiply ``rotation`` into one axis of a weight at once, and return the weight."""
    fuser = Fuser()
    weight = fuser.add(site, rotation)
    fuser.finish()
    return weight
