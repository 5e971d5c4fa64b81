"""Before and after: what a rewrite did to what the model computes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Status = Literal["proved", "measured", "failed", "not covered"]


class Check(BaseModel):
    """The result of one check: never a silent ok.

    Attributes:
        name: what was checked.
        after: the pass after which it was checked.
        status: ``proved``, ``measured``, ``failed`` or ``not covered``.
        reason: the evidence, or why there is none.
        figures: the numbers behind it.
    """

    name: str
    after: str
    status: Status
    reason: str
    figures: dict[str, float] = {}
