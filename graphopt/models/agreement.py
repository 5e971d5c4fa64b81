"""The exported graph against transformers' own forward: the same tokens must give the same numbers."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphopt.errors import GraphoptError, MissingDependencyError, VerificationError
from graphopt.graph.diagnostics import Check, Fact, Rule, Status
from graphopt.graph.weights.data_file import save_model
from graphopt.models.checkpoint import import_export_packages, quiet
from graphopt.ort.runner import Runner
from graphopt.ort.session import import_onnxruntime, run
from graphopt.tasks import Probe, Task, task_of
from graphopt.util.memory import available_memory
from graphopt.verification.equivalence import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import onnx_ir as ir
    import onnxruntime

    from graphopt.tasks.base import Floats
    from graphopt.tasks.ports import Array

T = TypeVar("T")

MAIN = ""
"""The name of the graph of a model that makes its result."""

AGREES = Rule("agreement.ran", "{tokens} in onnxruntime, in one call without a cache in torch")
NO_MEMORY = Rule("agreement.no-memory", "no memory to run a model of {size_gb:.1f} GB beside torch's copy")
NOT_REQUESTED = Rule("agreement.skipped", "it was not asked for")
NO_RUNTIME = Rule("agreement.no-onnxruntime", "{error}")


def check_agreement(load: Callable[[], Any], programs: Mapping[str, ir.Model], config: Any = None) -> Check:
    """Run the graphs of a model in onnxruntime, with padding and any cache, and torch on the same random tokens.

    One runs after the other, so that memory holds one of them at a time.

    Args:
        load: returns the model of transformers, with its weights.
        programs: the graphs that were exported from it, the last as :data:`MAIN`; what the others make goes there.
        config: the configuration of transformers of the model, where there is one.

    Returns:
        The largest difference of what its task compares, relative to the largest number, or why there is none.

    Raises:
        VerificationError: they differ by more than :data:`graphopt.verification.equivalence.TOLERANCE`.
    """
    try:
        import_onnxruntime()
    except MissingDependencyError as error:
        return not_covered(NO_RUNTIME(error=str(error)))
    weights = (value.const_value for program in programs.values() for value in program.graph.initializers.values())
    size = sum(weight.nbytes for weight in weights if weight)
    if 2 * size > available_memory():
        return not_covered(NO_MEMORY(size_gb=size / 1e9))
    program = programs[MAIN]
    # Not the shared one: what is found of inputs that this graph takes is none of the next graph.
    task = task_of(program.graph).with_inputs(None)
    parts = {name: part.graph for name, part in programs.items() if name != MAIN}

    def run_part(name: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        with _open(programs[name]) as session:
            names = [port.name for port in session.get_outputs()]
            return dict(zip(names, _run(functools.partial(run, session, names, feeds)), strict=True))

    probe = task.probe_behind(program.graph, parts, run_part, config)
    with _open(program) as session:
        output = _run(lambda: probe.run(session))
    model = load()
    reference = _forward(model, task, probe).reshape(output.shape)
    difference = _difference(output, reference)
    if not difference <= TOLERANCE:
        if task.caches and not parts and _difference(output, _forward_of_batch(model, task, probe)) <= TOLERANCE:
            raise VerificationError(
                f"{type(model).__name__} of transformers gives a text with padding in front of it other logits than "
                f"the text alone, off by {difference:.1e} of the largest; nothing was written",
                tensor=task.output,
                remedy="its positions count padding, and it takes no position_ids that would say otherwise",
            )
        raise VerificationError(
            f"the exported graph does not compute what transformers does: its {task.quantity} are off by "
            f"{difference:.1e} of the largest (allowed: {TOLERANCE:.0e}); nothing was written",
            tensor=task.output,
            remedy=f"please report it: {type(model).__name__} is exported wrongly",
        )
    return _check("measured", AGREES(tokens=probe.tokens), largest_change=difference)


def _difference(output: Floats, reference: Floats) -> float:
    """Return the largest difference, relative to the largest number of the reference."""
    return float(np.abs(output - reference).max() / np.abs(reference).max())


def _forward_of_batch(model: Any, task: Task, probe: Probe) -> Floats:
    """Return what torch computes for real tokens beside their padding, float64 [tokens, width], without a cache."""
    return _call(model, task, probe.feeds)[probe.real].astype(np.float64)


@contextlib.contextmanager
def _open(program: ir.Model) -> Iterator[onnxruntime.InferenceSession]:
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        path = Path(folder) / "model.onnx"
        save_model(program, path, "model.onnx.data")
        yield _run(lambda: Runner().open(path))


def _run(call: Callable[[], T]) -> T:
    try:
        return call()
    except GraphoptError:
        raise
    except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
        raise VerificationError(
            f"onnxruntime cannot run the exported graph: {error}; nothing was written",
            remedy="please report it: the exporter of transformers writes what onnxruntime does not take",
        ) from error


def not_covered(reason: Fact) -> Check:
    """Return the check that did not run, for a reason."""
    return _check("not covered", reason)


def _check(status: Status, reason: Fact, **figures: float) -> Check:
    return Check(name="agrees with transformers", after="export", status=status, reason=reason, figures=figures)


def _forward(model: Any, task: Task, probe: Probe) -> Floats:
    """Return what torch computes for the real tokens, float64 [tokens, width], without a cache.

    A causal language model is given each row alone, without its padding: some recurrences of transformers read it.
    """
    if not task.caches or task.parts:
        return _call(model, task, probe.feeds)[probe.real].astype(np.float64)
    rows = []
    for row, columns in enumerate(probe.real):
        feeds = {name: np.ascontiguousarray(array[row : row + 1, columns]) for name, array in probe.feeds.items()}
        rows.append(_call(model, task, feeds)[0])
    return np.concatenate(rows).astype(np.float64)


def _call(model: Any, task: Task, feeds: Mapping[str, Array]) -> Array:
    """Return what is compared of one forward, without a cache."""
    torch, _ = import_export_packages()
    options = {"use_cache": False} if task.caches else {}
    with torch.no_grad(), quiet():
        inputs = task.framework_inputs(model, feeds)
        output = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}, **options)
    return task.framework_output(output)
