"""The certificate of one pass as a check: proved, not covered, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.errors import VerificationError
from graphopt.graph.diagnostics import Check, Rule
from graphopt.verification.certificate.checker import check as certify

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.numerics.rotations.claims import Claims

CERTIFICATE_HOLDS = Rule(
    "certificate.holds",
    "each of {nodes} nodes maps coordinates to coordinates, the outputs are in their own; {weights} fused weights are "
    "their originals times orthogonal maps up to rounding, tried with {vectors} random vectors each",
)


def prove(before: ir.Model, after: ir.Model, claims: Claims, name: str) -> Check:
    """Let the independent checker confirm what the pass called ``name`` claims to have made of ``before``.

    Raises:
        VerificationError: it does not; names the first node and tensor at fault.
    """
    certificate = certify(before, after, claims)
    if certificate.status == "failed":
        first = next(finding for finding in certificate.findings if finding.status == "failed")
        raise VerificationError(
            f"the certificate of {name} does not hold: {first.reason}",
            node=first.node,
            tensor=first.tensor,
            remedy="do not deploy this model; leave the pass out of the recipe, and report this with the model",
        )
    figures = {
        "rotations": certificate.rotations,
        "nodes": certificate.nodes,
        "fused_weights": certificate.weights,
        "unchanged_constants": certificate.unchanged,
        "largest_share_of_rounding": certificate.largest_error_ratio,
        "seconds": certificate.seconds,
    }
    reason = CERTIFICATE_HOLDS(nodes=certificate.nodes, weights=certificate.weights, vectors=certificate.vectors)
    return Check(
        name="certificate",
        after=name,
        status=certificate.status,
        reason=reason,
        figures=figures,
        findings=certificate.findings,
    )
