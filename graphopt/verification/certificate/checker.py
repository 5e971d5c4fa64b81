"""Is the graph after the graph before in other coordinates? Checked without the rewriter.

Nothing that a rewriter says is believed, and no code of it is shared. The argument goes along the graph after:

* each tensor stands for a tensor of the graph before: graph inputs for those of the same name, outputs of a node for
  those of the node of the same name, which must be the same operation on what stands for its inputs; an added
  ``ai.graphopt::Hadamard`` stands for its input;
* each tensor has coordinates, see :mod:`graphopt.verification.certificate.coordinates`. They follow from those of the
inputs
  (:mod:`~graphopt.verification.certificate.algebra`, :mod:`~graphopt.verification.certificate.layout`), or are
  claimed: of what a
  weight writes, when that weight is its original times the maps (:mod:`~graphopt.verification.certificate.weights`);
  of a cache that the app feeds back, when it comes out as it went in;
* what the app sees otherwise, the logits, comes out in its own coordinates.

``proved`` means: in real numbers, with weights that are their originals times their maps, the two graphs compute the
same; and each weight is that, rounded once. The latter is seen on random vectors: the module on weights states how
small a fault may go unseen, and with what probability. Assumed are the shapes that the graph before states; that the
operator ``Hadamard`` is y = x (I (x) left (x) right) / sqrt(a b) on the last axis, as its tests say (a file that brings
another body is ``not covered``); and that a cache is empty or came out of the model.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from graphopt.graph.diagnostics import Finding
from graphopt.verification.certificate.claim_labels import ClaimedTags
from graphopt.verification.certificate.constants import Constants
from graphopt.verification.certificate.coordinates import same_coordinates
from graphopt.verification.certificate.correspondence import constant, has_foreign_body, live_nodes, model_difference
from graphopt.verification.certificate.reasons import (
    CACHE_TURNED,
    CLAIM_OF_NOTHING,
    FOREIGN_BODY,
    INPUT_DEFAULT,
    INPUT_GONE,
    INPUT_NEW,
    INPUT_ROTATED,
    INPUT_TYPE,
    NODE_GONE,
    OUTPUT_GONE,
    OUTPUT_NEW,
    OUTPUT_OTHER,
    OUTPUT_ROTATED,
)
from graphopt.verification.certificate.report import Certificate, overall, shorten_failures
from graphopt.verification.certificate.rotations import Rotations
from graphopt.verification.certificate.site import dims_of
from graphopt.verification.certificate.walk import Walk

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.numerics.rotations.claims import Claims

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value|indexer_key|recurrent_state(?:_\d+)?)")
_PRESENT = re.compile(r"present\.(\d+)\.(key|value|indexer_key|recurrent_state(?:_\d+)?)")


def check(before: ir.Model, after: ir.Model, claims: Claims, *, vectors: int = 4, seed: int = 0) -> Certificate:
    """Check that ``after`` computes what ``before`` computes.

    Args:
        before: the model as it was; a clone, since passes work in place.
        after: the model that a rewriter made of it.
        claims: in which coordinates the rewriter says that its tensors are.
        vectors: random vectors to check each fused matrix with.
        seed: what they are drawn from.

    Returns:
        The certificate. A wrong graph is a finding in it, never an error.
    """
    start = time.perf_counter()
    findings: list[Finding] = []
    rotations = Rotations()
    claimed_tags = ClaimedTags(claims, rotations)
    with Constants(findings, rotations, vectors, seed) as constants:
        walk = Walk(before.graph, claimed_tags, rotations, constants, findings)
        reason = model_difference(before, after)
        if reason is not None:
            findings.append(Finding(node="model", tensor=None, status="failed", reason=reason))
        _follow_inputs(before.graph, after.graph, walk, constants)
        for node in after.graph:
            walk.follow(node)
        _confirm_outputs(before.graph, after.graph, walk, constants)
        for name in sorted(
            {f"{node.domain}::{node.op_type}" for node in walk.own_nodes if has_foreign_body(after, node)}
        ):
            findings.append(Finding(node=name, tensor=None, status="not covered", reason=FOREIGN_BODY()))
        for node in live_nodes(before.graph):
            if node not in walk.counterparts and constant(node.outputs[0]) is None:
                walk.fail(node, None, NODE_GONE())
        for name in sorted(claimed_tags.unseen):
            findings.append(Finding(node="claims", tensor=name, status="failed", reason=CLAIM_OF_NOTHING()))
    return Certificate(
        status=overall(findings),
        rotations=len(rotations),
        nodes=len(after.graph),
        weights=constants.fused_count,
        unchanged=constants.unchanged_count,
        largest_error_ratio=constants.largest_ratio,
        vectors=vectors,
        seconds=time.perf_counter() - start,
        findings=shorten_failures(findings),
    )


def _follow_inputs(before: ir.Graph, after: ir.Graph, walk: Walk, constants: Constants) -> None:
    """Graph inputs are what they were, but caches may be in the coordinates that are claimed."""
    names = {value.name: value for value in before.inputs}
    outputs = {value.name for value in after.outputs}
    for value in after.inputs:
        old = names.pop(value.name, None)
        if old is None:
            walk.fail(value, value, INPUT_NEW())
            continue
        if value.dtype != old.dtype or dims_of(value) != dims_of(old):
            walk.fail(value, value, INPUT_TYPE())
        if value.const_value is not None and old.const_value is not None:
            constants.compare_bits(value, value.name or "?", old.const_value, value.const_value)
        elif value.const_value is not old.const_value:
            walk.fail(value, value, INPUT_DEFAULT())
        tag = walk.claim(value, value, old)
        if tag is not None and _present(value.name) not in outputs:
            walk.fail(value, value, INPUT_ROTATED())
        walk.stands_for[value], walk.tags[value] = old, tag
    for old in names.values():
        walk.fail(old, old, INPUT_GONE())


def _confirm_outputs(before: ir.Graph, after: ir.Graph, walk: Walk, constants: Constants) -> None:
    """Outputs are what they were, but a cache comes out in the coordinates that it went in with."""
    caches = {_present(value.name): walk.tags.get(value) for value in after.inputs}
    names = {value.name: value for value in before.outputs}
    for value in after.outputs:
        producer, old = value.producer() or value, names.pop(value.name, None)
        new_tensor, old_tensor = constant(value), constant(old)
        if old is None:
            walk.fail(producer, value, OUTPUT_NEW())
        elif new_tensor is not None and old_tensor is not None:
            constants.compare_bits(producer, value.name or "?", old_tensor, new_tensor)
        elif walk.stands_for.get(value) is not old:
            walk.fail(producer, value, OUTPUT_OTHER())
        if not same_coordinates(walk.tags.get(value), caches.get(value.name)):
            is_cache = value.name in caches and _PRESENT.fullmatch(value.name or "")
            walk.fail(producer, value, CACHE_TURNED() if is_cache else OUTPUT_ROTATED())
    for old in names.values():
        walk.fail(old.producer() or old, old, OUTPUT_GONE())


def _present(name: str | None) -> str | None:
    """Return the output in which the cache called ``name`` comes out again."""
    cache = _PAST.fullmatch(name or "")
    return f"present.{cache[1]}.{cache[2]}" if cache else None
