"""How long work tells its caller where it stands."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called when a stage begins, and as it goes on."""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        """Say what happens, and how much of it is done; ``total`` is ``None`` where nobody knows."""


def silent(stage: str, done: int = 0, total: int | None = None) -> None:
    """Say nothing."""
