"""Any other graph: whatever no other task knows the ports of.

Inputs are fed at random from their types, named dimensions and readers (:mod:`graphopt.tasks.graph.draws`), or from
files that were given; outputs are compared one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.tasks.base import Probe, Task, upper
from graphopt.tasks.graph.probe import GraphProbe
from graphopt.tasks.graph.samples import Samples, cast_feeds
from graphopt.tasks.ports import port_of_value

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    import onnx_ir as ir
    import onnxruntime

    from graphopt.ort.runner import Runner
    from graphopt.tasks.ports import Array

NO_GENERATION = Rule("graph.no-text", "the graph makes no text, as onnxruntime-genai does")
QUALITY = Rule(
    "graph.quality",
    "{verdict}: cosine {cosine:.5f} and relative error {error:.2g} of the output that moved most, of {outputs}, on "
    "{samples}",
    same=", same class {same:.1%}",
)
RANDOM_STATISTICS = Rule(
    "graph.random-statistics",
    "statistics come from random inputs, which real ones may not be like; give some: --inputs FILE.npz",
)

RANDOM_SAMPLES = 8
"""Random samples that statistics are collected on; more say nothing more of real inputs."""


class GraphTask(Task):
    """A graph of any kind; the last that is tried.

    Args:
        inputs: a file or folder of inputs; ``None`` for random ones.
    """

    name: ClassVar[str] = "graph"
    noun: ClassVar[str] = "a graph"
    quantity: ClassVar[str] = "outputs"
    output: ClassVar[str] = ""
    is_fallback: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False
    reads: ClassVar[Literal["texts", "images", "recordings", "arrays"]] = "arrays"

    def __init__(self, inputs: Path | None = None) -> None:
        self.samples: Samples = Samples(inputs)

    def with_inputs(self, inputs: Path | None) -> Self:
        """Return the task with inputs of its own."""
        return type(self)(inputs)

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """Take any graph: no other task did."""
        del inputs, outputs
        return True

    def check(self, graph: ir.Graph) -> None:
        """Refuse a graph without outputs; whether it can be fed shows when it runs."""
        if not graph.outputs:
            raise InputError("the graph has no output")

    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """See :class:`graphopt.tasks.base.Task`; a graph of any kind has no context.

        Raises:
            InputError: no output is a tensor.
        """
        del context
        names = [value.name or "" for value in graph.outputs if port_of_value(value).dtype is not None]
        if not names:
            raise InputError("no output of the graph is a tensor of numbers, so nothing can be compared")
        return GraphProbe(graph, self.samples, names)

    def sample_feeds(self, model: ir.Model, runner: Runner, count: int) -> list[dict[str, Array]]:
        """See :class:`graphopt.tasks.base.Task`; of random inputs :data:`RANDOM_SAMPLES` are drawn at most."""
        if not self.samples.is_settled:
            with runner.open_model(model) as session:
                self.samples.settle(model.graph, session)
        return self.samples.feeds(model.graph, min(count, RANDOM_SAMPLES) if self.samples.is_random else count)

    def first_sample(self, graph: ir.Graph, session: onnxruntime.InferenceSession) -> dict[str, Array]:
        """See :class:`graphopt.tasks.base.Task`."""
        self.samples.settle(graph, session)
        return cast_feeds(self.samples.feeds(graph, 1)[0], session)

    def inputs_note(self) -> Fact | None:
        """Say that inputs were random, where they were."""
        return RANDOM_STATISTICS() if self.samples.is_random else None

    def why_no_genai(self) -> Fact:
        """See :class:`graphopt.tasks.base.Task`."""
        return NO_GENERATION()

    def print_evaluation(self, model: Any, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
        """Refuse: texts say nothing of a graph that reads none.

        Raises:
            InputError: always; it names the command that compares graphs.
        """
        del reference, text, threads, as_json
        raise InputError(
            f"{self.noun} reads no text", file=model.file, remedy="`graphopt quality BEFORE AFTER` compares its outputs"
        )

    def measure_quality(self, reference: Any, artifact: Path, **reading: Any) -> dict[str, float]:
        """Compare outputs on the inputs of the task, or on random ones."""
        figures: dict[str, float] = upper("graphopt.quality.graphs:graph_quality")(
            reference, artifact, self.samples, **reading
        )
        return figures

    def describe_quality(self, verdict: str, figures: Mapping[str, float]) -> Fact:
        """See :class:`graphopt.tasks.base.Task`."""
        samples = f"{figures['samples']:.0f} {'draws of random inputs' if figures['is_random'] else 'samples'}"
        return QUALITY(
            verdict=verdict,
            cosine=figures["cosine_mean"],
            error=figures["relative_error"],
            outputs=int(figures["outputs"]),
            samples=samples,
            same=figures.get("same_class_share"),
        )


GRAPH = GraphTask()
