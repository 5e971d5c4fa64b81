"""The contract of a pass: what it declares, and what it must say about its work."""

from __future__ import annotations

import abc
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from graphopt import provenance
from graphopt.errors import InputError
from graphopt.rotations.claims import Claims
from graphopt.runtime import NEWEST_OPSET

Effect = Literal["exact", "lossy"]
"""``exact``: the graph computes the same function; ``lossy``: it computes another, and the difference is measured."""


CANONICAL_OPSETS = range(23, NEWEST_OPSET + 1)
"""From the first opset with ``Attention``, ``RMSNormalization`` and ``RotaryEmbedding`` to the newest that runs."""


class Options(BaseModel):
    """What a recipe may say about one step; each pass derives its own, told apart by a ``Literal`` field ``step``."""

    model_config = ConfigDict(extra="forbid", frozen=True)


OptionsT = TypeVar("OptionsT", bound=Options)


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


@dataclass
class PassResult(ir.passes.PassResult):
    """An ``onnx_ir`` pass result that also carries the pass's report."""

    report: PassReport


class Ledger:
    """Where a pass writes down what it does: the report and the provenance are one act."""

    def __init__(self, report: PassReport) -> None:
        self.report = report

    def changed(self, item: ir.Node | ir.Value, what: str, sources: Iterable[ir.Node | ir.Value | str] = ()) -> None:
        """Record that ``item`` was made, or edited, from ``sources``."""
        provenance.record(item, self.report.name, sources)
        self.report.changes.append(Change(where=item.name or "?", what=what))

    def report_change(self, where: str, what: str) -> None:
        """Record a change that no single node stands for."""
        self.report.changes.append(Change(where=where, what=what))

    def skipped(self, item: ir.Node | ir.Value | str, reason: str) -> None:
        """Record that ``item`` was left alone, and why."""
        where = item if isinstance(item, str) else item.name or "?"
        self.report.skips.append(Skip(where=where, reason=reason))


class Pass(ir.passes.InPlacePass, abc.ABC, Generic[OptionsT]):
    """A rewrite of a model in place.

    A subclass sets ``name`` and ``effect``, takes its ``Options``, and implements :meth:`rewrite`. Its docstring shows
    the rewrite as before -> after with the algebra; ``graphopt passes`` prints it. ``requires`` and ``ensures`` of
    ``onnx_ir`` state what must hold before and after.
    """

    name: ClassVar[str]
    effect: ClassVar[Effect]
    options_type: ClassVar[type[Options]]

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    @property
    def context(self) -> int:
        """Tokens that a sequence must have before the pass can show in what the model computes."""
        return 0

    @abc.abstractmethod
    def rewrite(self, model: ir.Model, ledger: Ledger) -> None:
        """Rewrite ``model`` in place and write every change and every skip into ``ledger``."""

    def __call__(self, model_or_result: ir.Model | ir.passes.PassResult, /) -> PassResult:
        """Run the pass on a model, with its checks before and after, and return its report with the model."""
        try:
            result = super().__call__(model_or_result)
        except ir.passes.PreconditionError as error:
            raise InputError(str(error), remedy="put the step `canonicalize` first in the recipe") from error
        assert isinstance(result, PassResult)
        return result

    def requires(self, model: ir.Model) -> None:
        """Demand the representation that all passes share: standard ONNX, opset 23 to 26."""
        opset = model.opset_imports.get("")
        if opset not in CANONICAL_OPSETS:
            raise ir.passes.PreconditionError(
                f"{self.name} needs a graph of opset {CANONICAL_OPSETS[0]} to {CANONICAL_OPSETS[-1]}, it has {opset}"
            )

    def ensures(self, model: ir.Model) -> None:
        """Promise a graph in which no name stands for two values."""
        names = Counter(value.name for node in model.graph for value in node.outputs if value.name)
        names.update(list(model.graph.initializers))
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ir.passes.PostconditionError(f"{self.name} gave several values the same name: {', '.join(twice)}")

    def call(self, model: ir.Model) -> PassResult:
        """Run the pass; called by ``onnx_ir`` between ``requires`` and ``ensures``."""
        report = PassReport(name=self.name, effect=self.effect)
        started = time.perf_counter()
        self.rewrite(model, Ledger(report))
        report.seconds = time.perf_counter() - started
        return PassResult(model, modified=bool(report.changes), report=report)
