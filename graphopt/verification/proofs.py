"""Proofs of what passes claim, beside the runs of the passes that follow.

A proof is NumPy and Python, a run is onnxruntime: together they take less time than one after the other.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.verification.certificate.proof import prove

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from graphopt.graph.diagnostics import Check
    from graphopt.numerics.rotations.claims import Claims


@dataclass(frozen=True)
class PendingClaim:
    """A claim that is to be proved.

    Attributes:
        name: of the pass.
        claims: what it claims to have done.
        before: the model in front of it.
        after: the model that is to fit the claims; ``None`` for the one behind the pass.
        take: takes the check once it is proved.
    """

    name: str
    claims: Claims
    before: ir.Model
    after: ir.Model | None
    take: Callable[[Check], None]


class Proofs:
    """Proves claims in a thread of its own, in their order. Use as a context manager, which ends the thread.

    Args:
        on_stage: called when a proof is waited for.
    """

    def __init__(self, on_stage: Callable[[str], None]) -> None:
        self._on_stage = on_stage
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="proof")
        self._last: PendingClaim | None = None
        self._proofs: list[tuple[PendingClaim, Future[Check]]] = []

    def __enter__(self) -> Proofs:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, claim: PendingClaim) -> None:
        """Take the claim of the pass that has just run; :meth:`begin` is next."""
        self._last = claim

    def begin(self, model: ir.Model) -> None:
        """Begin to prove the last claim, behind whose pass is ``model``, which stays as it is until the proof ends."""
        claim, self._last = self._last, None
        if claim is not None:
            after = claim.after or model
            future = self._thread.submit(prove, claim.before, after, claim.claims, claim.name)
            self._proofs.append((claim, future))

    def confirm(self, model: ir.Model) -> None:
        """Wait for all proofs; ``model`` is as for :meth:`begin`.

        Raises:
            VerificationError: one of them failed.
        """
        self.begin(model)
        proofs, self._proofs = self._proofs, []
        for claim, future in proofs:
            if not future.done():
                self._on_stage(f"proving {claim.name}")
            claim.take(future.result())
