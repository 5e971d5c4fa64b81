"""torch's products, with x in the type of the weights: the time to convert x is not counted."""

from __future__ import annotations

from functools import partial

import numpy as np

from tools.bench.parts.engine import TOLERANCES, Engine, Workload, optional
from tools.bench.parts.problem import Array, Problem


def engines() -> list[Engine]:
    """Return bfloat16 and float32."""
    # y is rounded to bfloat16 too, which is half of the error.
    return [
        Engine("torch-bf16", TOLERANCES["bfloat16"], partial(_prepare, type_name="bfloat16")),
        Engine("torch-float", TOLERANCES["float32"], partial(_prepare, type_name="float32")),
    ]


def _prepare(problem: Problem, type_name: str) -> Workload:
    torch = optional("torch")
    torch.set_num_threads(problem.settings.memory.threads)
    dtype = getattr(torch, type_name)
    values = problem.weights.values
    size = values.size * dtype.itemsize
    copies = range(problem.copies(size))
    weights = [torch.from_numpy(problem.shuffle(values, copy)).to(dtype) for copy in copies]
    inputs = [torch.from_numpy(problem.x.copy()).to(dtype) for _ in copies]
    results: list[object] = [None for _ in copies]

    def run() -> None:
        with torch.inference_mode():
            for copy in copies:
                results[copy] = torch.nn.functional.linear(inputs[copy], weights[copy])

    def outputs() -> list[Array]:
        return [torch.as_tensor(y).float().numpy() for y in results]

    reference = inputs[0].double().numpy() @ weights[0].double().numpy().T
    activation_bytes = problem.case.rows * (problem.case.inner + problem.case.outer) * dtype.itemsize
    return Workload(run, outputs, np.asarray(reference, np.float64), size + activation_bytes)
