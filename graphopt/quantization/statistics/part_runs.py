"""Parts of a graph while they run: files and sessions of their own, and where what one hands to the next lies."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

from graphopt.analysis.structure.products import reads_codes
from graphopt.graph.weights.data_file import save_model
from graphopt.ort.session import entries_of_few_calls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.ort.runner import Runner


@contextlib.contextmanager
def part_file(part: ir.Model, folder: Path) -> Iterator[Path]:
    """Give the file of a part of a model, whose weights stay where they lie; ``folder`` is gone when the block ends."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(exist_ok=True)
    try:
        save_model(part, folder / "model.onnx", "model.data", in_place=True)
        yield folder / "model.onnx"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def entries_of(part: ir.Model) -> dict[str, str]:
    """Return the session entries that a part of a model is run with."""
    return entries_of_few_calls(packs=reads_codes(part.graph))


@contextlib.contextmanager
def open_part(runner: Runner, part: ir.Model, folder: Path) -> Iterator[Any]:
    """Open a part of a model on weights that stay where they lie; ``folder`` holds the rest until the block ends."""
    with part_file(part, folder) as file:
        yield runner.open(file, in_place=True, entries=entries_of(part))


def boundary_folder(folder: Path, number: int) -> Path:
    """Return the folder of what part ``number`` hands on."""
    return folder / f"boundary-{number}"
