"""What a check found, as data: one certificate, with a finding for everything that is not trivially so."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from graphopt.graph.diagnostics import Finding, Status
from graphopt.verification.certificate.reasons import NOT_LISTED

_LISTED_FAILURES = 20


class Certificate(BaseModel):
    """That the graph after computes what the graph before computes, up to the rounding of the weights; or why not.

    Attributes:
        status: ``failed`` if anything failed, else ``not covered`` if anything was not covered, else ``proved``.
        rotations: distinct orthogonal matrices that occur.
        nodes: nodes of the graph after that were followed.
        weights: fused weights that were checked against their originals.
        unchanged: constants that were compared with their originals and are the same.
        largest_error_ratio: the largest deviation of a fused weight, as a share of what rounding explains.
        vectors: random vectors that each fused matrix was checked with.
        seconds: what the check took.
        findings: all that failed (the first twenty) or was not covered, each fused weight, each pair of Hadamard
            matrices; not the thousands of nodes that are trivially right.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Status
    rotations: int
    nodes: int
    weights: int
    unchanged: int
    largest_error_ratio: float
    vectors: int
    seconds: float
    findings: list[Finding]


def overall(findings: list[Finding]) -> Status:
    """Return the worst status among ``findings``."""
    statuses = {finding.status for finding in findings}
    worst: tuple[Status, ...] = ("failed", "not covered", "measured")
    return next((status for status in worst if status in statuses), "proved")


def shorten_failures(findings: list[Finding]) -> list[Finding]:
    """Return ``findings`` with the first failures only: what follows a fault is mostly its consequence."""
    failures = [finding for finding in findings if finding.status == "failed"]
    surplus = failures[_LISTED_FAILURES:]
    if not surplus:
        return findings
    summary = Finding(
        node=surplus[0].node,
        tensor=None,
        status="failed",
        reason=NOT_LISTED(failures=len(surplus)),
    )
    return [finding for finding in findings if not any(finding is failure for failure in surplus)] + [summary]
