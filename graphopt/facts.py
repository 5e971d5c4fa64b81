"""What passes and checks say about a model, as data: changes, skips, checks, and where each applies.

A fact names its place and its kind and carries its figures; sentences are made of them in :mod:`graphopt.view`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from graphopt.rotations.claims import Claims

Effect = Literal["exact", "lossy"]
"""``exact``: the graph computes the same function; ``lossy``: it computes another, and the difference is measured."""

Status = Literal["proved", "measured", "failed", "not covered"]
"""What became of a check; there is no silent ok."""


class Change(BaseModel):
    """One rewrite: where, and what was done."""

    where: str
    what: str


class Skip(BaseModel):
    """One place that a pass looked at and left alone, and why."""

    where: str
    reason: str


class PassReport(BaseModel):
    """What one run of a pass did, what it left alone, how long it took in seconds, what it claims to be checked."""

    name: str
    effect: Effect
    changes: list[Change] = []
    skips: list[Skip] = []
    seconds: float = 0.0
    claims: Claims | None = None


class Finding(BaseModel):
    """One statement about one place of the graph.

    Attributes:
        node: the node of the graph after, or the graph input or output, that it is about.
        tensor: the tensor at fault, or the weight that was checked.
        status: ``proved``, ``measured``, ``failed`` or ``not covered``.
        reason: the evidence, or what is wrong.
        figures: the numbers behind it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str
    tensor: str | None
    status: Status
    reason: str
    figures: dict[str, float] = {}


class Check(BaseModel):
    """The result of one check: never a silent ok.

    Attributes:
        name: what was checked.
        after: the pass after which it was checked.
        status: ``proved``, ``measured``, ``failed`` or ``not covered``.
        reason: the evidence, or why there is none.
        figures: the numbers behind it.
        findings: the same place by place, where a check has places.
    """

    name: str
    after: str
    status: Status
    reason: str
    figures: dict[str, float] = {}
    findings: list[Finding] = []
