"""Before and after: what a pass did to what the model computes.

Where the model fits into memory, it is run. At any size, a pass that claims what it did is proved as well, see
:mod:`graphopt.verification.certificate.proof`.

A model runs on a probe of random tokens, which its task draws and feeds (:mod:`graphopt.tasks`). The logits or hidden
states of real tokens are compared with those from before the pass. An exact pass may move them by rounding only and is
refused otherwise; a lossy pass is measured. Exact passes that follow one another are run once, behind the last; only
where that shows a difference, each by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.contrib import contrib_nodes
from graphopt.analysis.structure.product_codes import coded_nodes, dequantize_of
from graphopt.analysis.structure.products import reads_codes, reads_packed
from graphopt.errors import InputError, VerificationError
from graphopt.graph import provenance
from graphopt.graph.diagnostics import Check, Effect, Fact, Rule
from graphopt.graph.editing import bypass
from graphopt.ort.capacity import fit_as_floats, fit_beside, no_room_for
from graphopt.ort.runner import Runner
from graphopt.ort.session import ACCURACY_LEVEL, AS_IT_LIES, NO_ENTRIES, Entries, entries_of_few_calls
from graphopt.ort.snapshots import Snapshots
from graphopt.passes.lower.accuracy_level import AccuracyLevel
from graphopt.passes.lower.lower import lower_model
from graphopt.runtime_ops import DOMAIN
from graphopt.runtime_ops.round_activations.spec.op import ROUND_ACTIVATIONS
from graphopt.tasks import Probe, Task, task_of
from graphopt.tasks.base import LENGTH, Floats

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from graphopt.graph.weights.evaluator import Evaluator
    from graphopt.passes.base import Pass

TOLERANCE = 1e-4
"""How far an exact pass may move what a model computes, relative to the largest number of it.

float32 rounding of tens of layers, with room.
"""

LONGEST_CONTEXT = 4096
"""Tokens of context at most: a pass that shows only later is measured as far as that."""
_LEVEL, _FLOAT32 = "accuracy_level", 1
_ACTIVATIONS, _NOT_ROUNDED = "activations", "float32"
_IN_FLOATS = {ACCURACY_LEVEL: "0"}
# onnxruntime decodes codes once, when it opens the model. Its product of codes with inputs in floats takes twice as
# long for the tokens of a probe.
_DECODE_ENTRIES = {"session.disable_quant_qdq": "1", **AS_IT_LIES}

RAN_BEFORE_AND_AFTER = Rule("equivalence.ran", "{tokens}, run before and after in onnxruntime")
RAN_TOGETHER = Rule(
    "equivalence.ran-together", "{tokens}, run in onnxruntime before the first and after the last of {passes}"
)
SAME_GRAPH = Rule("equivalence.unchanged", "every node, port and weight is the one that was run before the pass")
NOT_ASKED = Rule("equivalence.not-asked", "the caller asked not to run the model")
NOT_STARTED = Rule("equivalence.not-started", "the model was not run before the pass")


@dataclass(frozen=True)
class _Outputs:
    """What a model computes.

    Attributes:
        as_it_runs: with the session entries of the recipe.
        in_floats: with the inputs of onnxruntime's products in floats; ``None`` where that was not needed yet.
        model: the model, where it was not.
    """

    as_it_runs: Floats
    in_floats: Floats | None
    model: ir.Model | None = None


class Verifier:
    """Runs a model before and after passes, and remembers what it said last.

    Args:
        folder: where models are written to be run; weights that a pass made lazily are computed once, into it.
        entries: onnxruntime session entries to run with.
        run: whether to run models at all.
        native: whether graphopt's own kernels take the nodes of its operators, where they were built. Without them the
            bodies run that the model carries, which is what onnxruntime runs anywhere else.
        context: tokens that fill the cache before anything is compared, see
            :attr:`graphopt.passes.base.Pass.context_tokens`.
        evaluator: what evaluates weights; by default this process, into the folder.
        task: what kind of model it is, with inputs of its own; by default as its ports say.

    Attributes:
        runner: runs the model.
        snapshots: writes it, for the runner and for other checks.
        why_not: why the model cannot be run here, once :meth:`start` has found a reason.
    """

    def __init__(
        self,
        folder: Path,
        entries: Mapping[str, str],
        *,
        run: bool = True,
        native: bool = True,
        context: int = 0,
        evaluator: Evaluator | None = None,
        task: Task | None = None,
    ) -> None:
        self.snapshots, self.runner = Snapshots(folder, evaluator), Runner(entries, native=native)
        self._in_floats = Runner({**entries, **_IN_FLOATS}, native=native)
        self._may_run, self._context = run, context
        self._task = task
        self._probe: Probe | None = None
        self._last: _Outputs | None = None
        self._first: Floats | None = None
        self.why_not: Fact | None = None

    def start(self, model: ir.Model) -> None:
        """Run the model as it came in.

        Raises:
            InputError: onnxruntime cannot load it, or cannot run it.
            VerificationError: it computes NaN or infinity to begin with.
        """
        task = self._task = self._task or task_of(model.graph)
        self.why_not = no_room_for(model) if self._may_run else NOT_ASKED()
        if self.why_not is not None:
            return
        try:
            self._first = self._run(model, self.runner)
            self._last = self._outputs_of(model, self._first)
        except InputError:
            raise
        except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
            raise InputError(f"onnxruntime cannot run the model as it came in: {error}") from error
        if not np.isfinite(self._first).all():
            raise VerificationError(
                f"the model computes NaN or infinite {task.quantity} before any pass", tensor=task.output
            )

    def check(self, model: ir.Model, name: str, effect: Effect) -> Check:
        """Run the model after the pass called ``name`` and compare.

        Inputs of products with codes may be rounded to a few bits: by onnxruntime, if session entries let it, by
        ``RoundActivations``, or by the product. A difference in the last place then becomes a step of 1/127 or more:
        where that may be why a model behind exact passes differs, both are run without. Lossy ones are measured by
        what will run.

        Raises:
            VerificationError: an exact pass moved what is compared, or any pass made it NaN or infinite.
        """
        if self._last is None or self._first is None:
            return self._not_covered(model, name)
        task, exact = self._task or task_of(model.graph), effect == "exact"
        after, probe = self._run(model, self.runner), self._probe_for(model)
        first, before = (probe.matching_rows(earlier, after) for earlier in (self._first, self._last.as_it_runs))
        if not np.isfinite(after).all():
            raise VerificationError(
                f"the {task.quantity} are NaN or infinite after a pass", node=name, tensor=task.output
            )
        outputs, figures = self._outputs_of(model, after), self._figures(model, first, before, after)
        if exact and not figures["largest_change"] <= TOLERANCE and (outputs.model or self._last.model):
            self._last, outputs = self._both_with_floats(self._last, outputs)
            assert self._last.in_floats is not None
            assert outputs.in_floats is not None
            before = probe.matching_rows(self._last.in_floats, outputs.in_floats)
            figures = self._figures(model, first, before, outputs.in_floats)
        change = figures["largest_change"]
        if exact and not change <= TOLERANCE:
            raise VerificationError(
                f"the pass {name} is exact, but it moved the {task.quantity} by {change:.1e} of the largest "
                f"(allowed: {TOLERANCE:.0e}); nothing was written",
                tensor=task.output,
                remedy="leave the pass out of the recipe, and report this with the model",
            )
        self._first, self._last = first, outputs
        return Check(
            name=task.quantity,
            after=name,
            status="measured",
            reason=RAN_BEFORE_AND_AFTER(tokens=probe.tokens),
            figures=figures,
        )

    def check_together(self, passes: Sequence[tuple[str, ir.Model]]) -> list[Check]:
        """Check exact passes that follow one another by one run, of the model behind the last of them.

        Where that fails, the model behind each is run, so that the pass at fault is named. Roundings of several passes
        may add up to more than one is allowed: each is judged by itself then.

        Args:
            passes: each with its name and the model behind it.

        Raises:
            VerificationError: as for :meth:`check`.
        """
        *_, (last, model) = passes
        try:
            check = self.check(model, last, "exact")
        except Exception:  # whatever it is, the pass at fault raises it again
            if len(passes) == 1:
                raise
            return [self.check(model_behind, name, "exact") for name, model_behind in passes]
        if check.status != "measured" or len(passes) == 1:
            return [check.model_copy(update={"after": name}) for name, _ in passes]
        reason = RAN_TOGETHER(tokens=self._probe_for(model).tokens, passes=[name for name, _ in passes])
        return [check.model_copy(update={"after": name, "reason": reason}) for name, _ in passes]

    def check_unchanged(self, model: ir.Model, name: str) -> Check:
        """Return the check of the pass called ``name``, which left ``model``, run before, as it was."""
        if self._last is None or self._first is None:
            return self._not_covered(model, name)
        figures = self._figures(model, self._first, self._last.as_it_runs, self._last.as_it_runs)
        quantity = (self._task or task_of(model.graph)).quantity
        return Check(name=quantity, after=name, status="measured", reason=SAME_GRAPH(), figures=figures)

    def _not_covered(self, model: ir.Model, name: str) -> Check:
        quantity = (self._task or task_of(model.graph)).quantity
        return Check(name=quantity, after=name, status="not covered", reason=self.why_not or NOT_STARTED())

    def _figures(self, model: ir.Model, first: Floats, before: Floats, after: Floats) -> dict[str, float]:
        return {
            "largest_change": _relative(before, after),
            "largest_change_from_start": _relative(first, after),
            **self._probe_for(model).figures(first, after),
        }

    def _outputs_of(self, model: ir.Model, after: Floats) -> _Outputs:
        """Return what a model computes; with a copy of it where it was not yet run with inputs in floats."""
        return _Outputs(after, None, model.clone()) if self._rounds(model) else _Outputs(after, after)

    def _both_with_floats(self, last: _Outputs, outputs: _Outputs) -> tuple[_Outputs, _Outputs]:
        """Return what two models compute with inputs in floats too: beside one another where there is room."""
        if last.model is None or outputs.model is None or not fit_beside(last.model, outputs.model):
            return self._with_floats(last), self._with_floats(outputs)
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(self._with_floats, last)
            with_floats = self._with_floats(outputs)
            return future.result(), with_floats

    def _with_floats(self, outputs: _Outputs) -> _Outputs:
        """Return what a model computes, with inputs in floats too."""
        if outputs.model is None:
            return outputs
        for node in _roundings(outputs.model):
            assert node.inputs[0] is not None
            bypass(node, node.inputs[0])
        for node in _rounding_products(outputs.model):
            node.attributes[_ACTIVATIONS] = ir.AttrString(_ACTIVATIONS, _NOT_ROUNDED)
        entries = _DECODE_ENTRIES if fit_as_floats(outputs.model) else NO_ENTRIES
        return dataclasses.replace(outputs, model=None, in_floats=self._run(outputs.model, self._in_floats, entries))

    def _rounds(self, model: ir.Model) -> bool:
        """Return whether inputs of products are rounded: as the graph says, or, as it does not say, by onnxruntime."""
        if _roundings(model) or _rounding_products(model):
            return True
        if self.runner.entries.get(ACCURACY_LEVEL, "0") == "0":
            return False
        readers = (dequantize_of(node) for node in coded_nodes(model.graph))
        return any(reader is not None and not reader.domain for reader in readers)

    def _run(self, model: ir.Model, runner: Runner, entries: Entries = NO_ENTRIES) -> Floats:
        """Run what will run of the model: codes that are still logical are packed in a copy, so that kernels run."""
        with _float32_inputs(model):
            self.snapshots.settle(model)
            with self.snapshots.write(lower_model(model)) as path:
                entries = {**entries_of_few_calls(packs=reads_codes(model.graph)), **entries}
                return self._probe_for(model).run(runner.open(path, in_place=True, entries=entries))

    def _probe_for(self, model: ir.Model) -> Probe:
        if self._probe is None:
            task = self._task or task_of(model.graph)
            self._probe = task.probe(model.graph, context=self._context)
        return self._probe


def _roundings(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, ROUND_ACTIVATIONS.name)]


def _rounding_products(model: ir.Model) -> list[ir.Node]:
    """Return the products with packed codes that round their inputs themselves."""
    return [
        node
        for node in model.graph
        if reads_packed(node) and node.attributes.get_string(_ACTIVATIONS, _NOT_ROUNDED) != _NOT_ROUNDED
    ]


@contextlib.contextmanager
def _float32_inputs(model: ir.Model) -> Iterator[None]:
    """Let ``MatMulNBits`` leave its inputs alone meanwhile.

    Rounding them to int8 turns a difference in the last place into one of 1/127, and what a rewrite did is lost in it.
    Where a pass made them round, that is what is measured.
    """
    nodes = [
        node
        for node in contrib_nodes(model.graph, "MatMulNBits")
        if _LEVEL in node.attributes and all(step.pass_name != AccuracyLevel.name for step in provenance.steps(node))
    ]
    levels = [node.attributes[_LEVEL] for node in nodes]
    for node in nodes:
        node.attributes[_LEVEL] = ir.AttrInt64(_LEVEL, _FLOAT32)
    try:
        yield
    finally:
        for node, level in zip(nodes, levels, strict=True):
            node.attributes[_LEVEL] = level


def context_tokens_of(passes: Sequence[Pass], max_positions: int | None) -> int:
    """Return how many tokens of context show what ``passes`` do, as far as the model has positions for them."""
    limit = LONGEST_CONTEXT if max_positions is None else max(0, min(LONGEST_CONTEXT, max_positions - LENGTH))
    return min(limit, max((step.context_tokens for step in passes), default=0))


def _relative(before: Floats, after: Floats) -> float:
    largest, change = float(np.abs(before).max()), float(np.abs(after - before).max())
    return change / largest if change else 0.0  # 0 / 0 where all outputs are zeros
