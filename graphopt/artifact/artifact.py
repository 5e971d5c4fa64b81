"""The folder that an app deploys: model, weights, tokenizer, configuration, and a manifest of how it came to be.

    model.onnx  model.onnx.data  manifest.json  tokenizer.json  config.json  ...

A folder appears whole or not at all: it is written under a temporary name beside its place and renamed.

An artifact of several graphs, such as an encoder-decoder, is a folder of folders: the graph that makes the result lies
in ``model.onnx``, and each graph that runs before it is an artifact in a folder inside, with a manifest of its own. So
whatever works on an artifact works on each of them; what works on all of them asks :attr:`Artifact.parts`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphopt.analysis.structure.contrib import state_caches
from graphopt.analysis.structure.heads import ORIGIN
from graphopt.analysis.structure.ports import HIDDEN, POOL
from graphopt.artifact.genai import GENAI_CONFIG, genai_config, genai_images_config, genai_speech_config
from graphopt.artifact.hf_config import DENSE_FILES, PREPROCESSOR, PROCESSOR, facts_of
from graphopt.artifact.manifest import MANIFEST, FileRecord, Manifest, Source, read_manifest
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Check, Fact, Rule
from graphopt.graph.onnx_file import load
from graphopt.graph.weights import expression_of
from graphopt.graph.weights.data_file import is_part, save_model
from graphopt.graph.weights.disk import writing
from graphopt.runtime_ops import library_path
from graphopt.tasks import TASKS, task_of
from graphopt.tasks.causal_lm.interface import Interface

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from concurrent.futures import Executor

    import onnx_ir as ir

MODEL = "model.onnx"
DATA = "model.onnx.data"
HEADS = "heads.onnx"
MTP = "mtp"
"""The folder of the graph that drafts for a model, see :mod:`graphopt.tasks.mtp_head`."""
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    PREPROCESSOR,
    PROCESSOR,
    HEADS,
)
"""Files of a Hugging Face folder that an artifact carries along unchanged, where they exist; a recipe leaves heads that
draft behind, unless it has the step ``expose_hidden``."""

NO_GENAI_CONFIG = Rule("artifact.no-genai-config", f"no {GENAI_CONFIG}: {{why}}")
INTERFACE_REFUSED = Rule("artifact.interface-refused", "{error}")


@dataclass
class Artifact:
    """An opened folder, or a plain ``.onnx`` file that was let in at the same door.

    Attributes:
        model: the graph; its weights stay on disk until they are read.
        manifest: how it came to be.
        companions: files to carry along, by name.
        path: the folder or file that it was read from; ``None`` where it was made in memory.
        parts: the other graphs, by the names of their folders, see the module.
        keep: what must live as long as the model does, such as the temporary folder that its weights lie in.
    """

    model: ir.Model
    manifest: Manifest
    companions: Mapping[str, Path] = field(default_factory=dict)
    path: Path | None = None
    parts: Mapping[str, Artifact] = field(default_factory=dict)
    keep: object = None


def is_data(name: str) -> bool:
    """Return whether a file of an artifact holds weights: all of them, or a part."""
    return is_part(name, DATA)


def read(path: str | Path) -> Artifact:
    """Open an artifact folder, or a plain ``.onnx`` file with the companions beside it.

    Raises:
        InputError: there is no model, it is truncated, its opset is one that onnxruntime cannot load, its external data
            is missing, short or elsewhere, or its manifest is not one.
    """
    path = Path(path)
    onnx_file = path / MODEL if path.is_dir() else path
    if not onnx_file.is_file():
        raise InputError(
            "there is no ONNX model here", file=path, remedy=f"give a folder that holds {MODEL}, or an .onnx file"
        )
    model = load(onnx_file)
    state_caches(model)
    folder = onnx_file.parent
    companions = {name: folder / name for name in COMPANIONS if (folder / name).is_file()}
    companions |= {file.name: file for file in folder.glob(DENSE_FILES)}
    parts: dict[str, Artifact] = {}
    if (folder / MANIFEST).is_file() and path.is_dir():
        manifest = read_manifest(folder)
        parts = {name: read(folder / name) for name in manifest.parts}
        # A file cut between two parts of the protocol still parses.
        check_sizes(folder, manifest, {MODEL, *filter(is_data, manifest.files)})
    else:
        task = task_of(model.graph).name
        manifest = Manifest(source=Source(kind="onnx", name=str(path)), task=task, model=facts_of(folder, task))
    files = TASKS[manifest.task].files
    companions |= {name: folder / name for name in files if (folder / name).is_file()}
    return Artifact(model, manifest, companions, path, parts)


def write(
    artifact: Artifact,
    output: str | Path,
    *,
    overwrite: bool = False,
    on_tensor: Callable[[int, int], None] | None = None,
    executor: Executor | None = None,
    parent: Path | None = None,
    examine: Callable[[Path], Check | None] | None = None,
    weights: bool = True,
    part_size: int | None = None,
) -> Manifest:
    """Write ``artifact`` to the folder ``output``, whole or not at all, and return its final manifest.

    Args:
        artifact: what to write; its weights are evaluated one by one, so memory holds the largest, not their sum.
        output: the folder to make.
        overwrite: whether an artifact that is already there may be replaced.
        on_tensor: called with (tensors written, tensors in all).
        executor: what evaluates weights; ``None`` for this process.
        parent: where the temporary folder lies; beside ``output`` by default, or where this is on another disk.
        examine: called with the complete folder before it takes its name; the check that it returns is written down,
            and an error that it raises leaves nothing behind.
        weights: whether to write the weights; without them the artifact holds the graph, and cannot be opened.
        part_size: the most bytes in a file of weights, see :func:`graphopt.graph.weights.data_file.save_model`.

    Raises:
        InputError: ``output`` exists and ``overwrite`` is false, it is not an artifact that may be replaced, or the
            disk is too small.
    """
    with new_folder(Path(output), overwrite=overwrite, parent=parent) as folder:
        options: dict[str, Any] = {"executor": executor, "on_tensor": on_tensor, "part_size": part_size}
        manifest = _write_into(folder, artifact, weights=weights, **options)
        check = None if examine is None else examine(folder)
        if check is not None:
            manifest = manifest.model_copy(update={"checks": [*manifest.checks, check]})
            with writing(folder):
                _write_manifest(manifest, folder)
    return manifest


def _write_into(folder: Path, artifact: Artifact, **options: Any) -> Manifest:
    """Write all graphs of an artifact to an empty folder, and return its manifest."""
    parts: dict[str, str] = {}
    for name, part in artifact.parts.items():
        (folder / name).mkdir()
        _write_into(folder / name, part, **options)
        parts[name] = _record_of(folder / name / MANIFEST).sha256
    save_model(artifact.model, folder / MODEL, DATA, **options)
    with writing(folder):
        notes = write_companions(artifact, folder)
        files = {file.name: _record_of(file) for file in sorted(folder.iterdir()) if file.is_file()}
        manifest = artifact.manifest.model_copy(update={"files": files, "notes": notes, "parts": parts})
        _write_manifest(manifest, folder)
    return manifest


def read_weights_from(artifact: Artifact, output: Path) -> None:
    """Let the weights of an artifact be read from where it was written, not from what they were made of."""
    for name, part in artifact.parts.items():
        read_weights_from(part, output / name)
    _read_weights(artifact.model, output)


def _read_weights(model: ir.Model, output: Path) -> None:
    for graph, written_graph in zip(model.graphs(), load(output / MODEL).graphs(), strict=True):
        for name, value in graph.initializers.items():
            value.const_value = written_graph.initializers[name].const_value


@contextlib.contextmanager
def new_folder(output: Path, *, overwrite: bool = False, parent: Path | None = None) -> Iterator[Path]:
    """Give a temporary folder that takes the name ``output`` when the block ends well, and vanishes when it does not.

    Raises:
        InputError: ``output`` exists, and it is not an artifact or ``overwrite`` is false.
    """
    check_output(output, overwrite=overwrite)
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    # A folder can be renamed on its own disk only.
    parent_on_disk = (
        parent if parent is not None and parent.stat().st_dev == output.parent.stat().st_dev else output.parent
    )
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=parent_on_disk) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        yield new
        if output.exists():
            output.rename(Path(temporary) / "old")
        new.rename(output)


def check_output(output: Path, *, overwrite: bool = False) -> None:
    """Refuse a place that :func:`write` would refuse, before any work is done.

    Raises:
        InputError: ``output`` exists, and it is not an artifact or ``overwrite`` is false.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise InputError("the output exists and is not an artifact of graphopt", file=output, remedy="choose another")
    if not overwrite:
        raise InputError("the output exists", file=output, remedy="choose another, or pass --overwrite")


def origin_of(artifact: Artifact) -> str:
    """Return the SHA-256 of the model that ``artifact`` was first made from, which `graphopt optimize` writes down.

    That of an artifact that nothing was done to is of its files by the manifest, that of a plain file of its weights.
    """
    origin = artifact.model.metadata_props.get(ORIGIN)
    if origin is not None:
        return origin
    records = artifact.manifest.files
    digest = hashlib.sha256()
    for name in sorted(name for name in records if name == MODEL or is_data(name)):
        digest.update(records[name].sha256.encode())
    if not records:
        for name, value in sorted(artifact.model.graph.initializers.items()):
            digest.update(name.encode())
            if value.const_value is not None:
                digest.update(expression_of(value.const_value).digest.encode())
    return digest.hexdigest()


def check_sizes(folder: Path, manifest: Manifest, names: Collection[str]) -> None:
    """Refuse files that have another size than the manifest says; hashes take as long as reading: :func:`verify_files`.

    Args:
        folder: the artifact.
        manifest: its manifest.
        names: which files; those that the manifest does not list are left out.

    Raises:
        InputError: a file is missing, or has another size.
    """
    for name in sorted(manifest.files.keys() & names):
        file, expected_size = folder / name, manifest.files[name].bytes
        size = file.stat().st_size if file.is_file() else None
        if size != expected_size:
            fault = (
                "is missing" if size is None else f"has {size} bytes where its manifest says {expected_size}: cut off?"
            )
            raise InputError(f"a file of the artifact {fault}", file=file, remedy="copy or make the artifact again")


def verify_files(folder: Path) -> None:
    """Confirm that the files of an artifact are those that its manifest lists, with the sizes and hashes that it says.

    Raises:
        InputError: a file is missing, differs, or is not listed.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest, manifest.files)
    for name, record in manifest.files.items():
        if _record_of(folder / name) != record:
            raise InputError(
                "a file of the artifact is not what its manifest says: the hash differs",
                file=folder / name,
                remedy="it was changed or damaged; make the artifact again",
            )
    for name, digest in manifest.parts.items():
        verify_files(folder / name)
        if _record_of(folder / name / MANIFEST).sha256 != digest:
            raise InputError(
                "a graph of the artifact is not the one that its manifest says: the hash differs",
                file=folder / name / MANIFEST,
                remedy="it was changed or damaged; make the artifact again",
            )
    names = {*manifest.files, *manifest.parts, MANIFEST}
    unlisted_files = sorted({path.name for path in folder.iterdir()} - names)
    if unlisted_files:
        raise InputError(
            "its manifest does not list this file", file=folder / unlisted_files[0], remedy="move it out of there"
        )


def write_companions(artifact: Artifact, folder: Path) -> list[Fact]:
    """Write what lies beside the model, with ``genai_config.json`` where it can be, and return the manifest's notes."""
    used = artifact.manifest.recipe is None or any(value.name == HIDDEN for value in artifact.model.graph.outputs)
    for name, source in artifact.companions.items():
        if name != HEADS or used:
            shutil.copyfile(source, folder / name)
    why_not = TASKS[artifact.manifest.task].why_no_genai()
    try:
        config = why_not or _genai_config(artifact, folder)
    except InputError as error:
        config = INTERFACE_REFUSED(error=error.message)
    notes = [note for note in artifact.manifest.notes if note.code != NO_GENAI_CONFIG.code]
    if isinstance(config, Fact):
        return [*notes, NO_GENAI_CONFIG(why=config)]
    (folder / GENAI_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return notes


def _genai_config(artifact: Artifact, folder: Path) -> dict[str, Any] | Fact:
    """Return the configuration by which onnxruntime-genai runs an artifact, or why there is none."""
    facts, interface = artifact.manifest.model, Interface.of_graph(artifact.model.graph)
    options: dict[str, Any] = {
        "max_positions": facts.max_positions,
        "bos_token_id": facts.bos_token_id,
        "eos_token_ids": facts.eos_token_ids,
        "session": {**artifact.manifest.session, **_library_beside(artifact.model, folder)},
    }
    files = {name: f"{name}/{MODEL}" for name in artifact.parts}
    if "vision" in artifact.parts:
        vision = artifact.parts["vision"].model.graph
        return genai_images_config(
            interface,
            MODEL,
            vision,
            files,
            image_token_id=facts.image_token_id,
            start_token_id=facts.vision_start_token_id,
            **options,
        )
    for name, part in artifact.parts.items():  # there is one, the encoder
        return genai_speech_config(interface, MODEL, part.model.graph, files[name], **options)
    return genai_config(interface, MODEL, pool=json.loads(artifact.model.metadata_props.get(POOL, "null")), **options)


def _library_beside(model: ir.Model, folder: Path) -> dict[str, str]:
    """Copy graphopt's kernels beside a model that an engine runs, and return the entry by which that finds them.

    The engine takes a library only by a name relative to the model. Without kernels here, bodies run there.
    """
    library = library_path("cpu")
    if POOL not in model.metadata_props or library is None:
        return {}
    shutil.copyfile(library, folder / library.name)
    return {"custom_ops_library": library.name}


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _record_of(file: Path) -> FileRecord:
    with file.open("rb") as stream:
        return FileRecord(bytes=file.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
