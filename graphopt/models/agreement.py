"""The exported graph against transformers' own forward: the same tokens must give the same numbers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import GraphoptError, MissingDependencyError, VerificationError
from graphopt.graph.diagnostics import Check, Fact, Rule, Status
from graphopt.graph.weights.data_file import save_model
from graphopt.models.checkpoint import import_export_packages, quiet
from graphopt.ort.runner import Runner
from graphopt.ort.session import import_onnxruntime
from graphopt.tasks import Probe, Task, task_of
from graphopt.util.memory import available_memory
from graphopt.verification.equivalence import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from graphopt.tasks.base import Floats

AGREES = Rule("agreement.ran", "{tokens} in onnxruntime, in one call without a cache in torch")
NO_MEMORY = Rule("agreement.no-memory", "no memory to run a model of {size_gb:.1f} GB beside torch's copy")
NOT_REQUESTED = Rule("agreement.skipped", "it was not asked for")
NO_RUNTIME = Rule("agreement.no-onnxruntime", "{error}")


def check_agreement(load: Callable[[], Any], program: ir.Model) -> Check:
    """Run ``program`` in onnxruntime, with padding and any cache, and a model in torch on the same random tokens.

    One runs after the other, so that memory holds one of them at a time.

    Args:
        load: returns the model of transformers, with its weights.
        program: the graph that was exported from it.

    Returns:
        The largest difference of what its task compares, relative to the largest number, or why there is none.

    Raises:
        VerificationError: they differ by more than :data:`graphopt.verification.equivalence.TOLERANCE`.
    """
    try:
        import_onnxruntime()
    except MissingDependencyError as error:
        return not_covered(NO_RUNTIME(error=str(error)))
    size = sum(value.const_value.nbytes for value in program.graph.initializers.values() if value.const_value)
    if 2 * size > available_memory():
        return not_covered(NO_MEMORY(size_gb=size / 1e9))
    task = task_of(program.graph)
    probe = task.probe(program.graph)
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        path = Path(folder) / "model.onnx"
        save_model(program, path, "model.onnx.data")
        try:
            output = probe.run(Runner().open(path))
        except GraphoptError:
            raise
        except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
            raise VerificationError(
                f"onnxruntime cannot run the exported graph: {error}; nothing was written",
                remedy="please report it: the exporter of transformers writes what onnxruntime does not take",
            ) from error
    model = load()
    reference = _forward(model, task, probe)
    difference = float(np.abs(output - reference).max() / np.abs(reference).max())
    if not difference <= TOLERANCE:
        raise VerificationError(
            f"the exported graph does not compute what transformers does: its {task.quantity} are off by "
            f"{difference:.1e} of the largest (allowed: {TOLERANCE:.0e}); nothing was written",
            tensor=task.output,
            remedy=f"please report it: {type(model).__name__} is exported wrongly",
        )
    return _check("measured", AGREES(tokens=probe.tokens), largest_change=difference)


def not_covered(reason: Fact) -> Check:
    """Return the check that did not run, for a reason."""
    return _check("not covered", reason)


def _check(status: Status, reason: Fact, **figures: float) -> Check:
    return Check(name="agrees with transformers", after="export", status=status, reason=reason, figures=figures)


def _forward(model: Any, task: Task, probe: Probe) -> Floats:
    """Return what torch computes for the real tokens, float64 [tokens, width], in one forward without a cache."""
    torch, _ = import_export_packages()
    options = {"use_cache": False} if task.caches else {}
    with torch.no_grad(), quiet():
        output = model(**{name: torch.from_numpy(array) for name, array in probe.feeds.items()}, **options)
    numbers: Floats = task.framework_output(output)[probe.real].astype(np.float64)
    return numbers
