"""Rotations of bases: fused into the weights around them, or made at run time where no weight can take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from graphopt.analysis.bases.axes import Basis
from graphopt.analysis.bases.pins import ROTATED_ONLINE
from graphopt.analysis.bases.search import find_bases
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.numerics.rotations import HadamardRotation, rotation_for
from graphopt.passes.algebra.rotate.fuser import fuse
from graphopt.passes.algebra.rotate.online import places_behind_makers
from graphopt.passes.algebra.rotate.rewrite import Work
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.analysis.bases.axes import Role
    from graphopt.passes.context import Context

STAYS = Rule("rotate.stays", "{why}", also=["role", "width"])
WIDTH_UNKNOWN = Rule("rotate.width-unknown", "its width is not known before run time")
NEVER_READ = Rule("rotate.never-read", "no weight reads it, so a rotation could not be undone")
NEVER_WRITTEN = Rule("rotate.never-written", "no weight writes it, so it cannot be rotated without cost")
NOT_ASKED = Rule("rotate.not-asked", "the recipe leaves {role} bases as they are")
LM_HEAD = Rule("rotate.lm-head", "the recipe leaves what the lm_head reads as it is")

Kind = Literal["hadamard", "random"]


class Rotate(Pass):
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
    found by :mod:`graphopt.analysis.bases.search`; a basis that is pinned stays, with the node that pins it. The
    report's claims say what was rotated by what, for :mod:`graphopt.verification.certificate` to check.

    Which bases are rotated and how; ``None`` leaves them.

    Attributes:
        residual: bases between weights, the residual stream above all. Costs nothing at run time; where the graph reads
            embeddings and no tokens, a Hadamard at run time behind that input, which stays in its own coordinates.
        online_residual: also where a norm with a gain behind it makes the residual (Gemma 2 and 3, OLMo 2): a Hadamard
            at run time behind each such norm.
        value: what attention passes on, per head, between value and output projection. Costs nothing at run time.
        query_key: queries and keys, per head; the KV cache then holds rotated keys. Behind a rotary embedding it is a
            Hadamard at run time, without one it costs nothing.
        weight_inputs: a Hadamard at run time in front of every weight that still reads unrotated coordinates: the down
            projection behind its nonlinearity, above all.
        spare_lm_head: leave what the lm_head reads as it is, even with ``weight_inputs``: a token embedding that is
            tied to it stays so.
        seed: what signs and random rotations are drawn from.
    """

    name: ClassVar[str] = "rotate"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("fold_norms",)

    residual: Kind | None = "hadamard"
    online_residual: bool = False
    value: Kind | None = "hadamard"
    query_key: Literal["hadamard"] | None = None
    weight_inputs: Literal["hadamard"] | None = None
    spare_lm_head: bool = False
    seed: int = 0

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rotate what is free, insert the online rotations that the recipe enables, give the reason for the rest."""
        ledger = context.ledger
        work = Work(model.graph, ledger)
        for number, basis in enumerate(find_bases(model.graph)):
            reason = self._rotate(work, basis, number)
            if reason is not None:
                pin = next((pin for pin in basis.pins if pin.side == "observed"), next(iter(basis.pins), None))
                fact = STAYS(why=reason, role=basis.role, width=basis.width)
                ledger.skipped(basis.name, fact, node=None if pin is None else pin.node)
        ledger.report.claims = work.finish()

    def _rotate(self, work: Work, basis: Basis, number: int) -> Fact | None:
        """Rotate one basis, or return why it stays."""
        kind = self._kind(basis)
        if basis.width is None:
            return WIDTH_UNKNOWN()
        if basis.role == "weight_output" and not basis.pins:
            return NEVER_READ()
        if not basis.pins:
            if kind is None:
                return NOT_ASKED(role=basis.role)
            if not basis.writers:
                return NEVER_WRITTEN()
            work.fuse(basis, rotation_for(basis.width, kind, _seed(self.seed, number)))
            return None
        rotation = HadamardRotation(basis.width, None)
        readers = [site for site in basis.readers if site.node not in work.lm_heads]
        if self.weight_inputs and self.spare_lm_head and len(readers) < len(basis.readers):
            other_readers = Basis(basis.name, basis.width, [], readers=readers)
            return (work.rotate_readers(other_readers, rotation) if readers else None) or LM_HEAD()
        reason = next((pin.reason for pin in basis.pins if pin.side == "observed"), None)
        if reason is None:
            is_online = self._is_online(basis, kind, work.graph)
            values = places_behind_makers(work.graph, basis) if is_online else basis.pins[0].reason
            if not isinstance(values, Fact):
                work.rotate_online(basis, rotation, values)
                return None
            reason = values
        is_rotated = any(pin.reason.code == ROTATED_ONLINE.code for pin in basis.pins)
        if self.weight_inputs and basis.readers and not is_rotated:
            # The basis stays all the same, and its reason with it, unless being read is all there is to it.
            reason_left = work.rotate_readers(basis, rotation)
            return reason if reason_left is None and basis.role != "weight_input" else reason_left
        return reason

    def _is_online(self, basis: Basis, kind: Kind | None, graph: ir.Graph) -> bool:
        """Return whether the recipe enables online Hadamards behind what makes ``basis``."""
        inputs = {value.name for value in graph.inputs}
        is_entry = all(pin.tensor in inputs for pin in basis.pins)
        return kind is not None and {"residual": self.online_residual or is_entry, "value": False}.get(basis.role, True)

    def _kind(self, basis: Basis) -> Kind | None:
        options = self
        kinds: dict[Role, Kind | None] = {
            "residual": options.residual,
            "value": options.value,
            "query_key": options.query_key,
            "weight_input": options.weight_inputs,
            "weight_output": None,
        }
        return kinds[basis.role]


def _seed(seed: int, number: int) -> int:
    """Return a seed of its own for each basis of a recipe's seed."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint32)[0])


__all__ = ["Rotate", "fuse"]
