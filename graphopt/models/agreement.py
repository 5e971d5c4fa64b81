"""The exported graph against transformers' own forward: the same tokens must give the same logits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.analysis.interface import Interface
from graphopt.checks.equivalence import TOLERANCE, Probe, run_probe
from graphopt.errors import MissingDependencyError, VerificationError
from graphopt.facts import Check, Fact, Rule, Status
from graphopt.memory import available_memory
from graphopt.models.checkpoint import import_export_packages, quiet
from graphopt.runtime import import_onnxruntime

AGREES = Rule(
    "agreement.ran", "random tokens with padding; onnxruntime in two calls with a cache, torch in one without"
)
NO_MEMORY = Rule("agreement.no-memory", "no memory to run a model of {size_gb:.1f} GB beside torch's copy")
NO_RUNTIME = Rule("agreement.no-onnxruntime", "{error}")


def check_agreement(model: Any, program: ir.Model) -> Check:
    """Run ``program`` in onnxruntime, with padding and a cache, and ``model`` in torch on the same random tokens.

    Args:
        model: a causal language model of transformers.
        program: the graph that was exported from it.

    Returns:
        The largest difference of the logits relative to the largest logit, or why there is none.

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
    interface = Interface.of_graph(program.graph)
    probe = Probe.of(interface)
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        path = Path(folder) / "model.onnx"
        ir.save(program, path, external_data="model.onnx.data")
        got = run_probe(path, probe, {})
    expected = _forward(model, probe, positions="position_ids" in interface.inputs)
    difference = float(np.abs(got - expected).max() / np.abs(expected).max())
    if not difference <= TOLERANCE:
        raise VerificationError(
            f"the exported graph does not compute what transformers does: its logits are off by {difference:.1e} of "
            f"the largest (allowed: {TOLERANCE:.0e}); nothing was written",
            tensor="logits",
            remedy=f"please report it: {type(model).__name__} is exported wrongly",
        )
    return _check("measured", AGREES(), largest_change=difference)


def _check(status: Status, reason: Fact, **figures: float) -> Check:
    return Check(name="agrees with transformers", after="export", status=status, reason=reason, figures=figures)


def _forward(model: Any, probe: Probe, *, positions: bool) -> npt.NDArray[np.float64]:
    """Return the logits of the real tokens, float64 [tokens, vocabulary], in one forward without a cache."""
    torch, _ = import_export_packages()
    mask = probe.attention_mask
    inputs = {"input_ids": probe.input_ids, "attention_mask": mask}
    if positions:
        inputs["position_ids"] = np.maximum(mask.cumsum(-1) - 1, 0)
    with torch.no_grad(), quiet():
        output = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}, use_cache=False)
    logits: npt.NDArray[np.float64] = output.logits.numpy()[mask.astype(bool)].astype(np.float64)
    return logits
