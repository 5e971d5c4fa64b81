"""The folder that an app deploys: model, weights, tokenizer, configuration, and a manifest of how it came to be.

    model.onnx  model.onnx.data  manifest.json  tokenizer.json  config.json  ...

A folder appears whole or not at all: it is written under a temporary name beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, ValidationError

import graphopt
from graphopt.analysis.cost import WeightTotals
from graphopt.analysis.interface import Interface
from graphopt.errors import InputError
from graphopt.genai import GENAI_CONFIG, genai_config
from graphopt.onnx_file import load
from graphopt.passes.base import PassReport
from graphopt.verify import Check

MODEL = "model.onnx"
DATA = "model.onnx.data"
MANIFEST = "manifest.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
"""Files of a Hugging Face folder that an artifact carries along unchanged, where they exist."""


class ModelFacts(BaseModel):
    """What an app must know about the model and cannot read from its graph; ``None`` where nobody said."""

    architecture: str | None = None
    max_positions: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []


class Source(BaseModel):
    """Where the model came from."""

    kind: Literal["transformers", "onnx"]
    name: str


class Precision(BaseModel):
    """Storage and compute precision, told apart.

    Attributes:
        storage: how many weight tensors are stored in each format.
        activations: to what the runtime rounds the inputs of quantized products, as read from its own optimized graph.
        note: the same in words, with what to set to change it.
    """

    storage: dict[str, int]
    activations: str
    note: str


class FileRecord(BaseModel):
    """Size and SHA-256 of one file of the folder."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """How an artifact came to be; ``manifest.json``.

    Attributes:
        format: version of this layout.
        source: where the model came from.
        model: facts that an app needs.
        notes: what a reader should know and no other field says, such as a tokenizer that was not there.
        recipe: the recipe that was applied, or ``None`` for a plain export.
        passes: what each pass did and left alone.
        checks: what was proved or measured after each pass.
        weights: size of the weights.
        precision: storage and compute precision.
        session: onnxruntime session entries that the recipe means; a plain session without them uses its defaults.
        versions: packages that made it.
        files: size and hash of every other file of the folder.
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    source: Source
    model: ModelFacts
    notes: list[str] = []
    recipe: dict[str, Any] | None = None
    passes: list[PassReport] = []
    checks: list[Check] = []
    weights: WeightTotals | None = None
    precision: Precision | None = None
    session: dict[str, str] = {}
    versions: dict[str, str] = {}
    files: dict[str, FileRecord] = {}


@dataclass
class Artifact:
    """An opened folder, or a plain ``.onnx`` file that was let in at the same door.

    Attributes:
        model: the graph; its weights stay on disk until they are read.
        manifest: how it came to be.
        companions: files to carry along, by name.
        keep: what must live as long as the model does, such as the temporary folder that its weights lie in.
    """

    model: ir.Model
    manifest: Manifest
    companions: Mapping[str, Path] = field(default_factory=dict)
    keep: object = None


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
    folder = onnx_file.parent
    companions = {name: folder / name for name in COMPANIONS if (folder / name).is_file()}
    if (folder / MANIFEST).is_file() and path.is_dir():
        manifest = read_manifest(folder)
        _check_sizes(manifest, folder)
    else:
        manifest = Manifest(source=Source(kind="onnx", name=str(path)), model=facts_of_config(folder))
    return Artifact(model, manifest, companions)


def read_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json`` of an artifact.

    Raises:
        InputError: it is missing or not a manifest.
    """
    file = folder / MANIFEST
    try:
        return Manifest.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError("the folder has no manifest", file=file, remedy="make it with `graphopt export`") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise InputError(f"the manifest cannot be read: {error}", file=file) from error


def write(
    artifact: Artifact,
    output: str | Path,
    *,
    overwrite: bool = False,
    on_tensor: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write ``artifact`` to the folder ``output``, whole or not at all, and return its final manifest.

    Args:
        artifact: what to write; its weights are evaluated one by one, so memory holds the largest, not their sum.
        output: the folder to make.
        overwrite: whether an artifact that is already there may be replaced.
        on_tensor: called with (tensors written, tensors in all).

    Raises:
        InputError: ``output`` exists and ``overwrite`` is false, or it is not an artifact that may be replaced.
    """
    with new_folder(Path(output), overwrite=overwrite) as folder:

        def count(_: object, progress: ir.external_data.CallbackInfo) -> None:
            if on_tensor is not None:
                on_tensor(progress.index + 1, progress.total)

        ir.save(artifact.model, folder / MODEL, external_data=DATA, callback=count)
        for name, source in artifact.companions.items():
            shutil.copyfile(source, folder / name)
        notes = _write_genai_config(artifact, folder)
        files = {file.name: _record_of(file) for file in sorted(folder.iterdir())}
        manifest = artifact.manifest.model_copy(update={"files": files, "notes": notes})
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


@contextlib.contextmanager
def new_folder(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder that takes the name ``output`` when the block ends well, and vanishes when it does not.

    Raises:
        InputError: ``output`` exists, and it is not an artifact or ``overwrite`` is false.
    """
    check_output(output, overwrite=overwrite)
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as temporary:
        made = Path(temporary) / "new"
        made.mkdir()
        yield made
        if output.exists():
            output.rename(Path(temporary) / "old")
        made.rename(output)


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


def verify_files(folder: Path) -> None:
    """Confirm that every file of an artifact has the size and hash its manifest says.

    Raises:
        InputError: a file is missing, or differs.
    """
    for name, record in read_manifest(folder).files.items():
        file = folder / name
        if not file.is_file():
            raise InputError("a file of the artifact is missing", file=file, remedy="make the artifact again")
        if _record_of(file) != record:
            raise InputError(
                "a file of the artifact is not what its manifest says", file=file, remedy="make the artifact again"
            )


def _write_genai_config(artifact: Artifact, folder: Path) -> list[str]:
    """Write ``genai_config.json`` if onnxruntime-genai can run the graph; return the manifest's notes, with why not."""
    facts = artifact.manifest.model
    config = genai_config(
        Interface.of_graph(artifact.model.graph),
        MODEL,
        max_positions=facts.max_positions,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=facts.eos_token_ids,
        session=artifact.manifest.session,
    )
    prefix = f"no {GENAI_CONFIG}: "
    notes = [note for note in artifact.manifest.notes if not note.startswith(prefix)]
    if isinstance(config, str):
        return [*notes, prefix + config]
    (folder / GENAI_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return notes


def _record_of(file: Path) -> FileRecord:
    with file.open("rb") as stream:
        return FileRecord(bytes=file.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def _check_sizes(manifest: Manifest, folder: Path) -> None:
    # A file cut between two parts of the protocol still parses. Hashes take as long as reading: see verify_files.
    for name in manifest.files.keys() & {MODEL, DATA}:
        file = folder / name
        if file.is_file() and file.stat().st_size != manifest.files[name].bytes:
            raise InputError(
                f"the file has {file.stat().st_size} bytes, its manifest says {manifest.files[name].bytes}",
                file=file,
                remedy="is it truncated? make the artifact again",
            )


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of what makes an artifact, and of ``packages``; those not installed are left out."""
    # graphopt says its own version: run from a checkout, it is no installed package.
    versions = {"graphopt": graphopt.__version__}
    for package in ("onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def facts_of_config(folder: Path) -> ModelFacts:
    """Read what an app must know from the ``config.json`` and ``generation_config.json`` of a Hugging Face folder."""
    config = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    text = config | config.get("text_config", {})
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    return ModelFacts(
        architecture=next(iter(config.get("architectures") or []), None),
        max_positions=text.get("max_position_embeddings", text.get("n_positions")),
        bos_token_id=generation.get("bos_token_id", text.get("bos_token_id")),
        eos_token_ids=[] if eos is None else eos if isinstance(eos, list) else [eos],
    )


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the file is not JSON: {error}", file=file) from error
    return content if isinstance(content, dict) else {}
