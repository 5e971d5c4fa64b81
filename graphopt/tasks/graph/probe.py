"""How two graphs of any kind are compared: both run on the same samples, output by output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.ort.session import run
from graphopt.tasks.graph.outputs import Output, differences, figures_of, outputs_of
from graphopt.tasks.graph.samples import Samples, cast_feeds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir
    import onnxruntime

    from graphopt.graph.diagnostics import Fact
    from graphopt.tasks.base import Floats
    from graphopt.tasks.ports import Array

_TIES = 1e-3
SAMPLES = 2
"""Samples on which a graph is compared with what it was before a pass."""


class GraphProbe:
    """Samples of the inputs of a graph, and its outputs as one row of numbers.

    Each output is divided by its largest number in the first run, so that none is lost beside a larger one.

    Args:
        graph: the graph as it came in.
        samples: what it is fed.
        outputs: the names of the outputs that are compared.
    """

    def __init__(self, graph: ir.Graph, samples: Samples, outputs: Sequence[str]) -> None:
        self._graph, self._samples, self._names = graph, samples, list(outputs)
        self._first: list[dict[str, Output]] = []
        self._largest: dict[str, float] = {}

    @property
    def tokens(self) -> Fact:
        """See :class:`graphopt.tasks.base.Probe`."""
        return self._samples.description(self._samples.feeds(self._graph, SAMPLES))

    @property
    def feeds(self) -> Mapping[str, Array]:
        """The first sample; the graph ran before."""
        return self._samples.feeds(self._graph, 1)[0]

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """See :class:`graphopt.tasks.base.Probe`; the outputs are one row."""
        return np.ones(1, bool)

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return all outputs of all samples, [1, numbers].

        Raises:
            InputError: the graph cannot be fed, see :meth:`Samples.settle`, or has no output that can be compared.
        """
        self._samples.settle(self._graph, session)
        feeds = self._samples.feeds(self._graph, SAMPLES)
        runs = [outputs_of(run(session, self._names, cast_feeds(sample, session)), self._names) for sample in feeds]
        if not self._first:
            if not runs[0]:
                raise InputError("no output is a tensor of numbers, so nothing can be compared")
            self._first = runs
            self._largest = {name: max(_largest(item[name]) for item in runs) for name in runs[0]}
        parts = [
            _numbers(item.get(name), output) / self._largest[name]
            for item, first in zip(runs, self._first, strict=True)
            for name, output in first.items()
        ]
        row: Floats = np.concatenate(parts)[None]
        return row

    def matching_rows(self, before: Floats, after: Floats) -> Floats:
        """Return ``before``: the outputs are one row."""
        del after
        return before

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return how far each output is from that of the graph before any pass."""
        return figures_of(differences(self._unpack(first), self._unpack(after)))

    def _unpack(self, row: Floats) -> list[dict[str, Output]]:
        """Return the outputs that a row of :meth:`run` is made of."""
        start, runs = 0, []
        for item in self._first:
            outputs: dict[str, Output] = {}
            for name, output in item.items():
                size = output.vector().size
                numbers = row[0, start : start + size] * self._largest[name]
                is_whole = size == output.numbers.size
                outputs[name] = Output(numbers.reshape(output.numbers.shape) if is_whole else numbers, output.is_exact)
                start += size
            runs.append(outputs)
        return runs


def _numbers(output: Output | None, first: Output) -> Floats:
    """Return the numbers of an output, in the shape of the first run.

    A few integers that differ, such as the largest of classes that are all but equal, count as the same.
    """
    numbers = first.vector()
    if output is None:
        return np.zeros_like(numbers)
    new = output.vector(first.numbers.shape)
    return numbers if first.is_exact and (numbers != new).mean() <= _TIES else new


def _largest(output: Output) -> float:
    finite = np.abs(output.numbers[np.isfinite(output.numbers)])
    return float(finite.max(initial=0)) or 1.0
