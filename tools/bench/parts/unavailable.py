"""Why something cannot take part."""

from __future__ import annotations


class UnavailableError(Exception):
    """An engine cannot take part in a case, and why."""
