"""The contract of a pass: what it declares, and what it must say about its work."""

from __future__ import annotations

import abc
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, model_validator

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, PassReport
from graphopt.passes.context import Context, Nodes, Statistics, make_context
from graphopt.passes.phases import CANONICAL_OPSETS, PHASES, Phase
from graphopt.runtime_ops import declare
from graphopt.tasks import task_of


class Options(BaseModel):
    """What a recipe may say about a step, or a part of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StepOptions(Options):
    """What a recipe may say about one step; each pass derives its own, with its name as the ``Literal`` of ``step``.

    Attributes:
        renamed: names that options had in older recipes and manifests, with those that they have now. Both are read.
        unstated: options that older manifests lack, with the values that the graphopt which wrote them went by.
        step: the name of the pass.
    """

    renamed: ClassVar[dict[str, str]] = {}
    unstated: ClassVar[dict[str, object]] = {}

    step: str

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for old, new in cls.renamed.items():
            if {old, new} <= value.keys():
                raise ValueError(f"the option {old} is called {new} now; give only {new}")
        return {cls.renamed.get(name, name): each for name, each in value.items()}

    def beside(self, folder: Path) -> Self:
        """Return the options with each file that lies in ``folder``, where the recipe was read, named from there."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        files = {name: folder / file for name, file in given.items() if isinstance(file, Path)}
        return self.model_copy(update={name: file for name, file in files.items() if file.is_file()})

    def self_contained(self, statistics: Statistics) -> Self:
        """Return the options with what was measured in place of the files that hold it, for the manifest.

        Raises:
            InputError: a file is not there, or holds something else.
        """
        return self


OptionsT = TypeVar("OptionsT", bound=StepOptions)


@dataclass
class PassResult(ir.passes.PassResult):
    """An ``onnx_ir`` pass result that also carries the pass's report."""

    report: PassReport


class Pass(ir.passes.InPlacePass, abc.ABC, Generic[OptionsT]):
    """A rewrite of a model in place.

    A subclass sets ``name`` and ``effect``, takes its ``Options``, and implements :meth:`rewrite`. Its phase is the
    folder that it lies in; ``after`` names the passes of that phase that come before it in a recipe. Its docstring
    shows the rewrite as before -> after with the algebra; ``graphopt passes`` prints it. ``requires`` and ``ensures``
    of ``onnx_ir`` state what must hold before and after.
    """

    name: ClassVar[str]
    effect: ClassVar[Effect]
    options_type: ClassVar[type[StepOptions]]
    after: ClassVar[tuple[str, ...]] = ()
    _context: Context | None = None

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    @classmethod
    def phase(cls) -> Phase:
        """Return the phase: the folder of :mod:`graphopt.passes` that the pass lies in."""
        return next(phase for phase in PHASES if cls.__module__.startswith(f"graphopt.passes.{phase}."))

    @classmethod
    def needed(cls, graph: ir.Graph) -> bool:
        """Return whether a recipe for ``graph`` needs this step, and gets it where it does not name it."""
        del graph
        return False

    @property
    def context_tokens(self) -> int:
        """Tokens that a sequence must have before the pass can show in what the model computes."""
        return 0

    @abc.abstractmethod
    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rewrite ``model`` in place and write every change and every skip into ``context.ledger``."""

    def __call__(
        self, model_or_result: ir.Model | ir.passes.PassResult, /, context: Context | None = None
    ) -> PassResult:
        """Run the pass on a model, with its checks before and after, and return its report with the model.

        Args:
            model_or_result: the model, rewritten in place.
            context: what the pass shares with others; by default that of the model alone.
        """
        self._context = context
        try:
            result = super().__call__(model_or_result)
        except ir.passes.PreconditionError as error:
            raise InputError(str(error), remedy="put the step `canonicalize` first in the recipe") from error
        finally:
            self._context = None
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
        """Ensure that no two values of the graph have the same name."""
        names = Counter(value.name for node in model.graph for value in node.outputs if value.name)
        names.update(list(model.graph.initializers))
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ir.passes.PostconditionError(f"{self.name} gave several values the same name: {', '.join(twice)}")

    def call(self, model: ir.Model) -> PassResult:
        """Run the pass; called by ``onnx_ir`` between ``requires`` and ``ensures``."""
        report = PassReport(name=self.name, effect=self.effect)
        there = Nodes(model.graph)
        started = time.perf_counter()
        self.rewrite(model, (self._context or make_context(task_of(model.graph))).of_pass(report))
        declare(model)
        report.seconds = time.perf_counter() - started
        there.record_added(model.graph, self.name)
        report.removed = there.removed(model.graph, self.name)
        if not report.changes:  # what a lossy pass left as it was must compute what it computed
            report.effect = "exact"
        return PassResult(model, modified=bool(report.changes), report=report)
