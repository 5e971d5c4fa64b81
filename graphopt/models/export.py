"""The door: a Hugging Face model, a GGUF file, or an ONNX file that is there already, becomes an artifact."""

from __future__ import annotations

import importlib.resources
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphopt.analysis.structure.cost import weight_totals
from graphopt.analysis.structure.ports import past_port
from graphopt.artifact import artifact
from graphopt.artifact.artifact import COMPANIONS, MODEL, MTP, Artifact
from graphopt.artifact.hf_config import PREPROCESSOR, PROCESSOR, dense_files, facts_of
from graphopt.artifact.manifest import Manifest, Source, installed_versions
from graphopt.compile.importing import import_artifact
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Rule
from graphopt.models.agreement import MAIN, NOT_REQUESTED, check_agreement, not_covered
from graphopt.models.checkpoint import NO_HEAD, NO_TOKENIZER, NOT_BESIDE, NOT_IN_FOLDER
from graphopt.models.denoisers import denoiser_folder
from graphopt.tasks import TASKS, task_of
from graphopt.tasks.causal_lm import CAUSAL_LM
from graphopt.tasks.denoiser import DENOISER
from graphopt.tasks.mtp_head import MTP_HEAD
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.graph.diagnostics import Check, Fact
    from graphopt.models.loading import LoadedModel
    from graphopt.tasks import Task

NO_PROCESSOR = Rule(
    "export.no-processor",
    f"there is no {PREPROCESSOR}, so nothing says how {{what}} become numbers: `graphopt run` cannot read them",
)

# Files from which transformers can make a tokenizer.json, where a folder has none. Without any of them transformers
# would make up an empty tokenizer.
_VOCABULARIES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True)
class _Options:
    """What the caller of :func:`export` asked for."""

    run: bool
    weights: bool
    say: Progress
    mtp: bool = False


def shipped_models() -> dict[str, Path]:
    """Return the folder of each model that ships with the package, by name."""
    folders = importlib.resources.files("graphopt.models").iterdir()
    return {folder.name: Path(str(folder)) for folder in folders if (folder / "config.json").is_file()}


def export(
    model: str | Path,
    output: str | Path,
    *,
    overwrite: bool = False,
    run: bool = True,
    weights: bool = True,
    part_size: int | None = None,
    mtp: bool = False,
    on_stage: Progress = silent,
) -> Manifest:
    """Write the model as an artifact: one float32 graph, with its tokenizer and configuration.

    Args:
        model: the name of a shipped model, a Hugging Face folder, an ``.onnx`` file or a folder that holds one, or the
            id of a model on the Hugging Face hub; the first of these that exists. Or a ``.gguf`` file, or
            ``owner/name:file.gguf`` for one on the hub.
        output: the artifact's folder, which appears whole or not at all.
        overwrite: whether an artifact that is already there may be replaced.
        run: whether to run the graph against transformers, which loads the whole model.
        weights: whether to read and write weights. Without them a ``config.json`` is enough, and the artifact holds
            the graph alone: it can be looked at, and not run.
        part_size: the most bytes in a file of weights; ``None`` for one file.
        mtp: whether to export the layer that predicts one more token too, which drafts with ``--speculate mtp``.
        on_stage: called with a line about what is being done, and with each note that the manifest will hold.

    Returns:
        The manifest; its ``notes`` say what was not there to carry along.

    Raises:
        InputError: there is no such model, it cannot be read, it is neither a causal language model nor an encoder, or
            ``output`` is taken; or ``mtp`` is asked of a checkpoint that has no such layer.
        MissingDependencyError: a Hugging Face model needs torch and transformers, and a ``.gguf`` file also gguf; an
            ``.onnx`` file needs none of them.
        VerificationError: the graph does not compute what transformers does.
    """
    artifact.check_output(Path(output), overwrite=overwrite)
    if not weights and (_is_onnx(Path(model)) or str(model).endswith(".gguf")):
        raise InputError("only a Hugging Face model is exported without weights", file=model)
    source = shipped_models().get(str(model), model)
    if mtp and (_is_onnx(Path(source)) or str(source).endswith(".gguf") or not weights):
        raise InputError(
            "the layer that predicts one more token is exported with the weights of a Hugging Face model only",
            file=model,
            remedy="leave --mtp out",
        )
    with tempfile.TemporaryDirectory(prefix="graphopt-") as temporary:
        if _is_onnx(Path(source)):
            result = import_artifact(_from_onnx(Path(source), str(model)), on_stage)
        elif str(source).endswith(".gguf"):
            result = _from_gguf(str(source), Path(temporary), _Options(run, weights, on_stage))
        elif (folder := denoiser_folder(source)) is not None:
            result = _from_diffusers(folder, str(model), _Options(run, weights, on_stage))
        else:
            _check_exists(source)
            options = _Options(run, weights, on_stage, mtp)
            result = _from_transformers(str(source), str(model), Path(temporary), options)
        for note in result.manifest.notes:
            on_stage(str(note))
        on_stage("writing the artifact")
        return artifact.write(result, output, overwrite=overwrite, weights=weights, part_size=part_size)


def _is_onnx(path: Path) -> bool:
    return path.suffix == ".onnx" or (path / MODEL).is_file()


def _check_exists(source: str | Path) -> None:
    """Refuse a path that is not there; ``name`` and ``owner/name`` may still be ids on the hub."""
    looks_like_id = isinstance(source, str) and source.count("/") <= 1 and not source.startswith((".", "/", "~"))
    if Path(source).is_dir() or (looks_like_id and not Path(source).exists()):
        return
    raise InputError(
        "there is no model here" if not Path(source).exists() else "the file is no ONNX model",
        file=source,
        remedy="give a Hugging Face folder or id, a .gguf or .onnx file, or a shipped model "
        f"({', '.join(shipped_models())})",
    )


def _from_onnx(path: Path, name: str) -> Artifact:
    result = artifact.read(path)
    task = task_of(result.model.graph)
    try:
        task.check(result.model.graph)
    except InputError as error:
        raise InputError(error.message, file=path, tensor=error.tensor, remedy=error.remedy) from error
    manifest, notes = result.manifest, list(result.manifest.notes)
    if task.reads == "texts" and "tokenizer.json" not in result.companions and not manifest.files:
        notes.append(NO_TOKENIZER(why=NOT_BESIDE()))
    if task.caches and not any(past_port(value) is not None for value in result.model.graph.inputs):
        raise InputError(
            "the graph has no key-value cache, so it cannot generate token by token",
            file=path,
            remedy="export it with past_key_values inputs and present outputs",
        )
    result.manifest = manifest.model_copy(
        update={
            "source": Source(kind="onnx", name=name) if not manifest.files else manifest.source,
            "task": task.name,
            "weights": weight_totals(result.model),
            "versions": manifest.versions or installed_versions(),
            "notes": notes,
        }
    )
    return result


def _from_transformers(source: str, name: str, temporary: Path, options: _Options) -> Artifact:
    # Imported here, since torch and transformers behind it are optional and slow to load.
    from graphopt.models.loading import load, outline

    options.say("loading the model" if Path(source).is_dir() else "asking the Hugging Face hub for the model")
    checkpoint = load(source) if options.weights else outline(source)
    companions, notes = _companions(source, checkpoint.model, temporary)
    facts_from = Path(source) if Path(source).is_dir() else temporary
    return _trace_checkpoint(checkpoint, Source(kind="transformers", name=name), facts_from, companions, notes, options)


def _from_diffusers(folder: Path, name: str, options: _Options) -> Artifact:
    from graphopt.models.denoisers import load_denoiser, trace_denoiser

    if not options.weights:
        raise InputError("a denoiser is not exported without weights", file=folder)
    options.say("loading the model")
    model = load_denoiser(folder)
    options.say("tracing it into one ONNX graph")
    program = trace_denoiser(model, folder)
    if options.run:
        options.say("running it against diffusers")
        check = check_agreement(lambda: model, {MAIN: program})
    else:
        check = not_covered(NOT_REQUESTED())
    manifest = Manifest(
        source=Source(kind="diffusers", name=name),
        task=DENOISER.name,
        model=facts_of(folder, DENOISER.name),
        checks=[check],
        weights=weight_totals(program),
        versions=installed_versions("torch", "transformers", "diffusers"),
    )
    return Artifact(program, manifest, {"config.json": folder / "config.json"})


def _from_gguf(source: str, temporary: Path, options: _Options) -> Artifact:
    from graphopt.models.checkpoint import save_companions
    from graphopt.models.gguf.checkpoint import fill, find_gguf, outline_gguf
    from graphopt.models.loading import LoadedModel, weights_of
    from graphopt.quantization.gguf.file import read_once

    path = find_gguf(source)
    assert path is not None
    options.say("loading the model")
    with read_once():
        torch_model, weights = outline_gguf(path)
        notes = save_companions(str(path.parent), torch_model, temporary, gguf_file=path.name)
    companions = {name: temporary / name for name in COMPANIONS if (temporary / name).is_file()}
    checkpoint = LoadedModel(torch_model, weights_of(torch_model, weights), lambda: fill(torch_model, weights), [])
    return _trace_checkpoint(checkpoint, Source(kind="gguf", name=source), temporary, companions, notes, options)


def _trace_checkpoint(
    checkpoint: LoadedModel,
    origin: Source,
    facts_from: Path,
    companions: dict[str, Path],
    notes: list[Fact],
    options: _Options,
) -> Artifact:
    from graphopt.models.mtp_head import give_hidden
    from graphopt.models.trace import task_of_model
    from graphopt.models.unrolling import trace_loaded

    main = task_of_model(checkpoint.model)
    # Its embedding and lm_head are the model's, whose parameters are replaced when it is traced.
    head = _load_head(checkpoint, main, origin.name) if options.mtp else None
    class_name, facts = type(checkpoint.model).__name__, facts_of(facts_from, main.name)
    programs: dict[str, ir.Model] = {}
    notes += [] if head is None else head.notes
    for name, task in [*((name, TASKS[part]) for name, part in main.parts.items()), (MAIN, main)]:
        options.say(f"tracing it into {'one ONNX graph' if not main.parts else f'ONNX: {task.noun}'}")
        programs[name], trace_notes = trace_loaded(checkpoint, origin.name, task)
        notes += [note for note in (*checkpoint.notes, *trace_notes) if note not in notes]
    if options.run and options.weights:
        options.say("running it against transformers")
        check = check_agreement(checkpoint.runnable, programs, checkpoint.model.config)
    else:
        check = not_covered(NOT_REQUESTED())
    program = programs.pop(MAIN)
    traced_head = None
    if head is not None:
        traced_head = _trace_head(head, origin.name, options)
        give_hidden(program, origin.name)
    if main.auto_class == "AutoModel" and facts.architecture not in (None, class_name):
        notes.append(NO_HEAD(architecture=facts.architecture, model=class_name))
    manifest = Manifest(
        source=origin,
        task=main.name,
        model=facts,
        checks=[check],
        weights=weight_totals(program),
        notes=notes,
        versions=installed_versions("torch", "transformers"),
    )

    def part_of(task: str, model: ir.Model, part_check: Check) -> Artifact:
        update = {"task": task, "weights": weight_totals(model), "checks": [part_check]}
        return Artifact(model, manifest.model_copy(update=update), companions)

    parts = {name: part_of(main.parts[name], model, check) for name, model in programs.items()}
    if traced_head is not None:
        parts[MTP] = part_of(MTP_HEAD.name, *traced_head)
    return Artifact(program, manifest, companions, parts=parts)


def _load_head(checkpoint: LoadedModel, task: Task, source: str) -> LoadedModel:
    from graphopt.models.mtp_head import load_head

    if task is not CAUSAL_LM:
        raise InputError(
            f"a layer that predicts one more token drafts for {CAUSAL_LM.noun}, and this is {task.noun}",
            file=source,
            remedy="leave --mtp out",
        )
    return load_head(checkpoint, source)


def _trace_head(head: LoadedModel, source: str, options: _Options) -> tuple[ir.Model, Check]:
    from graphopt.models.mtp_head import give_hidden
    from graphopt.models.unrolling import trace_loaded

    options.say("tracing the layer that predicts one more token")
    program, _ = trace_loaded(head, source, MTP_HEAD)
    check = check_agreement(head.runnable, {MAIN: program}) if options.run else not_covered(NOT_REQUESTED())
    give_hidden(program, source)
    return program, check


def _companions(source: str, torch_model: Any, temporary: Path) -> tuple[dict[str, Path], list[Fact]]:
    """Return the tokenizer and configuration files by name, and notes on what is missing.

    Those of a folder are carried along unchanged; what transformers must fetch or convert is written to ``temporary``.
    """
    from graphopt.models.checkpoint import save_companions
    from graphopt.models.trace import task_of_model

    folder, task = Path(source), task_of_model(torch_model)
    notes: list[Fact] = []
    if not folder.is_dir():
        notes = save_companions(source, torch_model, temporary)
    elif task.reads != "texts":
        notes = []
    elif not (folder / "tokenizer.json").is_file():
        if any((folder / name).is_file() for name in _VOCABULARIES):
            notes = save_companions(source, None, temporary)
        else:
            notes = [NO_TOKENIZER(why=NOT_IN_FOLDER())]
    # The folder's own files win over what was made of them.
    folders = (folder, temporary) if folder.is_dir() else (temporary,)
    companions = {
        name: parent / name
        for parent in reversed(folders)
        for name in (*COMPANIONS, *task.files)
        if (parent / name).is_file()
    }
    if task.reads != "texts" and not {PREPROCESSOR, PROCESSOR} & set(companions):
        notes = [*notes, NO_PROCESSOR(what=task.reads)]
    return companions | dense_files(folders[0]), notes
