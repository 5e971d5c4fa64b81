"""The exported graph against transformers' own forward: the same tokens must give the same numbers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.checks.equivalence import TOLERANCE
from graphopt.errors import GraphoptError, MissingDependencyError, VerificationError
from graphopt.facts import Check, Fact, Rule, Status
from graphopt.memory import available_memory
from graphopt.models.checkpoint import import_export_packages, quiet
from graphopt.running import Runner
from graphopt.runtime import import_onnxruntime
from graphopt.tasks import Probe, Task, task_of
from graphopt.tasks.base import Floats

AGREES = Rule("agreement.ran", "{tokens} in onnxruntime, in one call without a cache in torch")
NO_MEMORY = Rule("agreement.no-memory", "no memory to run a model of {size_gb:.1f} GB beside torch's copy")
NO_RUNTIME = Rule("agreement.no-onnxruntime", "{error}")


def check_agreement(model: Any, program: ir.Model) -> Check:
    """Run ``program`` in onnxruntime, with padding and any cache, and ``model`` in torch on the same random tokens.

    Args:
        model: a model of transformers.
        program: the graph that was exported from it.

    Returns:
        The largest difference of what its task compares, relative to the largest number, or why there is none.

    Raises:
        VerificationError: they differ by more than :data:`graphopt.checks.equivalence.TOLERANCE`.
    """
    try:
        import_onnxruntime()
    except MissingDependencyError as error:
        return _check("not covered", NO_RUNTIME(error=str(error)))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if 2 * size > available_memory():
        return _check("not covered", NO_MEMORY(size_gb=size / 1e9))
    task = task_of(program.graph)
    probe = task.probe(program.graph)
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        path = Path(folder) / "model.onnx"
        ir.save(program, path, external_data="model.onnx.data")
        try:
            got = probe.run(Runner().open(path))
        except GraphoptError:
            raise
        except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
            raise VerificationError(
                f"onnxruntime cannot run the exported graph of {type(model).__name__}: {error}; nothing was written",
                remedy="please report it: the exporter of transformers writes what onnxruntime does not take",
            ) from error
    expected = _forward(model, task, probe)
    difference = float(np.abs(got - expected).max() / np.abs(expected).max())
    if not difference <= TOLERANCE:
        raise VerificationError(
            f"the exported graph does not compute what transformers does: its {task.compared} are off by "
            f"{difference:.1e} of the largest (allowed: {TOLERANCE:.0e}); nothing was written",
            tensor=task.output,
            remedy=f"please report it: {type(model).__name__} is exported wrongly",
        )
    return _check("measured", AGREES(tokens=probe.tokens), largest_change=difference)


def _check(status: Status, reason: Fact, **figures: float) -> Check:
    return Check(name="agrees with transformers", after="export", status=status, reason=reason, figures=figures)


def _forward(model: Any, task: Task, probe: Probe) -> Floats:
    """Return what torch computes for the real tokens, float64 [tokens, width], in one forward without a cache."""
    torch, _ = import_export_packages()
    more = {"use_cache": False} if task.caches else {}
    with torch.no_grad(), quiet():
        output = model(**{name: torch.from_numpy(array) for name, array in probe.feeds.items()}, **more)
    found: Floats = getattr(output, task.output).numpy()[probe.real].astype(np.float64)
    return found
