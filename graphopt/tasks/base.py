"""What kind of model a graph is: how it is recognized, fed, and compared with what it was."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import onnx_ir as ir
    import onnxruntime

    from graphopt.graph.diagnostics import Fact
    from graphopt.tasks.ports import Array, IntArray

TaskName = Literal["causal_lm", "encoder"]
"""The tasks, as a manifest names them."""

Floats = npt.NDArray[np.float64]

BATCH, LENGTH, PREFILL, PADDING = 2, 12, 8, 3
"""Rows of a probe, tokens of a row that are compared, those of them in the first of two calls, padding of one row."""


@dataclass(frozen=True)
class Call:
    """One call of a graph whose masks are asked for.

    Attributes:
        feeds: the inputs; caches have their length and no content, since a mask can depend on no more.
        length: new tokens.
        past: tokens that are in the cache already.
        real: bool [batch, past + length], which columns are tokens and not padding.
    """

    feeds: Mapping[str, Array]
    length: int
    past: int
    real: npt.NDArray[np.bool_]


class Probe(Protocol):
    """Random tokens on which a model is compared with what it was before a pass."""

    @property
    def tokens(self) -> Fact:
        """What is run, for reports."""

    @property
    def feeds(self) -> Mapping[str, Array]:
        """All tokens in one call without a cache, as the framework that the model comes from takes them."""

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """[batch, length]: which of the columns of :attr:`feeds` are compared."""

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return what the model computes for the tokens that are compared, [tokens, width]."""

    def aligned(self, before: Floats, after: Floats) -> Floats:
        """Return those rows of ``before`` that ``after`` still has."""

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return how far ``after`` is from the model before any pass, in this task's own measures."""


class Task(abc.ABC):
    """A kind of model.

    Attributes:
        name: what manifests call it.
        compared: what is compared before and after a pass, for reports.
        output: the graph output that holds it.
        caches: whether models of this kind may have caches of keys and values.
        why_no_genai: why onnxruntime-genai runs no model of this kind; ``None`` where it may.
    """

    name: ClassVar[TaskName]
    compared: ClassVar[str]
    output: ClassVar[str]
    caches: ClassVar[bool]
    why_no_genai: ClassVar[Fact | None] = None

    @abc.abstractmethod
    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """Return whether a graph with these input and output names is of this kind."""

    @abc.abstractmethod
    def check(self, graph: ir.Graph) -> None:
        """Refuse a graph that cannot be fed as this kind of model.

        Raises:
            InputError: a name is missing, or an input is not known.
        """

    @abc.abstractmethod
    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """Draw a probe that fits ``graph``; ``context`` is how many tokens fill the cache before anything is compared.

        Raises:
            InputError: see :meth:`check`.
        """

    @abc.abstractmethod
    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """Return what to feed for whole texts at once: int64 [batch, length], no padding, empty caches.

        Raises:
            InputError: see :meth:`check`.
        """

    @abc.abstractmethod
    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """Yield a call of each size (batch, new tokens, past), with padding where there are several rows.

        Raises:
            InputError: see :meth:`check`.
        """


def random_padding(batch: int, keys: int, random: np.random.Generator) -> IntArray:
    """Return an attention mask [batch, keys] with padding anywhere; in its first row only the last column is a token.

    A single sequence has none, so that its oldest keys, where a window would end, are seen.
    """
    mask = np.ones((batch, keys), np.int64)
    if batch > 1:
        mask = (random.random((batch, keys)) > 0.3).astype(np.int64)
        mask[0, : keys - 1] = 0
    return mask
