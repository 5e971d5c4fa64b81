"""Is the graph after the graph before in other coordinates? Checked without the rewriter.

Nothing that a rewriter says is believed, and no code of it is shared. The argument goes along the graph after:

* each tensor stands for a tensor of the graph before: graph inputs for those of the same name, outputs of a node for
  those of the node of the same name, which must be the same operation on what stands for its inputs; an added
  ``ai.graphopt::Hadamard`` stands for its input;
* each tensor has coordinates, see :mod:`graphopt.checks.certificate.coordinates`. They follow from those of the inputs
  (:mod:`~graphopt.checks.certificate.algebra`, :mod:`~graphopt.checks.certificate.layout`), or are claimed: of what a
  weight writes, when that weight is its original times the maps (:mod:`~graphopt.checks.certificate.weights`); of a
  cache that the app feeds back, when it comes out as it went in;
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

import onnx_ir as ir

from graphopt.checks.certificate.claimed import Claimed
from graphopt.checks.certificate.constants import Constants
from graphopt.checks.certificate.coordinates import same
from graphopt.checks.certificate.correspondence import constant, foreign_body, model_difference, needed
from graphopt.checks.certificate.report import Certificate, listed, overall
from graphopt.checks.certificate.rotations import Rotations
from graphopt.checks.certificate.site import dims_of
from graphopt.checks.certificate.walk import Walk
from graphopt.facts import TEXT, Finding, Rule
from graphopt.rotations.claims import Claims

FOREIGN_BODY = Rule(
    "certificate.foreign-body",
    "the body that the file gives it is not the operator's own, and what it computes is not looked at here",
)
UNSEEN = Rule("certificate.claim-of-nothing", "no computed tensor has this name")

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_PRESENT = re.compile(r"present\.(\d+)\.(key|value)")


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
    started = time.perf_counter()
    findings: list[Finding] = []
    rotations = Rotations()
    claimed, constants = Claimed(claims, rotations), Constants(findings, rotations, vectors, seed)
    walk = Walk(before.graph, claimed, rotations, constants, findings)
    changed = model_difference(before, after)
    if changed is not None:
        findings.append(Finding(node="model", tensor=None, status="failed", reason=TEXT(text=changed)))
    if foreign_body(after):
        findings.append(Finding(node="ai.graphopt::Hadamard", tensor=None, status="not covered", reason=FOREIGN_BODY()))
    _follow_inputs(before.graph, after.graph, walk, constants)
    for node in after.graph:
        walk.follow(node)
    _confirm_outputs(before.graph, after.graph, walk, constants)
    for node in needed(before.graph):
        if node not in walk.found and constant(node.outputs[0]) is None:
            walk.fail(node, None, "the graph after does not have this node, which outputs are computed from")
    for name in sorted(claimed.unseen):
        findings.append(Finding(node="claims", tensor=name, status="failed", reason=UNSEEN()))
    return Certificate(
        status=overall(findings),
        rotations=len(rotations),
        nodes=len(after.graph),
        weights=constants.fused,
        unchanged=constants.unchanged,
        largest_error_ratio=constants.largest_ratio,
        vectors=vectors,
        seconds=time.perf_counter() - started,
        findings=listed(findings),
    )


def _follow_inputs(before: ir.Graph, after: ir.Graph, walk: Walk, constants: Constants) -> None:
    """Graph inputs are what they were, but caches may be in the coordinates that are claimed."""
    names = {value.name: value for value in before.inputs}
    outputs = {value.name for value in after.outputs}
    for value in after.inputs:
        old = names.pop(value.name, None)
        if old is None:
            walk.fail(value, value, "the graph before has no such input")
            continue
        if value.dtype != old.dtype or dims_of(value) != dims_of(old):
            walk.fail(value, value, "type or shape of this input are not what they were")
        if value.const_value is not None and old.const_value is not None:
            constants.same(value, value.name or "?", old.const_value, value.const_value)
        elif value.const_value is not old.const_value:
            walk.fail(value, value, "this input has a default in one of the graphs only")
        tag = walk.claim(value, value, old)
        if tag is not None and _present(value.name) not in outputs:
            walk.fail(value, value, "it is claimed to be rotated, but it is no cache that comes out again")
        walk.stands_for[value], walk.tags[value] = old, tag
    for old in names.values():
        walk.fail(old, old, "the graph after has no such input")


def _confirm_outputs(before: ir.Graph, after: ir.Graph, walk: Walk, constants: Constants) -> None:
    """Outputs are what they were, but a cache comes out in the coordinates that it went in with."""
    caches = {_present(value.name): walk.tags.get(value) for value in after.inputs}
    names = {value.name: value for value in before.outputs}
    for value in after.outputs:
        place, old = value.producer() or value, names.pop(value.name, None)
        new_tensor, old_tensor = constant(value), constant(old)
        if old is None:
            walk.fail(place, value, "the graph before has no such output")
        elif new_tensor is not None and old_tensor is not None:
            constants.same(place, value.name or "?", old_tensor, new_tensor)
        elif walk.stands_for.get(value) is not old:
            walk.fail(place, value, "it does not stand for the output of this name")
        if not same(walk.tags.get(value), caches.get(value.name)):
            fed = value.name in caches and _PRESENT.fullmatch(value.name or "")
            left = "this output is left in rotated coordinates"
            walk.fail(place, value, "the cache goes in and comes out in different coordinates" if fed else left)
    for old in names.values():
        walk.fail(old.producer() or old, old, "the graph after has no such output")


def _present(name: str | None) -> str | None:
    """Return the output in which the cache called ``name`` comes out again."""
    cache = _PAST.fullmatch(name or "")
    return f"present.{cache[1]}.{cache[2]}" if cache else None
