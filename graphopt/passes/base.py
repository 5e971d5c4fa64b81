"""The contract of a pass: what it declares, and what it must say about its work."""

from __future__ import annotations

import abc
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import onnx_ir as ir
from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, PassReport
from graphopt.passes.context import Context, Nodes, Statistics, make_context
from graphopt.passes.phases import CANONICAL_OPSETS, PHASES, Phase
from graphopt.runtime_ops import declare
from graphopt.tasks import task_of
from graphopt.util.targets import Target

if TYPE_CHECKING:
    from graphopt.passes.recipe import Recipe


class Options(BaseModel):
    """A part of what a recipe may say about a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class PassResult(ir.passes.PassResult):
    """An ``onnx_ir`` pass result that also carries the pass's report."""

    report: PassReport


class Pass(Options, ir.passes.InPlacePass, abc.ABC):
    """A rewrite of a model in place, with what a recipe may say about it.

    A subclass sets ``name`` and ``effect``, adds its options as fields, and implements :meth:`rewrite`. Its phase is
    the folder that it lies in; ``after`` names the passes of that phase that come before it in a recipe, ``targets``
    those that add the step to every recipe. Its docstring
    shows the rewrite as before -> after with the algebra, and its options; ``graphopt passes`` prints it. ``requires``
    and ``ensures`` of ``onnx_ir`` state what must hold before and after.

    Recipes and manifests write a pass as a mapping: its name under ``step``, then its options.
    """

    name: ClassVar[str]
    effect: ClassVar[Effect]
    after: ClassVar[tuple[str, ...]] = ()
    targets: ClassVar[tuple[Target, ...]] = ()
    _context: Context | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _drop_name(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "step" not in value:
            return value
        if value["step"] != cls.name:
            raise ValueError(f"the step is {cls.name}, and not {value['step']!r}")
        return {name: option for name, option in value.items() if name != "step"}

    @model_serializer(mode="wrap")
    def _add_name(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"step": self.name, **serialize(self)}

    def with_files_from(self, folder: Path) -> Self:
        """Return the pass with each file that lies in ``folder``, where the recipe was read, named from there."""
        options = {name: getattr(self, name) for name in type(self).model_fields}
        files = {name: folder / file for name, file in options.items() if isinstance(file, Path)}
        return self.model_copy(update={name: file for name, file in files.items() if file.is_file()})

    def self_contained(self, statistics: Statistics) -> Self:
        """Return the pass with what was measured in place of the files that hold it, for the manifest.

        Raises:
            InputError: a file is not there, or holds something else.
        """
        del statistics
        return self

    @classmethod
    def phase(cls) -> Phase:
        """Return the phase: the folder of :mod:`graphopt.passes` that the pass lies in."""
        return next(phase for phase in PHASES if cls.__module__.startswith(f"graphopt.passes.{phase}."))

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether ``recipe``, as it was requested, needs this step for ``graph`` and gets it unasked."""
        del graph, recipe
        return False

    def on_this_machine(self) -> Self:
        """Return the pass with what it leaves to the machine that optimizes."""
        return self

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
        duplicates = [name for name, count in names.items() if count > 1]
        if duplicates:
            raise ir.passes.PostconditionError(
                f"{self.name} gave several values the same name: {', '.join(duplicates)}"
            )

    def call(self, model: ir.Model) -> PassResult:
        """Run the pass; called by ``onnx_ir`` between ``requires`` and ``ensures``."""
        report = PassReport(name=self.name, effect=self.effect)
        nodes = Nodes(model.graph)
        start = time.perf_counter()
        self.rewrite(model, (self._context or make_context(task_of(model.graph))).of_pass(report))
        declare(model)
        report.seconds = time.perf_counter() - start
        nodes.record_added(model.graph, self.name)
        report.removed = nodes.removals(model.graph, self.name)
        if not report.changes:  # what a lossy pass left as it was must compute what it computed
            report.effect = "exact"
        return PassResult(model, modified=bool(report.changes), report=report)
