"""Hadamard transforms, and the plain copy of the same bytes that they are measured by."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.numerics.rotations import HadamardRotation
from tools.bench.parts.engine import TOLERANCES, Engine, Workload
from tools.bench.parts.graphopt_engines import hadamard_pair, open_copies, operator
from tools.bench.parts.problem import Problem, aligned_copy

_COPIES = 2


def engines() -> list[Engine]:
    """Return the operator, and a copy by as many threads."""
    return [
        Engine("graphopt-hadamard", TOLERANCES["float32"], _hadamard, kind="transform"),
        Engine("copy", 0.0, _copy, kind="transform"),
    ]


def _hadamard(problem: Problem) -> Workload:
    pair = hadamard_pair(problem.case.inner)

    def make(x: ir.Value, _: int) -> list[ir.Node]:
        return [operator("Hadamard").node([x, *pair])]

    bound = open_copies(problem, _COPIES, problem.case.outer, make)
    reference = HadamardRotation(problem.case.inner, None).apply(problem.x.astype(np.float64), -1)
    return Workload(bound.run, bound.outputs, reference, problem.bytes_of_activations)


def _copy(problem: Problem) -> Workload:
    sources = [aligned_copy(problem.x) for _ in range(_COPIES)]
    targets = [aligned_copy(np.zeros_like(problem.x)) for _ in range(_COPIES)]

    def run() -> None:
        for source, target in zip(sources, targets, strict=True):
            problem.settings.memory.seconds(target.ctypes.data, source.ctypes.data, source.nbytes)

    return Workload(run, lambda: targets, problem.x.astype(np.float64), problem.bytes_of_activations)
