"""What an engine is to the benchmark: a name, and something to call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tools.bench.parts.problem import Array, Problem
from tools.bench.parts.unavailable import UnavailableError


class AnyProblem(Protocol):
    """What there is to compute: products, say, or attention."""

    @property
    def case(self) -> Hashable:
        """What a row of the report is about; as text, the title of its table."""

    def of_copy(self, reference: Array, copy: int) -> Array:
        """Return what ``copy`` must compute, where copy 0 must compute ``reference``."""


P = TypeVar("P", bound=AnyProblem)


@dataclass(frozen=True)
class Workload:
    """An engine that is ready to compute a problem.

    Attributes:
        run: computes every copy once.
        outputs: y of every copy, as the last run left it.
        reference: y of copy 0 in float64, from the very weights that the engine holds.
        bytes: what one product must read and write: weights with their scales, x and y.
        keep: what must live as long as the engine: buffers that a runtime only points to.
    """

    run: Callable[[], object]
    outputs: Callable[[], Sequence[Array]]
    reference: Array
    bytes: int
    keep: object = None

    @property
    def copies(self) -> int:
        """How many products a run computes."""
        return len(self.outputs())


@dataclass(frozen=True)
class AnyEngine(Generic[P]):
    """One way to compute the cases of a sort of problem.

    Attributes:
        name: what the table, the JSON file and ``--engines`` call it.
        tolerance: the largest relative error, by norms, that rounding as it says can explain.
        prepare: makes it ready for a problem, or raises :class:`UnavailableError`.
        kind: the kind of case that it computes.
        default: whether it takes part where no engine is named.
    """

    name: str
    tolerance: float
    prepare: Callable[[P], Workload]
    kind: str = "product"
    default: bool = field(default=True, compare=False)


Engine = AnyEngine[Problem]
"""One way to compute a product or a transform."""


# Relative to the norm of y, for x that is normally distributed: half a step, uniformly distributed, of a group whose
# largest number stands at 2.5 (a group of 32) to 4 (a row of 11008) standard deviations; and a half as much again.
TOLERANCES = {"float32": 3e-6, "bfloat16": 5e-3, "int16": 1e-4, "int8": 1.5e-2, "int4": 2.5e-1}


def check(engine: AnyEngine[P], workload: Workload, problem: P) -> float:
    """Run ``workload`` once and return its largest relative error; an engine that computes something else cannot win.

    Raises:
        UnavailableError: an error is larger than the engine's tolerance, or not a number.
    """
    workload.run()
    norm = float(np.linalg.norm(workload.reference))
    worst = 0.0
    for copy, y in enumerate(workload.outputs()):
        reference = problem.of_copy(workload.reference, copy)
        error = float(np.linalg.norm(np.asarray(y, np.float64).reshape(reference.shape) - reference)) / norm
        if not error <= engine.tolerance:
            raise UnavailableError(
                f"wrong: copy {copy} has a relative error of {error:.1e}, over {engine.tolerance:.1e}"
            )
        worst = max(worst, error)
    return worst


def optional(module: str, *, package: str | None = None) -> Any:
    """Import a module that the benchmark can do without.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"{package or module} is not installed: {error}") from error
