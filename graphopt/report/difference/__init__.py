"""How one model differs from another: by the record of the passes that lead from one to the other, else by content."""

from __future__ import annotations

from graphopt.report.difference.diff import diff, diff_of
from graphopt.report.difference.tables import groups_table, heading

__all__ = ["diff", "diff_of", "groups_table", "heading"]
