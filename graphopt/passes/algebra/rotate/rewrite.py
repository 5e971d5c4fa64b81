"""What one run of ``rotate`` does to the graph, and claims."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from graphopt.analysis.bases.axes import Basis
from graphopt.analysis.structure.products import lm_head_nodes
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.numerics.rotations.claims import Claims, RotationClaim, TensorClaim
from graphopt.passes.algebra.rotate.fuser import Fuser
from graphopt.passes.algebra.rotate.online import insert

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.numerics.rotations import HadamardRotation, Rotation
    from graphopt.passes.context import Ledger

BASIS_FUSED = Rule(
    "rotate.fused",
    "{side} {role} basis {basis}: axis {axis} rotated by {rotation}",
    also=["width"],
    tiled=", {tiled}",
)
TILED_ROTATION = Rule("rotate.tiled", "{copies} times {width}")
READ_BESIDE = Rule("rotate.read-beside-others", "{reader} reads it beside other coordinates")


class Work:
    """One run of the pass: the graph, what is collected for its weights, and what is claimed."""

    def __init__(self, graph: ir.Graph, ledger: Ledger) -> None:
        self.graph, self._ledger, self._fuser = graph, ledger, Fuser()
        self.lm_heads = lm_head_nodes(graph)
        self._rotations: dict[str, RotationClaim] = {}
        self._tensors: list[TensorClaim] = []

    def fuse(self, basis: Basis, rotation: Rotation) -> None:
        """Multiply ``rotation`` into all weights around ``basis``, and claim where it then holds."""
        self._weights(basis, rotation)
        name = self._name(rotation)
        for site in basis.writers:
            output = site.node.outputs[0]
            assert output.shape is not None
            if site.node.op_type in ("MatMul", "Gather"):
                self._claim(output, len(output.shape) - 1, name, site.starts)
        makers = {pin.tensor for pin in basis.pins}
        inputs = {value.name: value for value in self.graph.inputs if value.name not in makers}
        for axis in basis.axes:
            if axis.tensor in inputs and not axis.part:
                self._claim(inputs[axis.tensor], axis.index, name, (0,))

    def rotate_online(self, basis: Basis, rotation: HadamardRotation, values: list[ir.Value]) -> None:
        """Insert an online Hadamard behind each of ``values``, and fuse the rotation into the weights of ``basis``."""
        self.fuse(basis, rotation)
        for value in values:
            insert(self.graph, value, rotation, self._ledger)

    def rotate_readers(self, basis: Basis, rotation: HadamardRotation) -> Fact | None:
        """Insert online Hadamards in front of the readers of ``basis`` only, or return why that cannot be done."""
        assert basis.width is not None
        reads: dict[ir.Value, set[ir.Node]] = {}
        for site in basis.readers:
            value = site.node.inputs[0]
            assert value is not None and value.shape is not None
            tiles = tuple(range(0, len(site.starts) * basis.width, basis.width))
            if site.starts != tiles or value.shape[-1] != len(tiles) * basis.width:
                return READ_BESIDE(reader=site.node.name)
            reads.setdefault(value, set()).add(site.node)
        for value, readers in reads.items():
            insert(self.graph, value, rotation, self._ledger, readers)
        self._weights(Basis(basis.name, basis.width, [], readers=basis.readers), rotation)
        self._name(rotation)
        return None

    def finish(self) -> Claims:
        """Let weights be what was collected for them, and return the claims."""
        self._fuser.finish()
        return Claims(rotations=self._rotations, tensors=tuple(self._tensors))

    def _weights(self, basis: Basis, rotation: Rotation) -> None:
        for side, sites in (("writes", basis.writers), ("reads", basis.readers)):
            for site in sites:
                weight = self._fuser.add(site, rotation)
                copies = TILED_ROTATION(copies=len(site.starts), width=rotation.width) if len(site.starts) > 1 else None
                fact = BASIS_FUSED(
                    side=side,
                    role=basis.role,
                    basis=basis.name,
                    axis=site.axis,
                    rotation=rotation.kind,
                    tiled=copies,
                    width=rotation.width,
                )
                self._ledger.changed(weight, fact)

    def _claim(self, value: ir.Value, axis: int, rotation: str, starts: tuple[int, ...]) -> None:
        """Claim ``rotation`` at ``starts`` of an axis: in one claim where they are evenly spaced."""
        strides = {b - a for a, b in itertools.pairwise(starts)}
        runs = [(starts[0], len(starts))] if len(strides) <= 1 else [(start, 1) for start in starts]
        for start, copies in runs:
            claim = TensorClaim(
                tensor=value.name or "",
                axis=axis,
                rotation=rotation,
                start=start,
                copies=copies,
                stride=min(strides, default=0) if copies > 1 else 0,
            )
            self._tensors.append(claim)

    def _name(self, rotation: Rotation) -> str:
        claim = rotation.claim()
        for name, rotation_name in self._rotations.items():
            if rotation_name == claim:
                return name
        name = f"Q{len(self._rotations)}"
        self._rotations[name] = claim
        return name
