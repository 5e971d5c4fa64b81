"""What a pass meets the world through: where it writes down what it does, and what it may know besides the graph."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.heads import HeadScores, read_scores
from graphopt.errors import InputError
from graphopt.graph import provenance
from graphopt.graph.diagnostics import Change, Fact, PassReport, Removal, Skip
from graphopt.graph.weights.store import Store
from graphopt.ort.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from graphopt.graph.weights import Expression
    from graphopt.graph.weights.evaluator import Evaluator, OnTensor
    from graphopt.quantization.statistics import Calibration, InputStatistics
    from graphopt.quantization.statistics.ranges import RangeMethod, TensorRanges
    from graphopt.quantization.statistics.sequence import RoundProduct
    from graphopt.tasks import Task
    from graphopt.util.targets import InstructionSet, Target

    ExpressionsOf = Callable[[ir.Node, InputStatistics], Collection[Expression]]


class Ledger:
    """Where a pass writes down what it does: the report and the provenance are one act."""

    def __init__(self, report: PassReport) -> None:
        self.report = report

    def changed(self, item: ir.Node | ir.Value, fact: Fact, sources: Iterable[ir.Node | ir.Value | str] = ()) -> None:
        """Record that ``item`` was made, or edited, from ``sources``."""
        provenance.record(item, self.report.name, sources)
        self.report_change(item.name or "?", fact)

    def report_change(self, location: str, fact: Fact) -> None:
        """Record a change that no single node stands for."""
        self.report.changes.append(Change(where=location, what=fact))

    def skipped(self, item: ir.Node | ir.Value | str, reason: Fact, *, node: str | None = None) -> None:
        """Record that ``item`` was left alone, and why; ``node`` is the reason where it is another one."""
        location = item if isinstance(item, str) else item.name or "?"
        self.report.skips.append(Skip(where=location, reason=reason, node=node))


class Nodes:
    """Finds which nodes a pass adds and takes away: compares the graph of before, made note of here, with the later.

    Args:
        graph: the graph before the pass.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._before = {node: [name for name in (node.name, *_outputs(node)) if name] for node in graph}
        self._constants = set(graph.initializers.values())

    def record_added(self, graph: ir.Graph, pass_name: str) -> None:
        """Give each new node that the pass left without a record one, so that every node leads back to the model.

        It was made of the node whose output it makes now; else of what it took over the record of; else of what it
        reads.
        """
        makers = {name: names[0] for names in self._before.values() for name in names[1:]}
        for node in graph:
            steps = provenance.steps(node)
            if node in self._before or any((step.pass_name, step.name) == (pass_name, node.name) for step in steps):
                continue
            predecessors = [makers[name] for name in _outputs(node) if name in makers] or [
                step.name for step in steps[-1:]
            ]
            producers = (value.producer() or value for value in node.inputs if value is not None)
            old = (edit for edit in producers if not isinstance(edit, ir.Value) or self._is_old(edit))
            provenance.record(node, pass_name, predecessors or old)

    def _is_old(self, value: ir.Value) -> bool:
        return value.is_graph_input() or value in self._constants

    def removals(self, graph: ir.Graph, pass_name: str) -> list[Removal]:
        """Return the nodes that are gone, each with what was made from it by the pass, or is in its outputs' place."""
        nodes = set(graph)
        signatures = {(node.name, node.domain, node.op_type) for node in nodes}
        heirs: dict[str, list[str]] = {name: [name] for name in graph.initializers}
        for node in graph:
            steps = [step for step in provenance.steps(node) if step.pass_name == pass_name]
            for name in {*(source for step in steps for source in step.sources), *_outputs(node)}:
                heirs.setdefault(name, []).append(node.name or "?")
        return [
            Removal(
                where=node.name or "?",
                op_type=node.op_type,
                by=list(dict.fromkeys(heir for name in names for heir in heirs.get(name, ()))),
            )
            for node, names in self._before.items()
            if node not in nodes and (node.name, node.domain, node.op_type) not in signatures
        ]


def _outputs(node: ir.Node) -> list[str]:
    return [output.name for output in node.outputs if output.name]


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates what is made of statistics, a :class:`graphopt.quantization.statistics.collect.Consumer`.

    Attributes:
        evaluator: evaluates, and keeps.
        expressions_of: returns what is made of the statistics of the inputs of a product.
    """

    evaluator: Evaluator
    expressions_of: ExpressionsOf

    def is_done(self, inputs: Mapping[ir.Node, InputStatistics]) -> bool:
        """Return whether all of it is kept."""
        return all(self.evaluator.store.find(expression) is not None for expression in self._expressions(inputs))

    def run(self, inputs: Mapping[ir.Node, InputStatistics], on_tensor: OnTensor | None = None) -> None:
        """Evaluate it."""
        self.evaluator.values(self._expressions(inputs), on_tensor)

    def _expressions(self, inputs: Mapping[ir.Node, InputStatistics]) -> list[Expression]:
        return [
            expression for node, statistics in inputs.items() for expression in self.expressions_of(node, statistics)
        ]


class Statistics:
    """What was measured of a model: read once from the files that a recipe names, or collected when a pass asks.

    Args:
        calibration: collects what the inputs of products look like.
        evaluator: evaluates what is made of Hessians as soon as they are there, so that they need not be kept; ``None``
            where others may ask for them.

    Attributes:
        ranges: those of tensors that were asked for so far.
    """

    def __init__(self, calibration: Calibration | None = None, evaluator: Evaluator | None = None) -> None:
        self._calibration, self._evaluator = calibration, evaluator
        self._heads: dict[Path, HeadScores] = {}
        self.ranges: TensorRanges | None = None

    @property
    def store(self) -> Store | None:
        """Where what is made of Hessians lies as soon as they are there; ``None`` where Hessians are kept."""
        return None if self._evaluator is None else self._evaluator.store

    def rounded_matrices(self) -> Store:
        """Return where matrices lie that were rounded one after the other, for :meth:`inputs_in_sequence`."""
        return Store(self._collector().folder / "rounded")

    def inputs_in_sequence(
        self,
        model: ir.Model,
        nodes: Iterable[ir.Node],
        settings: str,
        round_product: RoundProduct,
        is_rounded: Callable[[ir.Node, InputStatistics], bool],
    ) -> dict[ir.Node, InputStatistics]:
        """Return what inputs of products look like where those before it are rounded; see :class:`Calibration`.

        Raises:
            InputError: it was not collected before, and the model cannot be run here.
        """

        def are_rounded(inputs: Mapping[ir.Node, InputStatistics]) -> bool:
            return all(is_rounded(node, statistics) for node, statistics in inputs.items())

        check = None if self._evaluator is None else are_rounded
        return self._collector().inputs_in_sequence(model, nodes, settings, round_product, check)

    def inputs(
        self, model: ir.Model, nodes: Iterable[ir.Node], expressions_of: ExpressionsOf | None = None
    ) -> dict[ir.Node, InputStatistics]:
        """Return what the first input of each of some products looks like, in the model as it is now.

        Args:
            model: the model.
            nodes: the products.
            expressions_of: returns all that will be made of the Hessian of a product's inputs. Where there is a
                :attr:`store`, it lies there afterwards, and Hessians may be gone.

        Raises:
            InputError: it was not collected before, and the model cannot be run here.
        """
        consumer = None
        if self._evaluator is not None and expressions_of is not None:
            consumer = _Evaluation(self._evaluator, expressions_of)
        return self._collector().inputs(model, nodes, consumer)

    def at_all_positions(
        self, model: ir.Model, values: Sequence[ir.Value], positions: int | None
    ) -> dict[ir.Value, InputStatistics]:
        """Return what queries or keys look like, at all positions that a model has.

        Args:
            model: the model.
            values: queries and keys of attentions.
            positions: that a sequence may have; ``None`` where that is unknown.

        Raises:
            InputError: it was not collected before, and the model cannot be run here.
        """
        return self._collector().over_positions(model, positions).values(model, values)

    def _collector(self) -> Calibration:
        if self._calibration is None:
            raise InputError(
                "a step needs statistics of the model, and there is no text to run it on",
                remedy="compile it with graphopt.optimize, or choose a rounding method that needs none",
            )
        return self._calibration

    def ranges_of(
        self, model: ir.Model, values: Iterable[ir.Value], method: RangeMethod, percentile: float, *, is_random: bool
    ) -> TensorRanges:
        """Return how far some tensors reach, in the model as it is now.

        Args:
            model: the model.
            values: the tensors.
            method: how ranges are chosen, see :mod:`graphopt.quantization.statistics.ranges`.
            percentile: of the method of that name.
            is_random: whether the model is run on random inputs.

        Raises:
            InputError: the model cannot be run here.
        """
        if self._calibration is None:
            raise InputError(
                "a step needs ranges of tensors, and there is nothing to run the model on",
                remedy="compile it with graphopt.optimize",
            )
        new_ranges = self._calibration.ranges(model, values, method, percentile, is_random=is_random)
        known_ranges = {} if self.ranges is None else self.ranges.ranges
        self.ranges = new_ranges.model_copy(update={"ranges": known_ranges | new_ranges.ranges})
        return new_ranges

    def heads(self, source: HeadScores | Path | None) -> HeadScores | None:
        """Return the scores of attention heads in the file ``source``; scores and ``None`` are returned as they are.

        Raises:
            InputError: the file is not there, or not a calibration.
        """
        if not isinstance(source, Path):
            return source
        if source not in self._heads:
            self._heads[source] = read_scores(source)
        return self._heads[source]


@dataclass
class Context:
    """What a pass meets the world through; all passes of one compilation share it but for the ledger.

    Attributes:
        task: what kind of model it is.
        target: what it is to run on.
        runner: runs models and parts of models.
        statistics: what was measured of the model.
        max_positions: tokens that a sequence of the model may have, as it came in; ``None`` where that is unknown.
        instructions: the instruction set of the CPU that it is to run on; ``None`` where nobody says.
        ledger: where a pass writes down every change and every skip; there is none outside of a pass.
    """

    task: Task
    target: Target
    runner: Runner
    statistics: Statistics
    max_positions: int | None
    instructions: InstructionSet | None = None
    ledger: Ledger = field(init=False)

    def of_pass(self, report: PassReport) -> Context:
        """Return the context of one pass, whose ledger writes into ``report``."""
        context = copy.copy(self)
        context.ledger = Ledger(report)
        return context


def make_context(
    task: Task,
    target: Target = "portable",
    runner: Runner | None = None,
    statistics: Statistics | None = None,
    max_positions: int | None = None,
    instructions: InstructionSet | None = None,
) -> Context:
    """Return the context of a compilation, or of a pass that is called alone: the one place that makes one."""
    return Context(task, target, runner or Runner(), statistics or Statistics(), max_positions, instructions)
