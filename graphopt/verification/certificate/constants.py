"""All comparisons of constants of one check: each pair once, with a finding for each that is not simply the same."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Finding
from graphopt.util.processors import processors
from graphopt.verification.certificate.reasons import (
    CONSTANT_CHANGED,
    ENTRIES_HOLD,
    MATRIX_HOLDS,
    NOT_ITS_ORIGINAL,
    NOT_ROTATED,
    OTHER_TENSOR,
    ROUNDING_UNKNOWN,
)
from graphopt.verification.certificate.site import Site
from graphopt.verification.certificate.weights import (
    Comparison,
    compare_entries,
    compare_matrix,
    is_same,
    rounding_is_known,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from graphopt.verification.certificate.coordinates import Tag
    from graphopt.verification.certificate.rotations import Rotations

_Waiting = tuple[int, Site, int, Future[Comparison]]


class Constants:
    """Compares constants and counts. Matrices are compared by threads, one for each processor.

    It is a context manager: behind it, everything is compared, and the findings are complete and in order.

    Args:
        findings: where findings are added.
        rotations: what labels mean.
        vectors: random vectors for each matrix.
        seed: what they are drawn from.

    Attributes:
        unchanged_count: constants that are bit by bit what they were.
        fused_count: constants that are in other coordinates, and were compared so.
        largest_ratio: the largest deviation of those, as a share of what rounding explains.
    """

    def __init__(self, findings: list[Finding], rotations: Rotations, vectors: int, seed: int) -> None:
        self._findings, self._rotations, self._vectors = findings, rotations, vectors
        self._random = np.random.default_rng(seed)
        self._compared_keys: set[tuple[object, ...]] = set()
        self._threads = ThreadPoolExecutor(processors())
        # What threads compare, with the number of findings in front of it.
        self._waiting: deque[_Waiting] = deque()
        self._late: list[tuple[int, Finding]] = []
        # A file of weights is closed when it was read, so only one thread at a time reads a tensor.
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self.unchanged_count, self.fused_count, self.largest_ratio = 0, 0, 0.0

    def __enter__(self) -> Constants:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            while self._waiting:
                self._settle_oldest()
            for position, finding in reversed(self._late):
                self._findings.insert(position, finding)
        self._threads.shutdown(cancel_futures=True)

    def compare_bits(
        self, node: ir.Node | ir.Value, name: str, before: ir.TensorProtocol, after: ir.TensorProtocol
    ) -> None:
        """Compare bit by bit."""
        if not self._first((id(before), id(after))):
            return
        with self._reading(before, after):
            is_equal = is_same(before, after)
        if is_equal:
            self.unchanged_count += 1
        else:
            self._add(node, name, CONSTANT_CHANGED())

    def matrix(self, site: Site, index: int, rows: Tag, columns: Tag) -> None:
        """Compare input ``index`` with M_in^T W M_out."""
        before, after = site.constants[index]
        keys = [tag and tag.key() for tag in (rows, columns)]
        if not self._fits(site, index) or not self._first((id(before), id(after), *keys)):
            return
        vectors = self._random.standard_normal((before.shape.numpy()[-1], self._vectors))
        locks = self._locks_of(before, after)

        def compare() -> Comparison:
            with _hold(locks):
                return compare_matrix(before, after, (rows, columns), self._rotations, vectors)

        self.fused_count += 1
        self._waiting.append((len(self._findings), site, index, self._threads.submit(compare)))
        # Each that runs holds two matrices.
        while len(self._waiting) > 2 * processors():
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        position, site, index, future = self._waiting.popleft()
        comparison = future.result()
        reason = MATRIX_HOLDS(vectors=self._vectors, ratio=comparison.ratio, visible=comparison.visible)
        self._late.append((position, self._judge(site, index, comparison, reason)))

    def entries(self, site: Site, index: int, labels: Tag) -> None:
        """Compare input ``index``, a constant in other coordinates, entry by entry."""
        before, after = site.constants[index]
        if not self._fits(site, index) or not self._first((id(before), id(after), labels and labels.key())):
            return
        with self._reading(before, after):
            comparison = compare_entries(before, after, labels, self._rotations)
        self.fused_count += 1
        self._findings.append(self._judge(site, index, comparison, ENTRIES_HOLD(ratio=comparison.ratio)))

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

    def _judge(self, site: Site, index: int, comparison: Comparison, reason: Fact) -> Finding:
        self.largest_ratio = max(self.largest_ratio, comparison.ratio)
        figures = {"largest_error_ratio": comparison.ratio, "visible_row_error": comparison.visible}
        node_name, name = site.node.name or site.node.op_type, site.name(index)
        if comparison.ratio <= 1:
            return Finding(node=node_name, tensor=name, status="proved", reason=reason, figures=figures)
        with self._reading(*site.constants[index]):
            rule = NOT_ROTATED if is_same(*site.constants[index]) else NOT_ITS_ORIGINAL
        reason_of_failure = rule(row=comparison.row, ratio=comparison.ratio)
        return Finding(node=node_name, tensor=name, status="failed", reason=reason_of_failure, figures=figures)

    def _reading(self, before: ir.TensorProtocol, after: ir.TensorProtocol) -> contextlib.AbstractContextManager[None]:
        return _hold(self._locks_of(before, after))

    def _locks_of(self, before: ir.TensorProtocol, after: ir.TensorProtocol) -> list[threading.Lock]:
        # In one order, so that two threads cannot wait for one another.
        return [self._locks[identity] for identity in sorted({id(before), id(after)})]

    def _first(self, key: tuple[object, ...]) -> bool:
        new = key not in self._compared_keys
        self._compared_keys.add(key)
        return new

    def _add(self, node: ir.Node | ir.Value, name: str, reason: Fact) -> None:
        node_name = node.name or (node.op_type if isinstance(node, ir.Node) else "?")
        self._findings.append(Finding(node=node_name, tensor=name, status="failed", reason=reason, figures={}))


@contextlib.contextmanager
def _hold(locks: list[threading.Lock]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield
