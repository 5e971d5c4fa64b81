"""Rotations of bases, fused into the weights that write and read them."""

from __future__ import annotations

from typing import ClassVar, Literal

import onnx_ir as ir

from graphopt.analysis.axes import Basis, WeightAxis
from graphopt.analysis.bases import find_bases
from graphopt.passes.base import Effect, Ledger, Options, Pass
from graphopt.rotations import Rotation, rotation_for
from graphopt.weights import own, rewrite


class RotateOptions(Options):
    """Which rotation the residual basis gets, and the seed of its signs or entries."""

    step: Literal["rotate"] = "rotate"
    residual: Literal["hadamard", "random"] = "hadamard"
    seed: int = 0


class Rotate(Pass[RotateOptions]):
    """Rotate every basis that the analysis finds free, by multiplying into the weights around it.

    before::

        x = MatMul(a, W1) + Gather(E, ids);  y = MatMul(RMSNormalization(x, 1), W2)

    after, for an orthogonal Q::

        x = MatMul(a, W1 Q) + Gather(E Q, ids);  y = MatMul(RMSNormalization(x, 1), Q^T W2)

    x becomes x Q, its norm is |x Q| = |x|, and (x Q)(Q^T W2) = x W2: nothing is added at run time, and outliers that
    sat in single coordinates are spread over all (QuaRot, Ashkboos et al. 2024, section 4). Which axes belong
    together is found by :mod:`graphopt.analysis.bases`; a basis that is pinned stays, with the node that pins it.
    """

    name: ClassVar[str] = "rotate"
    effect: ClassVar[Effect] = "exact"
    options_type: ClassVar[type[Options]] = RotateOptions

    def rewrite(self, model: ir.Model, ledger: Ledger) -> None:
        """Rotate what is free, and give the first pin of what is not."""
        for basis in find_bases(model.graph):
            where = f"basis {basis.name} [{basis.width}]"
            if basis.pins:
                pin = basis.pins[0]
                ledger.skipped(f"{where} at {pin.node}", pin.reason)
            elif basis.width is None:
                ledger.skipped(where, "its width is not known before run time")
            elif not basis.writers or not basis.readers:
                ledger.skipped(where, "weights on one side of it only, so a rotation could not be undone")
            else:
                self._rotate(basis, rotation_for(basis.width, self.options.residual, self.options.seed), ledger)

    def _rotate(self, basis: Basis, rotation: Rotation, ledger: Ledger) -> None:
        for role, sites in (("writes", basis.writers), ("reads", basis.readers)):
            for site in sites:
                weight = fuse(site, rotation)
                what = f"{role} basis {basis.name}: axis {site.axis} rotated by {rotation.kind}, seed {rotation.seed}"
                ledger.changed(weight, what)


def fuse(site: WeightAxis, rotation: Rotation) -> ir.Value:
    """Multiply ``rotation`` into one axis of a weight, and return the weight: W Q for a writer, Q^T W for a reader."""
    weight = own(site.node, site.input)
    rewrite(weight, lambda array: rotation.apply(array, site.axis), site.axis)
    return weight
