"""How long-running work reports its progress to its caller."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called when a stage begins, and while it runs."""

    def __call__(self, stage: str, count: int = 0, total: int | None = None) -> None:
        """Report the stage, and how much of it is done; ``total`` is ``None`` where it is unknown."""


def silent(stage: str, count: int = 0, total: int | None = None) -> None:
    """Report nothing."""
