"""Rotations of bases: fused into the weights around them, or made at run time where no weight can take them."""

from __future__ import annotations

import itertools
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphopt.analysis.axes import Basis, Role
from graphopt.analysis.bases import find_bases
from graphopt.analysis.rules.elementwise import ROTATED
from graphopt.passes.base import Effect, Ledger, Options, Pass
from graphopt.passes.rotate.fused import Fuser, fuse
from graphopt.passes.rotate.online import insert, places_behind_makers
from graphopt.rotations import HadamardRotation, Rotation, rotation_for
from graphopt.rotations.claims import Claims, RotationClaim, TensorClaim
from graphopt.runtime_ops import declare

Kind = Literal["hadamard", "random"]


class RotateOptions(Options):
    """Which bases are rotated and how; ``None`` leaves them.

    Attributes:
        residual: bases between weights, the residual stream above all. Costs nothing at run time.
        online_residual: also where a norm with a gain behind it makes the residual (Gemma 2 and 3, OLMo 2): a Hadamard
            at run time behind each such norm.
        value: what attention passes on, per head, between value and output projection. Costs nothing at run time.
        query_key: queries and keys, per head; the KV cache then holds rotated keys. Behind a rotary embedding it is a
            Hadamard at run time, without one it costs nothing.
        weight_inputs: a Hadamard at run time in front of every weight that still reads unrotated coordinates: the down
            projection behind its nonlinearity, above all.
        seed: what signs and random rotations are drawn from.
    """

    step: Literal["rotate"] = "rotate"
    residual: Kind | None = "hadamard"
    online_residual: bool = False
    value: Kind | None = "hadamard"
    query_key: Literal["hadamard"] | None = None
    weight_inputs: Literal["hadamard"] | None = None
    seed: int = 0


class Rotate(Pass[RotateOptions]):
    """Rotate every basis that the recipe names and the analysis finds.

    before::

        x = MatMul(a, W1) + Gather(E, ids);  y = MatMul(RMSNormalization(x, 1), W2)
        z = MatMul(Mul(g, u), W3)

    after, for orthogonal Q and a Hadamard matrix H of order n::

        x = MatMul(a, W1 Q) + Gather(E Q, ids);  y = MatMul(RMSNormalization(x, 1), Q^T W2)
        z = MatMul(Hadamard(Mul(g, u)), (H^T / sqrt(n)) W3)

    x becomes x Q, its norm is |x Q| = |x|, and (x Q)(Q^T W2) = x W2: nothing is added at run time, and outliers that
    sat in single coordinates are spread over all. A product of activations is made in its own coordinates, so there
    the rotation runs, in n log n additions (QuaRot, Ashkboos et al. 2024, section 4). Which axes belong together is
    found by :mod:`graphopt.analysis.bases`; a basis that is pinned stays, with the node that pins it. The report's
    claims say what was rotated by what, for :mod:`graphopt.certificate` to check.
    """

    name: ClassVar[str] = "rotate"
    effect: ClassVar[Effect] = "exact"
    options_type: ClassVar[type[Options]] = RotateOptions

    def rewrite(self, model: ir.Model, ledger: Ledger) -> None:
        """Rotate what is free, pay for what the recipe pays for, and give the reason for the rest."""
        work = _Work(model.graph, ledger)
        for number, basis in enumerate(find_bases(model.graph)):
            reason = self._rotate(work, basis, number)
            if reason is not None:
                where = f"basis {basis.name} [{basis.width}]"
                pin = next((pin for pin in basis.pins if pin.side == "observed"), next(iter(basis.pins), None))
                ledger.skipped(where if pin is None else f"{where} at {pin.node}", reason)
        work.fuser.finish()
        ledger.report.claims = Claims(rotations=work.rotations, tensors=tuple(work.tensors))
        declare(model)

    def _rotate(self, work: _Work, basis: Basis, number: int) -> str | None:
        """Rotate one basis, or return why it stays."""
        kind = self._kind(basis)
        if basis.width is None:
            return "its width is not known before run time"
        if basis.role == "weight_output" and not basis.pins:
            return "no weight reads it, so a rotation could not be undone"
        if not basis.pins:
            if kind is None:
                return f"the recipe leaves {basis.role} bases as they are"
            if not basis.writers:
                return "no weight writes it, so it cannot be rotated without cost"
            work.fuse(basis, rotation_for(basis.width, kind, _seed(self.options.seed, number)))
            return None
        rotation = HadamardRotation(basis.width, None)
        reason = next((pin.reason for pin in basis.pins if pin.side == "observed"), None)
        if reason is None:
            places = places_behind_makers(work.graph, basis) if self._pays(basis, kind) else basis.pins[0].reason
            if not isinstance(places, str):
                work.pay(basis, rotation, places)
                return None
            reason = places
        if self.options.weight_inputs and basis.readers and not any(pin.reason == ROTATED for pin in basis.pins):
            # The basis stays all the same, and its reason with it, unless being read is all there is to it.
            refused = work.pay_in_front(basis, rotation)
            return reason if refused is None and basis.role != "weight_input" else refused
        return reason

    def _pays(self, basis: Basis, kind: Kind | None) -> bool:
        """Return whether the recipe pays for rotating all of ``basis`` behind what makes it."""
        return kind is not None and {"residual": self.options.online_residual, "value": False}.get(basis.role, True)

    def _kind(self, basis: Basis) -> Kind | None:
        options = self.options
        kinds: dict[Role, Kind | None] = {
            "residual": options.residual,
            "value": options.value,
            "query_key": options.query_key,
            "weight_input": options.weight_inputs,
            "weight_output": None,
        }
        return kinds[basis.role]


class _Work:
    """One run of the pass: the graph, what is collected for its weights, and what is claimed."""

    def __init__(self, graph: ir.Graph, ledger: Ledger) -> None:
        self.graph, self.ledger, self.fuser = graph, ledger, Fuser()
        self.rotations: dict[str, RotationClaim] = {}
        self.tensors: list[TensorClaim] = []

    def fuse(self, basis: Basis, rotation: Rotation) -> None:
        """Multiply ``rotation`` into all weights around ``basis``, and claim where it then holds."""
        self._weights(basis, rotation)
        name = self._name(rotation)
        for site in basis.writers:
            output = site.node.outputs[0]
            assert output.shape is not None
            if site.node.op_type in ("MatMul", "Gather"):
                self._claim(output, len(output.shape) - 1, name, site.starts)
        inputs = {value.name: value for value in self.graph.inputs}
        for axis in basis.axes:
            if axis.tensor in inputs and not axis.part:
                self._claim(inputs[axis.tensor], axis.index, name, (0,))

    def pay(self, basis: Basis, rotation: HadamardRotation, places: list[ir.Value]) -> None:
        """Rotate ``basis`` at run time at ``places``, and in the weights that write or read it behind them."""
        self.fuse(basis, rotation)
        for value in places:
            insert(self.graph, value, rotation, self.ledger)

    def pay_in_front(self, basis: Basis, rotation: HadamardRotation) -> str | None:
        """Rotate at run time just what the readers of ``basis`` read, or return why that cannot be."""
        assert basis.width is not None
        reads: dict[ir.Value, set[ir.Node]] = {}
        for site in basis.readers:
            value = site.node.inputs[0]
            assert value is not None and value.shape is not None
            tiles = tuple(range(0, len(site.starts) * basis.width, basis.width))
            if site.starts != tiles or value.shape[-1] != len(tiles) * basis.width:
                return f"{site.node.name} reads it beside other coordinates"
            reads.setdefault(value, set()).add(site.node)
        for value, readers in reads.items():
            insert(self.graph, value, rotation, self.ledger, readers)
        self._weights(Basis(basis.name, basis.width, [], readers=basis.readers), rotation)
        self._name(rotation)
        return None

    def _weights(self, basis: Basis, rotation: Rotation) -> None:
        for role, sites in (("writes", basis.writers), ("reads", basis.readers)):
            for site in sites:
                weight = self.fuser.add(site, rotation)
                copies = "" if len(site.starts) == 1 else f", {len(site.starts)} times {rotation.width}"
                what = f"{role} {basis.role} basis {basis.name}: axis {site.axis} rotated by {rotation.kind}{copies}"
                self.ledger.changed(weight, what)

    def _claim(self, value: ir.Value, axis: int, rotation: str, starts: tuple[int, ...]) -> None:
        """Claim ``rotation`` at ``starts`` of an axis: in one claim where they are evenly spaced."""
        strides = {b - a for a, b in itertools.pairwise(starts)}
        even = len(strides) <= 1
        for start in starts[:1] if even else starts:
            self.tensors.append(
                TensorClaim(
                    tensor=value.name or "",
                    axis=axis,
                    rotation=rotation,
                    start=start,
                    copies=len(starts) if even else 1,
                    stride=strides.pop() if even and strides else 0,
                )
            )

    def _name(self, rotation: Rotation) -> str:
        claim = rotation.claim()
        for name, known in self.rotations.items():
            if known == claim:
                return name
        name = f"Q{len(self.rotations)}"
        self.rotations[name] = claim
        return name


def _seed(seed: int, number: int) -> int:
    """Return a seed of its own for each basis of a recipe's seed."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint32)[0])


__all__ = ["Rotate", "RotateOptions", "fuse"]
