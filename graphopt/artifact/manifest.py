"""The manifest: how an artifact came to be, and what an app must know to run it."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator

from graphopt.analysis.structure.cost import WeightTotals
from graphopt.artifact.hf_config import ModelFacts
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Check, Fact, PassReport
from graphopt.tasks import TASKS
from graphopt.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"


def _known_task(name: str) -> str:
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; known are {', '.join(TASKS)}")
    return name


class Source(BaseModel):
    """Where the model came from."""

    kind: Literal["transformers", "diffusers", "gguf", "onnx"]
    name: str


class ProductCount(BaseModel):
    """How many quantized products one operator computes, with their inputs rounded in one way.

    Attributes:
        operator: such as ``MatMulNBits``.
        activations: what it rounds its inputs to, such as ``int8``; ``unknown`` where that was not read.
        count: how many there are.
    """

    operator: str
    activations: str
    count: int


class Precision(BaseModel):
    """Storage and compute precision, told apart.

    Attributes:
        storage: how many weight tensors are stored in each format.
        activations: to what the inputs of quantized products are rounded: by onnxruntime's kernel as read from its own
            optimized graph, by graphopt's operators as the graph itself says.
        notes: what to know about it, and what to set to change it.
        products: the quantized products, counted by operator and by what they round their inputs to.
    """

    storage: dict[str, int]
    activations: str
    notes: list[Fact] = []
    products: list[ProductCount] = []

    def count(self, operator: str, activations: str | None = None) -> int:
        """Return how many products an operator computes, all or those that round their inputs to ``activations``."""
        counts = [product for product in self.products if product.operator == operator]
        return sum(product.count for product in counts if activations in (None, product.activations))


class FileRecord(BaseModel):
    """Size and SHA-256 of one file of the folder."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """How an artifact came to be; ``manifest.json``.

    Attributes:
        format: version of this layout.
        source: where the model came from.
        task: what kind of model it is, see :mod:`graphopt.tasks`.
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
        parts: of an artifact of several graphs, the SHA-256 of the manifest of each other graph, by its folder.
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    source: Source
    task: Annotated[str, AfterValidator(_known_task)] = "causal_lm"
    model: ModelFacts
    notes: list[Fact] = []
    recipe: dict[str, Any] | None = None
    passes: list[PassReport] = []
    checks: list[Check] = []
    weights: WeightTotals | None = None
    precision: Precision | None = None
    session: dict[str, str] = {}
    versions: dict[str, str] = {}
    files: dict[str, FileRecord] = {}
    parts: dict[str, str] = {}

    @field_validator("files", "parts")
    @classmethod
    def _of_this_folder(cls, names: dict[str, Any]) -> dict[str, Any]:
        for name in names:
            if name in ("", ".", "..", MANIFEST) or {"/", "\\", "\0"} & set(name):
                raise ValueError(f"{name!r} is not the name of another file in this folder")
        return names

    def checks_of(self, report: PassReport) -> list[Check]:
        """Return the checks that are about one run of a pass."""
        return [check for check in self.checks if (check.after, check.run) == (report.name, report.run)]

    def check(self, name: str, after: str | None = None) -> Check:
        """Return the last check of this name, or the last after a pass: ``manifest.check("logits", after="rotate")``.

        Raises:
            LookupError: there is none; names those that there are.
        """
        checks = [check for check in self.checks if check.name == name and after in (None, check.after)]
        if not checks:
            names = ", ".join(f"{check.name} after {check.after}" for check in self.checks) or "none"
            raise LookupError(f"no check {name}{f' after {after}' if after else ''} was made; there are: {names}")
        return checks[-1]


def read_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json`` of an artifact.

    Raises:
        InputError: it is missing or not a manifest.
    """
    file = folder / MANIFEST
    try:
        return Manifest.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise InputError("there is no such folder", file=folder, remedy="check its name") from error
        raise InputError("the folder has no manifest", file=file, remedy="make it with `graphopt export`") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise InputError(f"the manifest cannot be read: {error}", file=file) from error


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of what makes an artifact, and of ``packages``; those not installed are left out."""
    # graphopt says its own version: run from a checkout, it is no installed package.
    versions = {"graphopt": VERSION}
    for package in ("onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
