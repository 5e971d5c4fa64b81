"""From a model and a number of bytes to a recipe that says which format each matrix gets."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.analysis.structure.products import is_thin, linear_nodes, lm_head_nodes, router_nodes
from graphopt.compile.compilation import Compilation, files_of
from graphopt.compile.search.choices import CHOICES, Choice, choice_of, name_of
from graphopt.compile.search.experiment import Experiment, close, measure
from graphopt.compile.search.losses import Database, Rounder, with_inputs
from graphopt.compile.search.program import solve
from graphopt.errors import InputError
from graphopt.graph.weights import expression_of, weight_of
from graphopt.graph.weights.data_file import save_model
from graphopt.graph.weights.evaluator import run_tasks, stage_of, workers
from graphopt.passes.codes.quantize_weights import QuantizeWeights
from graphopt.passes.common.tied_embedding import tied_lookups
from graphopt.passes.recipe import Recipe
from graphopt.tasks import task_of
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor

    import onnx_ir as ir

    from graphopt.artifact.artifact import Artifact
    from graphopt.graph.weights import Expression

TOKENS, _WINDOW = 512, 256
"""Tokens of the calibration text that divergences are measured on, and tokens that are seen at once."""


class SearchResult(BaseModel):
    """What the search ends with.

    Attributes:
        recipe: the recipe, with a format for each matrix.
        bytes: of all weights by estimate; what is not a matrix as it is stored in floats.
        loss: the divergence that is expected, the sum of those of each matrix alone, in nats per token.
        chosen: the choice for each matrix.
    """

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    bytes: int
    loss: float
    chosen: dict[str, Choice]


def search(
    model: str | Path | Artifact,
    size: int,
    folder: str | Path,
    *,
    recipe: str | Path | Recipe = "small",
    choices: Sequence[Choice] = CHOICES,
    tokens: int = TOKENS,
    jobs: int | Executor = 1,
    on_stage: Progress = silent,
) -> SearchResult:
    """Choose a format for each matrix so that the model diverges least and its weights take at most ``size`` bytes.

    Args:
        model: an artifact folder or an ``.onnx`` file of a causal language model, with a tokenizer. It must fit into
            memory twice.
        size: bytes of all weights.
        folder: where statistics and measurements are kept. A search that was cut off goes on there, and one for other
            bytes measures nothing again.
        recipe: what to do besides: its step ``quantize_weights`` gets the formats.
        choices: what a matrix may be stored as.
        tokens: of the calibration text that divergences are measured on.
        jobs: as for :func:`graphopt.optimize`; tasks are matrices.
        on_stage: called for each matrix.

    Raises:
        InputError: the model or the recipe cannot be used, or the bytes are too few.
        MissingDependencyError: scipy is not installed.
    """
    with workers(jobs, Path(folder), files_of(model)) as executor:
        compilation = Compilation(
            model, recipe, work=Path(folder), statistics=folder, executor=executor, on_stage=on_stage
        )
        return _search(compilation, size, Path(folder), choices, tokens, executor, on_stage)


def _search(
    compilation: Compilation,
    size: int,
    folder: Path,
    choices: Sequence[Choice],
    tokens: int,
    executor: Executor | None,
    on_stage: Progress,
) -> SearchResult:
    # The recipe that is found serves other machines, too.
    recipe = compilation.recipe_for_target.fitting(compilation.source.model.graph)
    names = [step.name for step in compilation.recipe.steps]
    step = next((step for step in recipe.steps if isinstance(step, QuantizeWeights)), None)
    if step is None:
        raise InputError(f"the recipe {recipe.name} has no step quantize_weights", remedy="--add quantize_weights")
    compilation.check_weights()
    compilation.apply_unchecked(compilation.passes[: names.index("quantize_weights")])
    graph, calibration = compilation.model, compilation.calibration
    matrices = _matrices(graph.graph)
    has_level_scales = any(step.name == "level_scales" for step in recipe.steps)
    settings = f"{calibration.model_folder(graph).name} {step.rounding!r} {step.scale} {tokens} {has_level_scales}"
    key = hashlib.sha256(settings.encode())
    key.update(" ".join(map(name_of, choices)).encode())
    database = Database(folder / f"search-{key.hexdigest()[:16]}.jsonl")
    rounder = Rounder(step.rounding, step.scale, has_level_scales)
    _measure(compilation, matrices, database, choices, rounder, tokens, executor, on_stage)
    rows = [database.rows[name] for name in matrices]
    other_bytes = _other_bytes(graph.graph, step, set(matrices))
    names = [name_of(choice) for choice in choices]
    choice_numbers = solve(
        [[row.losses[name] for name in names] for row in rows],
        [[row.bytes[name] for name in names] for row in rows],
        size - other_bytes,
    )
    choice_names = {row.weight: names[number] for row, number in zip(rows, choice_numbers, strict=True)}
    return SearchResult(
        recipe=_pin_formats(recipe, choice_names, size),
        bytes=other_bytes + sum(row.bytes[choice_names[row.weight]] for row in rows),
        loss=sum(row.losses[choice_names[row.weight]] for row in rows),
        chosen={name: choice_of(choice) for name, choice in choice_names.items()},
    )


def _matrices(graph: ir.Graph) -> dict[str, ir.Node]:
    """Return a product of each matrix that the step would round, by the name of its weight."""
    routers = router_nodes(graph) - lm_head_nodes(graph)
    nodes_by_weight: dict[str, ir.Node] = {}
    for node in linear_nodes(graph):
        weight = weight_of(node, 1)
        if weight is not None and node not in routers and not is_thin(weight):
            nodes_by_weight.setdefault(weight.name or "", node)
    if not nodes_by_weight:
        raise InputError("the model has no product with a matrix", remedy="search the model as it was exported")
    return nodes_by_weight


def _measure(
    compilation: Compilation,
    matrices: Mapping[str, ir.Node],
    database: Database,
    choices: Sequence[Choice],
    rounder: Rounder,
    tokens: int,
    executor: Executor | None,
    on_stage: Progress,
) -> None:
    remaining = [name for name in matrices if name not in database.rows]
    if not remaining:
        return
    graph, calibration = compilation.model, compilation.calibration
    statistics = calibration.inputs(graph, matrices.values())
    weights: dict[str, Expression] = {}
    for name, node in matrices.items():
        weight = weight_of(node, 1)
        assert weight is not None
        weights[name] = expression_of(weight.const_value)
    feeds, size = task_of(graph.graph).text_feeds, min(_WINDOW, tokens)
    arrays = [text for text in calibration.texts[: max(1, tokens // size)] if isinstance(text, np.ndarray)]
    if not arrays:
        raise InputError(
            "divergences are measured on text, and this model reads none", remedy="choose a recipe by hand"
        )
    texts = [text[: size + 1] for text in arrays]
    database.file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="experiment-", dir=database.file.parent) as folder:
        file, model_file = Path(folder, "experiment"), Path(folder, "model.onnx")
        save_model(with_inputs(graph, weights), model_file, "model.data", in_place=True)
        Experiment(
            model=str(model_file),
            weights=weights,
            hessians={name: statistics[node].hessian() for name, node in matrices.items()},
            texts=[(feeds(graph.graph, text[None, :-1]), text[1:]) for text in texts],
            choices=choices,
            rounder=rounder,
        ).write(file)
        try:
            for _, row in run_tasks(executor, measure, [(str(file), name) for name in remaining]):
                database.add(row)
                on_stage(stage_of(f"rounding {row.weight}", executor), len(database.rows), len(matrices))
        finally:
            close()


def _other_bytes(graph: ir.Graph, step: QuantizeWeights, matrices: set[str]) -> int:
    """Return the bytes of what is no matrix: norms as they are, a token embedding of its own as it will be."""
    tied = tied_lookups(graph) if step.tied and step.embedding is not None else {}
    looked_up = {lookup.inputs[0] for lookups in tied.values() for lookup in lookups}
    return sum(
        _float_bytes(value) if step.embedding is None else _table_bytes(value, step.embedding.group)
        for name, value in graph.initializers.items()
        if name not in matrices and value not in looked_up
    )


def _float_bytes(value: ir.Value) -> int:
    """Return the bytes of a weight as it is."""
    return 0 if value.const_value is None else value.const_value.nbytes


def _table_bytes(value: ir.Value, group: int | None) -> int:
    """Return the bytes of a weight whose rows, if they are looked up, will be bytes with a scale for each group."""
    dims = () if value.const_value is None else value.const_value.shape.numpy()
    if len(dims) != 2 or not any(use.node.op_type == "Gather" for use in value.uses()):
        return _float_bytes(value)
    return int(np.prod(dims)) + 4 * dims[0] * -(-dims[1] // (group or dims[1]))


def _pin_formats(recipe: Recipe, choice_names: Mapping[str, str], size: int) -> Recipe:
    pinned_recipe = recipe.setting(
        "quantize_weights", matrices={n: choice_of(c).model_dump() for n, c in choice_names.items()}
    )
    counts = [f"{list(choice_names.values()).count(name)} as {name}" for name in sorted(set(choice_names.values()))]
    text = f"for one model in {size:,} bytes: matrices {', '.join(counts)}; made by graphopt search"
    return pinned_recipe.model_copy(update={"name": f"{recipe.name}-searched", "description": text})
