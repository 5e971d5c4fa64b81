"""One self-contained page about a model: what it is, what was done to it, what it costs, where quality was lost."""

from __future__ import annotations

from graphopt.report.page.report import report

__all__ = ["report"]
