"""What a graph is fed: inputs that were given, or random ones whose sizes were found out by running it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.ort.session import run
from graphopt.tasks.graph.draws import RandomInputs, Sizes
from graphopt.tasks.graph.files import read_samples
from graphopt.tasks.ports import port_of_node, port_of_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import onnx_ir as ir
    import onnxruntime

    from graphopt.tasks.ports import Array

RANDOM = Rule("graph.random-inputs", "{samples} draws of random inputs, {shapes}")
FILE_INPUTS = Rule("graph.given-inputs", "{samples} samples of {file}, {shapes}")

_ATTEMPTS_SHOWN = 300
_ATTEMPTS_WITHOUT_NUMBERS = 8
"""Sizes with which a graph computes zeros alone, or NaN, before the first of them is taken."""


@dataclass
class Samples:
    """The inputs of a graph, sample by sample.

    Attributes:
        file: where they were given; ``None`` for random ones.
        arrays: what was read there.
        sizes: of the dimensions that vary, as random inputs have them, once the graph ran with them.
    """

    file: Path | None = None
    arrays: list[dict[str, Array]] = field(default_factory=list)
    sizes: Sizes | None = None

    @property
    def is_random(self) -> bool:
        """Whether nothing was given."""
        return self.file is None

    @property
    def is_settled(self) -> bool:
        """Whether it is known what to feed."""
        return bool(self.arrays) or self.sizes is not None

    def settle(self, graph: ir.Graph, session: onnxruntime.InferenceSession) -> None:
        """Read what was given, or find sizes with which the graph runs.

        Args:
            graph: its inputs and their readers are looked at.
            session: runs it.

        Raises:
            InputError: what was given does not fit; or the graph runs with no sizes that were tried: passes on what
                onnxruntime said.
        """
        if self.file is not None and not self.arrays:
            self.arrays = read_samples(self.file, [port_of_value(value) for value in graph.inputs])
        if self.is_settled:
            return
        inputs, failure = RandomInputs.of_graph(graph), ""
        without_numbers: list[Sizes] = []
        for sizes in inputs.sizes():
            try:
                results = run(session, None, cast_feeds(inputs.draw(sizes, 0), session), is_attempt=True)
            except Exception as error:  # whatever onnxruntime raises where an operator refuses a shape
                failure = failure or f"{_words(inputs.draw(sizes, 0))}: {str(error)[:_ATTEMPTS_SHOWN]}"
                continue
            tensors: list[Any] = [result for result in results if hasattr(result, "size")]
            if not all(tensor.size for tensor in tensors):
                failure = failure or f"{_words(inputs.draw(sizes, 0))}: an output is empty"
                continue
            if _has_numbers(tensors):
                self.sizes = sizes
                return
            without_numbers.append(sizes)
            if len(without_numbers) == _ATTEMPTS_WITHOUT_NUMBERS:
                break
        if without_numbers:
            self.sizes = without_numbers[0]
            return
        raise InputError(
            f"the graph runs with none of the random inputs that were tried; the first were {failure}",
            remedy="give inputs that it takes: --inputs FILE.npz",
        )

    def feeds(self, graph: ir.Graph, count: int) -> list[dict[str, Array]]:
        """Return the first ``count`` samples; :meth:`settle` was called before."""
        if self.file is not None:
            return self.arrays[:count]
        assert self.sizes is not None
        inputs = RandomInputs.of_graph(graph)
        return [inputs.draw(self.sizes, seed) for seed in range(count)]

    def description(self, feeds: Sequence[Mapping[str, Array]]) -> Fact:
        """Return what is run, for reports."""
        shapes = _words(feeds[0])
        if self.file is None:
            return RANDOM(samples=len(feeds), shapes=shapes)
        return FILE_INPUTS(samples=len(feeds), file=self.file.name, shapes=shapes)


def cast_feeds(feeds: Mapping[str, Array], session: onnxruntime.InferenceSession) -> dict[str, Array]:
    """Return inputs in the types that a session takes, which a pass may have changed, and without those it has not."""
    ports: dict[str, Any] = {node.name: port_of_node(node).dtype for node in session.get_inputs()}
    return {
        name: np.ascontiguousarray(array if ports[name] is None else array.astype(ports[name], copy=False))
        for name, array in feeds.items()
        if name in ports
    }


def _has_numbers(tensors: Sequence[Any]) -> bool:
    """Return whether floats came out that can be compared: all of them finite, and some of them not zero."""
    floats = [tensor for tensor in tensors if getattr(tensor, "dtype", np.dtype(int)).kind == "f"]
    is_finite = all(np.isfinite(tensor).all() for tensor in floats)
    return is_finite and (not floats or any(tensor.any() for tensor in floats))


def _words(feeds: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} [{', '.join(map(str, array.shape))}]" for name, array in feeds.items())
