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
class Claimed:
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
        self._last: Claimed | None = None
        self._begun: list[tuple[Claimed, Future[Check]]] = []

    def __enter__(self) -> Proofs:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, claimed: Claimed) -> None:
        """Take the claim of the pass that has just run; :meth:`begin` is next."""
        self._last = claimed

    def begin(self, behind: ir.Model) -> None:
        """Begin to prove the last claim, behind whose pass is ``behind``, which stays as it is until the proof ends."""
        claimed, self._last = self._last, None
        if claimed is not None:
            after = claimed.after or behind
            future = self._thread.submit(prove, claimed.before, after, claimed.claims, claimed.name)
            self._begun.append((claimed, future))

    def confirm(self, behind: ir.Model) -> None:
        """Wait for all proofs; ``behind`` is as for :meth:`begin`.

        Raises:
            VerificationError: one of them failed.
        """
        self.begin(behind)
        begun, self._begun = self._begun, []
        for claimed, future in begun:
            if not future.done():
                self._on_stage(f"proving {claimed.name}")
            claimed.take(future.result())
