"""One model compiled by several processes that share a disk, such as the job array of a cluster.

    graphopt optimize MODEL -o OUT --shard 0/2         each evaluates its share of the weights into the work folder
    graphopt optimize MODEL -o OUT --shard 1/2
    graphopt assemble -o OUT                           checks, lowers and writes with what is there

Shards need not know of one another: which weights are whose follows from the graph alone, and each value lies under the
digest of its expression. The result has the bytes of a plain ``optimize``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from graphopt.artifact import artifact as artifacts
from graphopt.compile.compilation import Compilation, files_of
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.graph.weights import Expression, WeightTensor
from graphopt.graph.weights.evaluator import computed_weights, cost_of, group_expressions, stage_of, workers
from graphopt.graph.weights.store import StoreEntry
from graphopt.graph.weights.work_folder import (
    default_work_folder,
    open_work_folder,
    write_whole,
)
from graphopt.ort.capacity import no_room_for
from graphopt.passes.context import Statistics
from graphopt.passes.recipe import Recipe
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import onnx_ir as ir

    from graphopt.artifact.artifact import Artifact

_REQUEST = "request.json"


class Request(BaseModel):
    """What all shards of a compilation agree on.

    Attributes:
        model: the artifact or ``.onnx`` file, with its whole path.
        recipe: the recipe.
        shards: how many shards there are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    recipe: dict[str, Any]
    shards: int


def evaluate_shard(
    model: str | Path,
    recipe: Recipe,
    output: str | Path,
    shard: int,
    shards: int,
    *,
    overwrite: bool = False,
    jobs: int | Executor = 1,
    work: str | Path | None = None,
    statistics: str | Path | None = None,
    on_stage: Progress = silent,
) -> Path:
    """Evaluate one share of the weights that ``recipe`` makes, and return the work folder that they lie in.

    Nothing is checked but that the recipe can be applied: :func:`assemble` does that.

    Args:
        model: an artifact folder or an ``.onnx`` file.
        recipe: what to do to it.
        output: the artifact that :func:`assemble` will write; it names the work folder.
        shard: which share, from 0 on.
        shards: how many there are.
        overwrite: whether an artifact at ``output`` may be replaced in the end.
        jobs: as for :func:`graphopt.optimize`.
        work: as for :func:`graphopt.optimize`; all shards must see the same folder.
        statistics: as for :func:`graphopt.optimize`. A shard collects none: `graphopt calibrate` does that before.
        on_stage: called when a stage begins, with how many are done.

    Raises:
        InputError: there is no such shard, the model or the recipe cannot be used, or other shards in the work folder
            are of another model or recipe, or ``output`` cannot be written.
    """
    if not 0 <= shard < shards:
        raise InputError(
            f"there is no shard {shard}/{shards}", remedy=f"the shards are 0/{shards} to {shards - 1}/{shards}"
        )
    artifacts.check_output(Path(output), overwrite=overwrite)
    on_stage("applying the passes")
    folder = open_work_folder(Path(output), None if work is None else Path(work))
    # The other machines may not have the files that the recipe names.
    recipe = recipe.self_contained(Statistics())
    with workers(jobs, folder, files_of(model, statistics)) as executor:
        compilation = Compilation(model, recipe, work=folder, run=False, statistics=statistics, executor=executor)
        if compilation.source.parts:
            raise InputError(
                "the artifact is made of several graphs, and shares are of one",
                file=model,
                remedy="leave out --shard",
            )
        request = Request(model=str(Path(model).absolute()), recipe=recipe.model_dump(mode="json"), shards=shards)
        _agree(folder / _REQUEST, request)
        for run in compilation.apply(compilation.before_phase("lower")):
            if run.report.claims is not None and no_room_for(compilation.model) is None:
                # `assemble` proves and runs the model behind the pass, so it looks for these weights.
                _keep(compilation.model)
        expressions = [tensor.expression for _, tensor in computed_weights(compilation.model)]
        compilation.evaluator.values(
            share(expressions, shard, shards),
            lambda count, total: on_stage(stage_of("evaluating weights", executor), count, total),
        )
    _done_file(folder, shard, shards).touch()
    return folder


def assemble(
    output: str | Path,
    *,
    overwrite: bool = False,
    run: bool = True,
    jobs: int | Executor = 1,
    work: str | Path | None = None,
    statistics: str | Path | None = None,
    part_size: int | None = None,
    on_stage: Progress = silent,
) -> Artifact:
    """Check and write the model whose weights all shards have evaluated; as :func:`graphopt.optimize` otherwise.

    Raises:
        InputError: there is no work folder of shards, or some of them are not done; names which.
    """
    folder = default_work_folder(Path(output)) if work is None else Path(work)
    try:
        request = Request.model_validate_json((folder / _REQUEST).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise InputError(
            "there is no work of shards here", file=folder, remedy="run `optimize --shard` with the same -o and --work"
        ) from error
    missing = [
        f"{i}/{request.shards}" for i in range(request.shards) if not _done_file(folder, i, request.shards).is_file()
    ]
    if missing:
        raise InputError(
            f"these shards are not done: {', '.join(missing)}",
            file=folder,
            remedy="run each with `optimize --shard`; one that was cut off goes on where it was",
        )
    return optimize(
        request.model,
        Recipe.model_validate(request.recipe),
        output,
        overwrite=overwrite,
        run=run,
        jobs=jobs,
        work=folder,
        statistics=statistics,
        part_size=part_size,
        on_stage=on_stage,
    )


def parse_shard(text: str) -> tuple[int, int]:
    """Return shard and number of shards of a text such as ``0/2``.

    Raises:
        InputError: it is not of that form.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise InputError(f"{text!r} is no shard", remedy="write the shard, a slash and how many there are: 0/2, 1/2")
    return int(match[1]), int(match[2])


def share(expressions: list[Expression], shard: int, shards: int) -> list[Expression]:
    """Return the expressions that one shard evaluates: those that share work together, the load about equal."""
    loads, own_share = [0] * shards, []
    for group in group_expressions(expressions):
        lightest = loads.index(min(loads))
        members = [expressions[number] for number in group]
        loads[lightest] += cost_of(members)
        if lightest == shard:
            own_share += members
    return own_share


def _keep(model: ir.Model) -> None:
    for value, tensor in computed_weights(model):
        value.const_value = WeightTensor(StoreEntry(tensor.expression), tensor.name)


def _agree(file: Path, request: Request) -> None:
    """Write down what is asked for, or confirm that it is what other shards were asked for."""
    if not file.exists():
        write_whole(file, request.model_dump_json(indent=2))
        return
    try:
        agreement = Request.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise InputError("this is not what shards agree on", file=file, remedy="remove the work folder") from error
    if agreement != request:
        differences = [name for name in Request.model_fields if getattr(agreement, name) != getattr(request, name)]
        raise InputError(
            f"other shards in this work folder have another {' and another '.join(differences)}",
            file=file,
            remedy="give all shards the same, or remove the work folder",
        )


def _done_file(folder: Path, shard: int, shards: int) -> Path:
    return folder / f"shard-{shard}-of-{shards}.done"
