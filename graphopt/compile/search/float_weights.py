"""Which weights of a model that makes no text stay in floats, so that its outputs are as near as is required.

Each weight that a recipe rounds is rounded alone, all others in floats, and the model run: what outputs are off by is
what its codes, and those of what it is multiplied with, cost. Errors of single weights are small and independent, so
they about add up, where gains of a weight beside all other errors do not. The weights that cost most are left in
floats, as few of them as meet the requirement by the model as a whole; in the end each that is not needed goes back to
codes. (Leaving out what is sensitive alone is the older half of HAWQ, Dong et al. 2019, by measurement in the place of
the Hessian's eigenvalue.)
"""

from __future__ import annotations

import hashlib
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.compile.compilation import Compilation
from graphopt.compile.pipeline import chosen_recipe
from graphopt.compile.search.jsonl import Lines
from graphopt.errors import InputError
from graphopt.graph.weights import weight_of
from graphopt.ort.session import run
from graphopt.passes.codes.quantize_convolutions import QuantizeConvolutions
from graphopt.passes.codes.quantize_weights import QuantizeWeights
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quality.verdict import COSINE_USABLE, Requirement
from graphopt.tasks import TASKS
from graphopt.tasks.graph.outputs import Output, differences, figures_of, outputs_of
from graphopt.tasks.graph.samples import cast_feeds
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import onnx_ir as ir

    from graphopt.artifact.artifact import Artifact
    from graphopt.ort.session import Array

RECIPE = "int8"
_TEXTS, _SAMPLES = 8, 64
"""Texts, or samples of inputs, that models are compared on: each is run for each weight."""
REQUIREMENT = Requirement.parse(f"cosine>={COSINE_USABLE}")
"""What outputs must be like by default: the verdict "usable"."""


class Trial(BaseModel):
    """A model with some weights in floats.

    Attributes:
        floats: their names, sorted.
        bytes: of all weights.
        error: squares of what outputs are off by, as a share of their own: the mean over samples and outputs.
        figures: of the outputs, see :func:`graphopt.tasks.graph.outputs.figures_of`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    floats: tuple[str, ...]
    bytes: int
    error: float
    figures: dict[str, float]


class FloatWeights(BaseModel):
    """What the search ends with.

    Attributes:
        recipe: the recipe, with the weights that stay in floats.
        recipe_trial: the model of the recipe as it is.
        best_trial: the model with weights in floats.
        costs: what ``error`` is with one weight alone in codes, the most first.
        samples: that outputs were compared on.
        unmet: what ``best_trial`` does not meet of the requirement.
    """

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    recipe_trial: Trial
    best_trial: Trial
    costs: dict[str, float]
    samples: int
    unmet: list[str]


def search_float_weights(
    model: str | Path | Artifact,
    folder: str | Path,
    *,
    recipe: str | Path | Recipe = RECIPE,
    requirement: Requirement = REQUIREMENT,
    size: int | None = None,
    inputs: str | Path | None = None,
    on_stage: Progress = silent,
) -> FloatWeights:
    """Choose the weights of convolutions and products that stay in floats.

    Args:
        model: an artifact folder or an ``.onnx`` file of a model that makes no text.
        folder: where ranges, codes and measurements are kept. A search that was cut off goes on there.
        recipe: what rounds the weights: a preset, a YAML file or a recipe.
        requirement: when to stop.
        size: bytes of all weights, at most; ``None`` for any.
        inputs: an ``.npz`` file or a folder of what the model is fed; random inputs without.
        on_stage: called for each model that is run.

    Raises:
        InputError: the model cannot be run, the recipe rounds no weight of it, or the bytes are too few.
    """
    trials = _Trials(model, chosen_recipe(load_recipe(recipe), None, 0, False, inputs), Path(folder), on_stage)
    recipe_trial = trials.run(())
    room = 0 if size is None else size - recipe_trial.bytes
    if room < 0:
        raise InputError(
            f"the weights take {recipe_trial.bytes:,} bytes as the recipe rounds them, and {size:,} are allowed",
            remedy="give more bytes, or a recipe of fewer bits",
        )

    def is_met(trial: Trial) -> bool:
        return not requirement.unmet(trial.figures)

    float_trial = trials.run(trials.names)
    single_trials = {name: trials.run([weight for weight in trials.names if weight != name]) for name in trials.names}
    costs = {name: max(0.0, trial.error - float_trial.error) for name, trial in single_trials.items()}
    more_bytes = {name: float_trial.bytes - trial.bytes for name, trial in single_trials.items()}
    # With a limit it is what a byte costs that counts.
    worth = {name: cost / (max(1, more_bytes[name]) if size else 1) for name, cost in costs.items()}
    order = []
    for name in sorted(trials.names, key=worth.__getitem__, reverse=True):
        if size is None or more_bytes[name] <= room:
            order.append(name)
            room -= more_bytes[name]
    # The fewest that meet it, as if each more brought the outputs nearer.
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        is_enough = is_met(trials.run(order[:middle]))
        low, high = (low, middle) if is_enough else (middle + 1, high)
    best_trial = trials.run(order[:low])
    for name in reversed(order[:low] if is_met(best_trial) else ()):
        trial = trials.run([weight for weight in best_trial.floats if weight != name])
        best_trial = trial if is_met(trial) else best_trial
    return FloatWeights(
        recipe=_describe(trials.recipe_of(best_trial.floats), best_trial),
        recipe_trial=recipe_trial,
        best_trial=best_trial,
        costs=dict(sorted(costs.items(), key=lambda item: -item[1])),
        samples=len(trials.feeds),
        unmet=requirement.unmet(best_trial.figures),
    )


class _Trials:
    """Models of a recipe with some weights in floats; those that a folder has measured are not run again.

    The steps in front of the first that rounds are run once.

    Attributes:
        names: the weights that the recipe rounds.
        feeds: what models are fed.
    """

    def __init__(self, model: str | Path | Artifact, recipe: Recipe, folder: Path, on_stage: Progress) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._on_stage, self._run_count = on_stage, 0
        on_stage("running the model as it is")
        self._compilation = Compilation(model, recipe, work=folder, statistics=folder, on_stage=on_stage)
        self._base = self._compilation.recipe
        manifest, calibration = self._compilation.source.manifest, self._compilation.calibration
        if self._compilation.source.parts:
            raise InputError(
                f"weights that stay in floats are searched in one graph, and {manifest.task} has several",
                file=self._compilation.source.path,
                remedy="give the folder of one of its graphs",
            )
        steps = self._base.passes()
        begins = [index for index, step in enumerate(steps) if isinstance(step, QuantizeWeights | QuantizeConvolutions)]
        if not begins:
            raise InputError(
                f"the recipe {recipe.name} rounds no weights",
                remedy="choose one with quantize_weights or quantize_convolutions",
            )
        self._begin = begins[0]
        graph, task = self._compilation.source.model.graph, TASKS[manifest.task]
        self.feeds: list[Mapping[str, Array]] = [
            dict(task.text_feeds(graph, text[None])) if isinstance(text, np.ndarray) else text
            for text in calibration.texts[: _TEXTS if task.reads_text else _SAMPLES]
        ]
        self._reference = self._outputs(self._compilation.source.model)
        if not self._reference[0]:
            raise InputError(
                "no output is a tensor of numbers, so nothing can be compared", file=self._compilation.source.path
            )
        self._compilation.apply_unchecked(steps[: self._begin])
        self._start, self._start_reports = self._compilation.model, self._compilation.reports
        self._convolutions = _weights(node for node in self._start.graph.all_nodes() if node.op_type == "Conv")
        # Of the calibration it is what models are fed that counts, and not where the file of it lies.
        options = self._base.model_dump_json(exclude={"calibration"})
        key = f"{calibration.model_folder(self._start).name} {options} {_digest(self.feeds)}"
        file = folder / f"floats-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
        self._rows = Lines(file, Trial, lambda row: "\n".join(row.floats))
        self.names = self._rounded_names()

    def _rounded_names(self) -> list[str]:
        """Return the weights of convolutions and products that the recipe makes codes of."""
        self._compile(self._base)
        graph = self._start.graph
        candidates = [*self._convolutions, *_weights(node for node in graph if node.op_type in ("MatMul", "Gemm"))]
        float_names = set(self._compilation.model.graph.initializers)
        names = [name for name in dict.fromkeys(candidates) if name in graph.initializers and name not in float_names]
        if not names:
            raise InputError(f"the recipe {self._base.name} rounds no weight of a convolution or product")
        return names

    def recipe_of(self, floats: Collection[str]) -> Recipe:
        """Return the recipe that leaves some weights in floats."""
        recipe = self._base
        convolutions = [name for name in floats if name in self._convolutions]
        for step in recipe.steps:
            if isinstance(step, QuantizeConvolutions) and convolutions:
                recipe = recipe.setting(step.name, floats=(*step.floats, *convolutions))
            if isinstance(step, QuantizeWeights) and len(convolutions) < len(floats):
                matrices = dict.fromkeys(name for name in floats if name not in self._convolutions)
                recipe = recipe.setting(step.name, matrices={**step.matrices, **matrices})
        return recipe

    def run(self, floats: Sequence[str]) -> Trial:
        """Return the model with some weights in floats."""
        names = tuple(sorted(floats))
        key = "\n".join(names)
        if key not in self._rows.rows:
            self._run_count += 1
            self._on_stage(f"running it with {len(names)} of {len(self.names)} weights in floats, {self._run_count}")
            self._compile(self.recipe_of(names))
            model = self._compilation.model
            outputs = self._outputs(model)
            row = Trial(
                floats=names,
                bytes=_bytes(model),
                error=_error(self._reference, outputs),
                figures=figures_of(differences(self._reference, outputs)),
            )
            self._rows.add(row)
        return self._rows.rows[key]

    def _compile(self, recipe: Recipe) -> None:
        self._compilation.model, self._compilation.reports = self._start.clone(), list(self._start_reports)
        self._compilation.apply_unchecked(recipe.passes()[self._begin :])
        self._compilation.settle()

    def _outputs(self, model: ir.Model) -> list[dict[str, Output]]:
        with self._compilation.context.runner.open_model(model) as session:
            names = [port.name for port in session.get_outputs()]
            inputs = {port.name for port in session.get_inputs()}
            samples = [{name: array for name, array in feeds.items() if name in inputs} for feeds in self.feeds]
            return [outputs_of(run(session, names, cast_feeds(feeds, session)), names) for feeds in samples]


def _weights(nodes: Iterable[ir.Node]) -> list[str]:
    """Return the names of the weights that nodes read second."""
    return list(dict.fromkeys(weight.name or "" for node in nodes if (weight := weight_of(node, 1)) is not None))


def _bytes(model: ir.Model) -> int:
    values = map(attrgetter("const_value"), model.graph.initializers.values())
    return sum(value.nbytes for value in values if value is not None)


def _digest(feeds: Iterable[Mapping[str, Array]]) -> str:
    content = hashlib.sha256()
    for sample in feeds:
        for name in sorted(sample):
            content.update(name.encode() + np.ascontiguousarray(sample[name]).tobytes())
    return content.hexdigest()


def _error(before: Sequence[Mapping[str, Output]], after: Sequence[Mapping[str, Output]]) -> float:
    """Return the mean over samples and outputs of |after - before|^2 / |before|^2."""
    shares: list[Any] = []
    for old, new in zip(before, after, strict=True):
        for name, output in old.items():
            first = output.vector()
            second = new[name].vector(output.numbers.shape) if name in new else np.zeros_like(first)
            size = float(first @ first)
            gap = float(np.square(second - first).sum())
            shares.append(gap / size if size else float(gap > 0))
    return float(np.mean(shares))


def _describe(recipe: Recipe, best_trial: Trial) -> Recipe:
    count = len(best_trial.floats)
    text = f"{recipe.description}; {count} weights in floats for one model; made by graphopt search"
    return recipe.model_copy(update={"name": f"{recipe.name}-searched", "description": text})
