"""From a model and a number of bytes to a recipe that says which format each matrix gets."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections import defaultdict
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.analysis.structure.experts import mixtures_of
from graphopt.analysis.structure.folding import fold
from graphopt.analysis.structure.products import is_thin, linear_nodes, lm_head_nodes, router_nodes
from graphopt.analysis.structure.roles import OTHER_ROLE, roles_of
from graphopt.artifact.tokens import tokenizer_among, windows_of_text
from graphopt.compile.compilation import Compilation, files_of
from graphopt.compile.search.choices import CHOICES, Choice, choice_of, name_of
from graphopt.compile.search.experiment import Experiment, close
from graphopt.compile.search.losses import Database, Rounder, Sample, with_inputs
from graphopt.compile.search.mixtures import Groups, Judgements, Mixture, MixtureSearch, judge_mixtures
from graphopt.compile.search.program import solve
from graphopt.compile.search.trials import Trials
from graphopt.errors import InputError
from graphopt.graph.weights import expression_of, weight_of
from graphopt.graph.weights.data_file import save_model
from graphopt.graph.weights.evaluator import workers
from graphopt.passes.codes.quantize_weights import QuantizeWeights
from graphopt.passes.common.tied_embedding import tied_lookups
from graphopt.passes.recipe import Recipe
from graphopt.quality.texts import held_out_texts
from graphopt.tasks import task_of
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    import onnx_ir as ir

    from graphopt.artifact.artifact import Artifact
    from graphopt.graph.weights import Expression
    from graphopt.tasks.ports import IntArray

TOKENS, _WINDOW = 512, 256
"""Tokens of the calibration text that divergences are measured on, and tokens that are seen at once."""

MIXTURES = MixtureSearch()


class SearchResult(BaseModel):
    """What the search ends with.

    Attributes:
        recipe: the recipe, with a format for each matrix.
        bytes: of all weights by estimate; what is not a matrix as it is stored in floats.
        loss: the divergence of the model with the mixture on the text of the search, in nats per token; if no mixture
            was judged, what is expected of it, the sum of those of each matrix alone.
        held_out_loss: the divergence on text that nothing of the search has read, see
            :mod:`graphopt.quality.texts`; ``None`` if no mixture was judged, or this Python has no such text.
        recipe_loss: as ``loss``, for the formats that the recipe has, where they are among the choices and have room.
        recipe_held_out_loss: as ``held_out_loss``, for these.
        chosen: the choice for each matrix.
        judged_mixtures: mixtures that were judged, on a part of the text or on all of it.
        rare: matrices of experts that fewer tokens of the calibration text reached than ``fewest_tokens`` of the recipe
            says, with their number. They are taken to cost what a mean expert of their mixture costs.
    """

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    bytes: int
    loss: float
    held_out_loss: float | None
    recipe_loss: float | None
    recipe_held_out_loss: float | None
    chosen: dict[str, Choice]
    judged_mixtures: int
    rare: dict[str, int]


def search(  # noqa: PLR0913, what a search can be recipe_mixture
    model: str | Path | Artifact,
    size: int | None,
    folder: str | Path,
    *,
    recipe: str | Path | Recipe = "small",
    choices: Sequence[Choice] = CHOICES,
    tokens: int = TOKENS,
    mixtures: MixtureSearch = MIXTURES,
    jobs: int | Executor = 1,
    on_stage: Progress = silent,
) -> SearchResult:
    """Choose a format for each matrix so that the model diverges least and its weights take at most ``size`` bytes.

    Args:
        model: an artifact folder or an ``.onnx`` file of a causal language model, with a tokenizer. It must fit into
            memory three times, and the disk needs five bytes for each weight and format that a mixture has.
        size: bytes of all weights; ``None`` for what the formats of the recipe take.
        folder: where statistics, rounded matrices and measurements are kept. A search that was cut off goes on there,
            and one for other bytes measures no matrix again.
        recipe: what to do besides: its step ``quantize_weights`` gets the formats.
        choices: what a matrix may be stored as.
        tokens: of the calibration text that single matrices are measured on, and mixtures at first.
        mixtures: how mixtures are drawn, and on how many tokens the best of them are judged.
        jobs: as for :func:`graphopt.optimize`; tasks are matrices and mixtures.
        on_stage: called for each matrix and mixture.

    Raises:
        InputError: the model or the recipe cannot be used, or the bytes are too few.
        MissingDependencyError: scipy is not installed.
    """
    with workers(jobs, Path(folder), files_of(model)) as executor:
        compilation = Compilation(
            model, recipe, work=Path(folder), statistics=folder, executor=executor, on_stage=on_stage
        )
        return _search(compilation, size, Path(folder), choices, tokens, mixtures, executor, on_stage)


def _search(
    compilation: Compilation,
    size: int | None,
    folder: Path,
    choices: Sequence[Choice],
    tokens: int,
    mixtures: MixtureSearch,
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
    graph = compilation.model.graph
    matrices, tables = _matrices(graph), _tables(graph, step)
    has_level_scales = any(step.name == "level_scales" for step in recipe.steps)
    rounder = Rounder(step.rounding, step.scale, has_level_scales)
    samples = _samples(compilation, tokens, mixtures)
    settings = (
        f"{compilation.calibration.model_folder(compilation.model).name} {step.rounding!r} {step.scale} {tokens} "
        f"{has_level_scales} {step.fewest_tokens} {sorted(tables)} {' '.join(map(name_of, choices))}"
    )
    key = hashlib.sha256(settings.encode()).hexdigest()[:16]
    database = Database(folder / f"search-{key}.jsonl")
    with _experiment(compilation, step, matrices, tables, choices, rounder, samples, folder) as experiment:
        trials = Trials(experiment, compilation.evaluator, executor, on_stage)
        trials.measure(database)
        rows = [database.rows[name] for name in matrices]
        other_bytes = _other_bytes(graph, step, set(matrices))
        names = [name_of(choice) for choice in choices]
        losses = [[row.losses[name] for name in names] for row in rows]
        sizes = [[row.bytes[name] for name in names] for row in rows]
        recipe_mixture = _mixture_of(step, graph, matrices, names)
        if size is None:
            size = other_bytes + _bytes_of(recipe, recipe_mixture, sizes)
        room = size - other_bytes
        if recipe_mixture is not None and sum(map(getitem, sizes, recipe_mixture)) > room:
            recipe_mixture = None
        known_mixtures = [] if recipe_mixture is None else [recipe_mixture]
        held_out_losses: dict[Mixture, float] = {}
        if mixtures.candidates:
            judgements = Judgements(folder / f"mixtures-{key}-{mixtures.tokens}.jsonl")
            divergences = judge_mixtures(
                losses,
                sizes,
                room,
                Groups(_roles(graph, matrices), _experts(graph, matrices)),
                known_mixtures,
                mixtures,
                lambda batch, sample: trials.judge(batch, judgements, sample),
                on_stage,
            )
            if "held out" in samples:
                finals = list(dict.fromkeys([min(divergences, key=divergences.__getitem__), *known_mixtures]))
                held_out_losses = dict(zip(finals, trials.judge(finals, judgements, "held out"), strict=True))
        else:
            best = tuple(solve(losses, sizes, room))
            divergences = {choice: sum(map(getitem, losses, choice)) for choice in (best, *known_mixtures)}
    mixture = min(divergences, key=divergences.__getitem__)
    choice_names = {row.weight: names[number] for row, number in zip(rows, mixture, strict=True)}
    return SearchResult(
        recipe=_pin_formats(recipe, choice_names, size),
        bytes=other_bytes + sum(row.bytes[choice_names[row.weight]] for row in rows),
        loss=divergences[mixture],
        held_out_loss=held_out_losses.get(mixture),
        recipe_loss=None if recipe_mixture is None else divergences[recipe_mixture],
        recipe_held_out_loss=None if recipe_mixture is None else held_out_losses.get(recipe_mixture),
        chosen={name: choice_of(choice) for name, choice in choice_names.items()},
        judged_mixtures=len(trials.judged_mixtures),
        rare={name: experiment.tokens[name] for name in sorted(experiment.rare)},
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


def _tables(graph: ir.Graph, step: QuantizeWeights) -> dict[str, list[str]]:
    """Return the token embeddings that will be stored with the matrix that they are transposed, by its name."""
    tables: dict[str, list[str]] = {}
    for product, lookups in tied_lookups(graph).items() if step.tied and step.embedding is not None else ():
        weight = weight_of(product, 1)
        assert weight is not None
        values = (weight_of(lookup, 0) for lookup in lookups)
        tables[weight.name or ""] = list(dict.fromkeys(value.name or "" for value in values if value is not None))
    return tables


def _mixture_of(
    step: QuantizeWeights, graph: ir.Graph, matrices: Mapping[str, ir.Node], names: Sequence[str]
) -> Mixture | None:
    """Return the numbers of the formats that the step has; ``None`` if one is not among the names of choices."""
    formats = step.formats_by_product(graph)
    chosen_formats = [formats[node] for node in matrices.values()]
    chosen_names = [None if choice is None else name_of(choice) for choice in chosen_formats]
    numbers = [names.index(name) for name in chosen_names if name in names]
    return tuple(numbers) if len(numbers) == len(chosen_names) else None


def _bytes_of(recipe: Recipe, mixture: Mixture | None, sizes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of the matrices in the formats of the recipe."""
    if mixture is None:
        raise InputError(
            f"the bytes of the recipe {recipe.name} are not known: it has formats that are not among the choices",
            remedy="say how many bytes there are with --bytes, or add its formats with --format",
        )
    return sum(map(getitem, sizes, mixture))


def _roles(graph: ir.Graph, matrices: Mapping[str, ir.Node]) -> list[list[int]]:
    """Return the numbers of the matrices of each role."""
    roles, numbers = roles_of(graph, fold(graph)), defaultdict[str, list[int]](list)
    for number, node in enumerate(matrices.values()):
        numbers[roles.get(node, OTHER_ROLE)].append(number)
    return list(numbers.values())


def _units(graph: ir.Graph, matrices: Mapping[str, ir.Node]) -> list[list[str]]:
    """Return the names of matrices that are measured at once: of each product of a mixture those of all experts."""
    names_of = {node: name for name, node in matrices.items()}
    units = [[names_of[node] for node in mixture.products if node in names_of] for mixture in mixtures_of(graph)]
    of_experts = {name for names in units for name in names}
    return [*([name] for name in matrices if name not in of_experts), *filter(None, units)]


def _experts(graph: ir.Graph, matrices: Mapping[str, ir.Node]) -> list[list[int]]:
    """Return the numbers of the matrices of each expert: those that multiply the same tokens."""
    numbers_of = {node: number for number, node in enumerate(matrices.values())}
    experts = defaultdict[object, list[int]](list)
    for mixture in mixtures_of(graph):
        for index, (product, end) in enumerate(zip(mixture.products, mixture.ends, strict=True)):
            if product in numbers_of:
                experts[mixture.bounds or end, index].append(numbers_of[product])
    return list(experts.values())


def _samples(compilation: Compilation, tokens: int, mixtures: MixtureSearch) -> dict[Sample, list[IntArray]]:
    """Return pieces of text, each of one token more than is read; what no mixture is judged on is left out."""
    size = min(_WINDOW, tokens)
    windows = [text for text in compilation.calibration.texts if isinstance(text, np.ndarray)]
    if not windows:
        raise InputError(
            "divergences are measured on text, and this model reads none", remedy="choose a recipe by hand"
        )
    # the beginning of each window first
    begins = range(0, max(map(len, windows)), size)
    pieces = [text[begin : begin + size + 1] for begin in begins for text in windows if len(text) > begin + 1]
    samples: dict[Sample, list[IntArray]] = {"single": pieces[: max(1, tokens // size)]}
    if mixtures.candidates:
        samples["all"] = pieces[: max(1, tokens // size, mixtures.tokens // size)]
        with contextlib.suppress(FileNotFoundError):
            tokenizer, texts = tokenizer_among(compilation.source.companions), held_out_texts()
            count = max(1, mixtures.tokens // size // len(texts))
            samples["held out"] = [
                piece for text in texts for piece in windows_of_text(tokenizer, text, size + 1, count)
            ]
    return samples


@contextlib.contextmanager
def _experiment(
    compilation: Compilation,
    step: QuantizeWeights,
    matrices: Mapping[str, ir.Node],
    tables: Mapping[str, Sequence[str]],
    choices: Sequence[Choice],
    rounder: Rounder,
    samples: Mapping[Sample, Sequence[IntArray]],
    folder: Path,
) -> Iterator[Experiment]:
    """Give what workers need, with the model in a folder that is removed afterwards."""
    model = compilation.model
    statistics = compilation.calibration.inputs(model, matrices.values())
    weights: dict[str, Expression] = {}
    for name, node in matrices.items():
        weight = weight_of(node, 1)
        assert weight is not None
        weights[name] = expression_of(weight.const_value)
    feeds, units = task_of(model.graph).text_feeds, _units(model.graph, matrices)
    tokens = {name: statistics[node].tokens for name, node in matrices.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="experiment-", dir=folder) as run_folder:
        file = Path(run_folder, "model.onnx")
        inputs = [*weights, *(table for names in tables.values() for table in names)]
        save_model(with_inputs(model, inputs), file, "model.data", in_place=True)
        experiment = Experiment(
            model=str(file),
            weights=weights,
            tables=tables,
            units=units,
            hessians={name: statistics[node].hessian() for name, node in matrices.items()},
            tokens=tokens,
            rare=frozenset(name for name, count in tokens.items() if count < max(1, step.fewest_tokens)),
            samples={
                sample: [(feeds(model.graph, text[None, :-1]), text[1:]) for text in texts]
                for sample, texts in samples.items()
            },
            choices=choices,
            rounder=rounder,
            store=compilation.evaluator.store,
        )
        try:
            yield experiment
        finally:
            close()


def _other_bytes(graph: ir.Graph, step: QuantizeWeights, matrices: set[str]) -> int:
    """Return the bytes of what is no matrix: norms as they are, a token embedding of its own as it will be."""
    tied = {table for tables in _tables(graph, step).values() for table in tables}
    return sum(
        _float_bytes(value) if step.embedding is None else _table_bytes(value, step.embedding.group)
        for name, value in graph.initializers.items()
        if name not in matrices and name not in tied
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
