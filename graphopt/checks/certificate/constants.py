"""All comparisons of constants of one check: each pair once, with a finding for each that is not simply the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.checks.certificate.coordinates import Tag
from graphopt.checks.certificate.reasons import (
    CHANGED,
    ENTRIES_HOLD,
    MATRIX_HOLDS,
    NOT_ITS_ORIGINAL,
    OTHER_TENSOR,
    ROUNDING_UNKNOWN,
    UNCHANGED,
)
from graphopt.checks.certificate.rotations import Rotations
from graphopt.checks.certificate.site import Site
from graphopt.checks.certificate.weights import Comparison, compare_entries, compare_matrix, is_same, rounding_is_known
from graphopt.facts import Fact, Finding


class Constants:
    """Compares constants and counts.

    Args:
        findings: where findings are added.
        rotations: what labels mean.
        vectors: random vectors for each matrix.
        seed: what they are drawn from.

    Attributes:
        unchanged: constants that are bit by bit what they were.
        fused: constants that are in other coordinates, and were compared so.
        largest_ratio: the largest deviation of those, as a share of what rounding explains.
    """

    def __init__(self, findings: list[Finding], rotations: Rotations, vectors: int, seed: int) -> None:
        self._findings, self._rotations, self._vectors = findings, rotations, vectors
        self._random = np.random.default_rng(seed)
        self._done: set[tuple[object, ...]] = set()
        self.unchanged, self.fused, self.largest_ratio = 0, 0, 0.0

    def same(self, node: ir.Node | ir.Value, name: str, before: ir.TensorProtocol, after: ir.TensorProtocol) -> None:
        """Compare bit by bit."""
        if not self._first((id(before), id(after))):
            return
        if is_same(before, after):
            self.unchanged += 1
        else:
            self._add(node, name, CHANGED())

    def matrix(self, site: Site, index: int, rows: Tag, columns: Tag) -> None:
        """Compare input ``index`` with M_in^T W M_out."""
        before, after = site.constants[index]
        keys = [tag and tag.key() for tag in (rows, columns)]
        if not self._fits(site, index) or not self._first((id(before), id(after), *keys)):
            return
        vectors = self._random.standard_normal((before.shape.numpy()[-1], self._vectors))
        found = compare_matrix(before, after, (rows, columns), self._rotations, vectors)
        self._judge(
            site,
            index,
            found,
            MATRIX_HOLDS(vectors=self._vectors, ratio=found.ratio, visible=found.visible),
        )

    def entries(self, site: Site, index: int, labels: Tag) -> None:
        """Compare input ``index``, a constant in other coordinates, entry by entry."""
        before, after = site.constants[index]
        if not self._fits(site, index) or not self._first((id(before), id(after), labels and labels.key())):
            return
        found = compare_entries(before, after, labels, self._rotations)
        self._judge(
            site,
            index,
            found,
            ENTRIES_HOLD(ratio=found.ratio),
        )

    def _fits(self, site: Site, index: int) -> bool:
        before, after = site.constants[index]
        if before.dtype != after.dtype or list(before.shape) != list(after.shape):
            self._add(
                site.node, site.name(index), OTHER_TENSOR(dtype=str(before.dtype), shape=list(before.shape.numpy()))
            )
        elif not rounding_is_known(after):
            finding = Finding(
                node=site.node.name or site.node.op_type,
                tensor=site.name(index),
                status="not covered",
                reason=ROUNDING_UNKNOWN(dtype=str(after.dtype)),
            )
            self._findings.append(finding)
        else:
            return True
        return False

    def _judge(self, site: Site, index: int, found: Comparison, reason: Fact) -> None:
        self.fused += 1
        self.largest_ratio = max(self.largest_ratio, found.ratio)
        figures = {"largest_error_ratio": found.ratio, "visible_row_error": found.visible}
        node, name = site.node, site.name(index)
        if found.ratio <= 1:
            self._findings.append(
                Finding(
                    node=node.name or node.op_type,
                    tensor=name,
                    status="proved",
                    reason=reason,
                    figures=figures,
                )
            )
            return
        off = UNCHANGED if is_same(*site.constants[index]) else NOT_ITS_ORIGINAL
        self._add(node, name, off(row=found.row, ratio=found.ratio), figures)

    def _first(self, key: tuple[object, ...]) -> bool:
        new = key not in self._done
        self._done.add(key)
        return new

    def _add(self, node: ir.Node | ir.Value, name: str, reason: Fact, figures: dict[str, float] | None = None) -> None:
        where = node.name or (node.op_type if isinstance(node, ir.Node) else "?")
        self._findings.append(Finding(node=where, tensor=name, status="failed", reason=reason, figures=figures or {}))
