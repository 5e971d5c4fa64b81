"""Rotations that are multiplied into weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from graphopt.graph.weights import Expression, Rotate, own_input, rewrite

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from graphopt.analysis.bases.axes import WeightAxis
    from graphopt.numerics.rotations import Rotation


class Fuser:
    """Collects what is to be multiplied into each weight, so that a weight between two bases is rounded once."""

    def __init__(self) -> None:
        self._steps: dict[ir.Value, list[Callable[[Expression], Expression]]] = {}

    def add(self, site: WeightAxis, rotation: Rotation) -> ir.Value:
        """Multiply ``rotation`` into one axis of a weight, W Q for a writer, Q^T W for a reader; return the weight."""
        weight = own_input(site.node, site.input)
        assert weight.const_value is not None
        axis = site.axis % len(weight.const_value.shape)
        turn = partial(Rotate, axis=axis, starts=tuple(site.starts), claim=rotation.claim())
        self._steps.setdefault(weight, []).append(turn)
        return weight

    def finish(self) -> None:
        """Let the weights be what was collected."""
        for weight, steps in self._steps.items():
            rewrite(weight, *steps)


def fuse(site: WeightAxis, rotation: Rotation) -> ir.Value:
    """Multiply ``rotation`` into one axis of a weight at once, and return the weight."""
    fuser = Fuser()
    weight = fuser.add(site, rotation)
    fuser.finish()
    return weight
