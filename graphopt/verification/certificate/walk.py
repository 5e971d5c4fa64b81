"""The walk along the graph after: what each tensor stands for in the graph before, and in which coordinates it is."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Finding
from graphopt.verification.certificate.algebra import OWN_RULES, RULES
from graphopt.verification.certificate.coordinates import Tag, same_coordinates
from graphopt.verification.certificate.correspondence import HADAMARD, constant, difference, inputs_of
from graphopt.verification.certificate.insertions import coordinates_behind, matrices_of
from graphopt.verification.certificate.reasons import (
    CLAIM_REFUSED,
    CUTS_THROUGH,
    HADAMARD_HOLDS,
    NODE_NEW,
    NOT_AS_CLAIMED,
    NOT_FOLLOWED,
    ONE_CONSTANT,
    ONE_HAS_INPUT,
    OTHER_SHAPE,
    READS_OTHER,
    SHAPES_DO_NOT_FIT,
    STANDS_FOR_NONE,
    STANDS_FOR_NOTHING,
)
from graphopt.verification.certificate.site import Pair, RefusalError, Site, dims_of

if TYPE_CHECKING:
    from graphopt.verification.certificate.claim_labels import ClaimedTags
    from graphopt.verification.certificate.constants import Constants
    from graphopt.verification.certificate.rotations import Rotations

# Only these make rotated coordinates out of others, by a weight of theirs.
_WRITERS = ("MatMul", "Gather")


class Walk:
    """Follows nodes in graph order, and after a failure goes on with what was probably meant.

    Args:
        before: the graph before.
        claimed: the coordinates that are claimed.
        rotations: the matrices met so far.
        constants: compares constants.
        findings: where findings are added.

    Attributes:
        stands_for: by tensor of the graph after, its counterpart before.
        tags: by tensor of the graph after, its coordinates.
        found: nodes of the graph before that some node after corresponds to.
        own_nodes: nodes of our operators that rotated coordinates went through.
    """

    def __init__(
        self,
        before: ir.Graph,
        claimed_tags: ClaimedTags,
        rotations: Rotations,
        constants: Constants,
        findings: list[Finding],
    ) -> None:
        self._claimed_tags, self._rotations, self._constants, self._findings = (
            claimed_tags,
            rotations,
            constants,
            findings,
        )
        self._nodes: dict[str | None, list[ir.Node]] = {}
        for node in before:
            self._nodes.setdefault(node.name, []).append(node)
        self.stands_for: dict[ir.Value, ir.Value] = {}
        self.tags: dict[ir.Value, Tag] = {}
        self.counterparts: set[ir.Node] = set()
        self.own_nodes: list[ir.Node] = []

    def follow(self, node: ir.Node) -> None:
        """Find the counterpart of ``node`` and the coordinates of its outputs."""
        twin = self._counterpart(node)
        if twin is not None:
            self._follow_beside(node, twin)
        elif (node.domain, node.op_type) == HADAMARD:
            self._follow_rotation(node)
        else:
            self.fail(node, None, NODE_NEW())
            self._pass_through(node)

    def fail(self, location: ir.Node | ir.Value, tensor: ir.Value | str | None, reason: Fact) -> None:
        """Add a failure."""
        name = tensor.name if isinstance(tensor, ir.Value) else tensor
        node_name = location.name or (location.op_type if isinstance(location, ir.Node) else "?")
        self._findings.append(Finding(node=node_name, tensor=name, status="failed", reason=reason))

    def claim(self, location: ir.Node | ir.Value, value: ir.Value, before: ir.Value) -> Tag:
        """Return the coordinates claimed of ``value``, nothing if the claim cannot be."""
        try:
            return self._claimed_tags.tag(value.name, dims_of(before))
        except ValueError as error:
            self.fail(location, value, CLAIM_REFUSED(error=str(error)))
            return None

    def _counterpart(self, node: ir.Node) -> ir.Node | None:
        candidates = self._nodes.get(node.name, [])
        outputs = [value.name for value in node.outputs]
        exact = (candidate for candidate in candidates if [value.name for value in candidate.outputs] == outputs)
        return next(exact, candidates[0] if candidates else None)

    def _follow_beside(self, node: ir.Node, twin: ir.Node) -> None:
        self.counterparts.add(twin)
        reason = difference(node, twin)
        if reason is not None:
            self.fail(node, None, reason)
        outputs = list(zip(node.outputs, twin.outputs, strict=False))
        for value, before in outputs:
            self.stands_for[value] = before
        claims = [self.claim(node, value, before) for value, before in outputs]
        constants, tags = self._inputs(node, twin)
        site = Site(
            node, twin, tags, claims, constants, self._rotations, self._constants.matrix, self._constants.entries
        )
        for (value, _), tag, claim in zip(outputs, self._outputs(site), claims, strict=False):
            if claim is not None and not same_coordinates(tag, claim):
                self.fail(node, value, NOT_AS_CLAIMED())
            self.tags[value] = tag if claim is None else claim
        for index, (old, new) in constants.items():
            if index not in site.fused_inputs:
                self._constants.compare_bits(node, site.name(index), old, new)

    def _inputs(self, node: ir.Node, twin: ir.Node) -> tuple[dict[int, Pair], list[Tag]]:
        constants: dict[int, Pair] = {}
        tags: list[Tag] = []
        for index, (value, before) in enumerate(zip_longest(inputs_of(node), inputs_of(twin))):
            tags.append(None if value is None else self.tags.get(value))
            new, old = constant(value), constant(before)
            if new is not None and old is not None:
                constants[index] = (old, new)
            elif value is None or before is None:
                if value is not before:
                    self.fail(node, value or before, ONE_HAS_INPUT(input=index))
            elif new is not None or old is not None:
                self.fail(node, value, ONE_CONSTANT(input=index))
            elif self.stands_for.get(value) is not before:
                counterpart = self.stands_for.get(value)
                reason = None if counterpart is None else READS_OTHER(stands=counterpart.name, before=before.name)
                self.fail(node, value, reason or STANDS_FOR_NONE(before=before.name))
        return constants, tags

    def _outputs(self, site: Site) -> list[Tag]:
        """Return the coordinates of the outputs: the same function of the same inputs is the same, whatever it is."""
        no_tags: list[Tag] = [None] * len(site.node.outputs)
        writes = site.claims[:1] != [None] and site.node.op_type in _WRITERS and site.constants
        if not any(site.tags) and not writes:
            return no_tags
        rule = RULES.get(site.node.op_type) if not site.node.domain else None
        if site.node.domain == HADAMARD[0] and site.node.op_type in OWN_RULES:
            rule = OWN_RULES[site.node.op_type]
            self.own_nodes.append(site.node)
        try:
            if rule is None:
                site.refuse(NOT_FOLLOWED(op=site.node.op_type))
            tags = rule(site)
            self._confirm(site, tags)
        except RefusalError as refusal:
            self.fail(site.node, refusal.tensor or self._rotated_input(site), refusal.reason)
            return refusal.guess
        except (ValueError, IndexError) as error:
            self.fail(site.node, self._rotated_input(site), SHAPES_DO_NOT_FIT(error=str(error)))
            return no_tags
        return tags

    def _confirm(self, site: Site, tags: list[Tag]) -> None:
        """Refuse labels that do not have the shape of their tensor, or of which a part is elsewhere."""
        for index, tag in enumerate(tags):
            if tag is None:
                continue
            if tag.shape != site.output_shape(index):
                site.refuse(OTHER_SHAPE(output=index, shape=list(tag.shape)))
            if not tag.is_complete(self._rotations):
                site.refuse(CUTS_THROUGH())

    def _follow_rotation(self, node: ir.Node) -> None:
        """Follow a node that is not in the graph before and stands for its input, in other coordinates."""
        self.own_nodes.append(node)
        self._pass_through(node)
        value = node.inputs[0] if node.inputs else None
        counterpart = None if value is None else self.stands_for.get(value)
        try:
            matrices = matrices_of(node)
            orders = [order for value in node.inputs[1:] if (order := _order(value)) is not None]
            names = ", ".join(value.name or "?" for value in node.inputs[1:] if value is not None)
            reason = HADAMARD_HOLDS(orders=orders)
            self._findings.append(Finding(node=node.name or "?", tensor=names, status="proved", reason=reason))
            if value is None or counterpart is None:
                raise RefusalError(STANDS_FOR_NOTHING())
            self.tags[node.outputs[0]] = coordinates_behind(
                self.tags.get(value), dims_of(counterpart), matrices, self._rotations
            )
        except RefusalError as refusal:
            self.fail(node, refusal.tensor or value, refusal.reason)
            for output, guess in zip(node.outputs, refusal.guess, strict=False):
                self.tags[output] = guess

    def _pass_through(self, node: ir.Node) -> None:
        """Let the outputs of a node stand for what its first input does, in the same coordinates."""
        value = node.inputs[0] if node.inputs else None
        if value is not None and value in self.stands_for:
            for output in node.outputs:
                self.stands_for[output], self.tags[output] = self.stands_for[value], self.tags.get(value)

    def _rotated_input(self, site: Site) -> str | None:
        return next((site.name(index) for index, tag in enumerate(site.tags) if tag is not None), None)


def _order(value: ir.Value | None) -> int | None:
    order = None if value is None or not value.shape else value.shape[0]
    return order if isinstance(order, int) else None
