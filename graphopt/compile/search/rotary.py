"""From a model and a factor of its trained length to a recipe that rescales its rotary positions."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.artifact.tokens import texts_of
from graphopt.compile.compilation import Compilation
from graphopt.compile.search.evolution import Candidate, Evolution, evolve
from graphopt.compile.search.jsonl import Lines
from graphopt.compile.search.rotary_inputs import Turnable
from graphopt.errors import InputError
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.lift.rescale_rope import RescaleRope
from graphopt.passes.lift.rescale_rope.methods import METHODS, Method, attention_factor
from graphopt.passes.recipe import Recipe
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from graphopt.artifact.artifact import Artifact
    from graphopt.tasks.ports import IntArray

PAPER = Evolution()
_STARTS: tuple[Method, ...] = ("linear", "ntk", "yarn")


class Measurement(BaseModel):
    """A candidate and the nats per token that the model needs with it, beyond its trained length."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    candidate: Candidate
    nats: float


class FoundFactors(BaseModel):
    """What the search ends with.

    Attributes:
        recipe: canonicalize, and rescale_rope with the factors.
        nats: per token beyond the trained length, on the text of the search.
        starts: the same for what the search began with, by method.
        measured: candidates that were run.
    """

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    nats: float
    starts: dict[str, float]
    measured: int


def search_rope(
    model: str | Path | Artifact,
    factor: float,
    folder: str | Path,
    *,
    evolution: Evolution = PAPER,
    texts: int = 4,
    text: Path | None = None,
    on_stage: Progress = silent,
) -> FoundFactors:
    """Search rotary factors with which a model predicts text best beyond its trained length, up to ``factor`` times it.

    Args:
        model: an artifact folder or an ``.onnx`` file of a causal language model, with a tokenizer.
        factor: how many times its positions.
        folder: where measurements are kept. A search that was cut off goes on there.
        evolution: the settings of the search.
        texts: sequences to measure on, each of the whole length.
        text: a UTF-8 file to take them from; by default source of the Python standard library, as for calibrations.
        on_stage: called for each candidate.

    Raises:
        InputError: the model, the factor or the text cannot be used.
    """
    # Caches in pages need less memory.
    compilation = Compilation.of_pages(model, Path(folder))
    source = compilation.source
    trained_length = source.manifest.model.max_positions
    if trained_length is None or factor <= 1:
        raise InputError(
            f"there is nothing to search: the model has {trained_length} positions, and the factor is {factor:g}",
            file=source.path,
            remedy="give a model whose config.json states its positions, and a factor above 1",
        )
    sequences = _sequences(source, int(trained_length * factor), texts, text)
    turnable = Turnable(compilation.model)
    starts = _starts(turnable, factor, trained_length)
    key = hashlib.sha256(compilation.origin.encode())
    for ids in sequences:
        key.update(ids.tobytes())
    measurements = Lines(
        Path(folder) / f"rope-{key.hexdigest()[:16]}.jsonl", Measurement, lambda row: row.candidate.model_dump_json()
    )
    with compilation.context.runner.open_model(turnable.model) as session:

        def measure(candidate: Candidate) -> float:
            name = candidate.model_dump_json()
            if name not in measurements.rows:
                nats = turnable.nats(session, candidate, sequences, trained_length)
                # A model that falls apart is the least fit, and JSON knows no infinity.
                measurements.add(Measurement(candidate=candidate, nats=nats if np.isfinite(nats) else 1e9))
            return measurements.rows[name].nats

        start_nats = {name: measure(candidate) for name, candidate in starts.items()}
        best, nats = evolve(list(starts.values()), factor, evolution, measure, on_stage)
    return FoundFactors(
        recipe=_recipe(best, factor, trained_length), nats=nats, starts=start_nats, measured=len(measurements.rows)
    )


def _sequences(source: Artifact, length: int, texts: int, text: Path | None) -> list[IntArray]:
    sequences = texts_of(source.companions, CalibrationOptions(text=text, window=length + 1, windows=texts), None)
    long_enough = [ids for ids in sequences if len(ids) == length + 1]
    if not long_enough:
        raise InputError(
            f"the text has no sequence of {length + 1} tokens",
            file=text,
            remedy="give a longer text, or search for a smaller factor",
        )
    return long_enough


def _starts(turnable: Turnable, factor: float, trained_length: int) -> dict[str, Candidate]:
    """Return the candidates that known methods mean; yarn is left out where there is no single base."""
    candidates: dict[str, Candidate] = {}
    for method in _STARTS:
        options = RescaleRope(method=method, factor=factor, trained=trained_length)
        try:
            radians = METHODS[method](turnable.radians, options, trained_length)
        except InputError:
            continue
        factors = tuple((turnable.radians / radians).tolist())
        candidates[method] = Candidate(factors=factors, attention_factor=attention_factor(options, trained_length))
    return candidates


def _recipe(best: Candidate, factor: float, trained_length: int) -> Recipe:
    step = RescaleRope(
        method="longrope",
        factor=factor,
        trained=trained_length,
        factors=best.factors,
        first=best.first,
        attention_factor=best.attention_factor,
    )
    description = f"for one model and {factor:g} times its {trained_length} positions; made by graphopt search-rope"
    return Recipe(name=f"longrope-{factor:g}", description=description, steps=(Canonicalize(), step))
