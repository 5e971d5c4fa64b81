"""Before and after, once more: what an artifact's manifest says was proved, checked again from the two files alone.

The passes between the two are run again on BEFORE. Where a rotation is the last of them, the checker compares it with
what AFTER really holds; where lossy passes follow, the certificate is made anew on the way, and AFTER must be what the
recipe makes of BEFORE, every stored number of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass
from pydantic import BaseModel

from graphopt import artifact as artifacts
from graphopt.artifact import Artifact
from graphopt.checks.equivalence import Verifier, context_of, prove
from graphopt.errors import InputError, VerificationError
from graphopt.facts import Check, Rule
from graphopt.progress import Progress, silent
from graphopt.recipe import Recipe

SAME_AGAIN = Rule(
    "replay.same", "the recipe, run again on the model before, makes every node and every stored number of this one"
)


class Proof(BaseModel):
    """What was found, check by check; none of them failed."""

    checks: list[Check]


def verify(before: str | Path, after: str | Path, *, run: bool = True, on_stage: Progress = silent) -> Proof:
    """Check that ``after`` computes what ``before`` computes, as far as its recipe says it should.

    Args:
        before: the artifact, or ``.onnx`` file, that ``after`` was made from.
        after: an artifact that :func:`graphopt.optimize` wrote.
        run: whether to run both as well, where they fit into memory.
        on_stage: called when a stage begins, with how many are done.

    Raises:
        InputError: one cannot be read, or ``after`` does not say that it was made from ``before``.
        VerificationError: a check failed; names the first node and tensor at fault.
    """
    first, last = artifacts.read(before), artifacts.read(after)
    recipe = _recipe_between(first, last, Path(after))
    passes = recipe.passes()
    recorded = last.manifest.passes[len(first.manifest.passes) :]
    total, checks = len(passes) + 1, []
    graph = first.model.clone()
    for done, (step, report) in enumerate(zip(passes, recorded, strict=True)):
        on_stage(f"running {step.name} again", done, total)
        previous = graph.clone()
        step(graph)
        if report.claims is not None:
            on_stage(f"proving {step.name}", done, total)
            final = done == len(passes) - 1
            checks.append(prove(previous, last.model if final else graph, report.claims, step.name))
    if not recorded or recorded[-1].claims is None:
        NameFixPass()(graph)
        checks.append(_same_model(graph, last.model))
    on_stage("running both models", total - 1, total)
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        # with the bodies that the file carries: our own kernels would not show that one of them is another
        context = context_of(passes, first.manifest.model.max_positions)
        verifier = Verifier(Path(folder), recipe.session_entries(), run=run, native=False, context=context)
        verifier.start(first.model.clone())
        lossy = any(step.effect == "lossy" for step in passes)
        checks.append(verifier.check(last.model.clone(), "the recipe", "lossy" if lossy else "exact"))
    return Proof(checks=checks)


def _recipe_between(first: Artifact, last: Artifact, file: Path) -> Recipe:
    """Return the recipe that made ``last`` of ``first``."""
    done, all_done = ([report.name for report in made.manifest.passes] for made in (first, last))
    if last.manifest.recipe is None:
        raise InputError(
            "its manifest has no recipe, so it does not say how it was made",
            file=file,
            remedy="give BEFORE and then AFTER, a folder that `graphopt optimize` wrote",
        )
    recipe = Recipe.model_validate(last.manifest.recipe)
    if [*done, *(step.step for step in recipe.steps)] != all_done:
        raise InputError(
            f"it went through {', '.join(all_done) or 'no pass'}, which is not what its recipe {recipe.name} does "
            f"after {', '.join(done) or 'no pass'}",
            file=file,
            remedy="give the artifact that it was made from as BEFORE",
        )
    return recipe


def _same_model(made: ir.Model, stored: ir.Model) -> Check:
    """Confirm that ``stored`` is ``made``, node by node and number by number."""
    ours, theirs = ([_signature(node) for node in model.graph] for model in (made, stored))
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            raise VerificationError("the recipe, run again, makes another node here", node=other[0])
    weights, found = made.graph.initializers, stored.graph.initializers
    if len(ours) != len(theirs) or set(weights) != set(found):
        odd = sorted(set(weights) ^ set(found))
        raise VerificationError(
            "the recipe, run again, makes another number of nodes or weights", tensor=odd[0] if odd else None
        )
    for key in found:
        tensors = [values[key].const_value for values in (weights, found)]
        a, b = (tensor.numpy() for tensor in tensors if tensor is not None)
        if a.dtype != b.dtype or a.shape != b.shape or not np.array_equal(_bytes(a), _bytes(b)):
            raise VerificationError(
                "the recipe, run again, makes other numbers of this weight",
                tensor=key,
                shape=list(b.shape),
                remedy="was it changed after it was made, or made with other versions? see `versions` in its manifest",
            )
    return Check(
        name="replay",
        after="the recipe",
        status="proved",
        reason=SAME_AGAIN(),
        figures={"nodes": len(ours), "tensors": len(found)},
    )


def _bytes(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.atleast_1d(np.ascontiguousarray(array)).view(np.uint8)


def _signature(node: ir.Node) -> tuple[str, ...]:
    names = [value.name or "" if value is not None else "" for value in (*node.inputs, *node.outputs)]
    attributes = [f"{key}={attribute.value}" for key, attribute in sorted(node.attributes.items())]
    return (node.name or "", node.domain, node.op_type, *names, *attributes)
