"""The work folder: evaluated weights of one compilation on disk, so that one that was cut off goes on where it was."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from graphopt.errors import InputError, VerificationError
from graphopt.graph.weights.store import Store
from graphopt.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = "graphopt-work"
# NumPy's and BLAS's order of summation, and the rounding of ml_dtypes, may change what an expression evaluates to.
_VERSIONS = f"graphopt {VERSION}, numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}"
_WEIGHTS, _STATISTICS, _NEW = "weights", "statistics", "new"


def default_work_folder(output: Path) -> Path:
    """Return where work on ``output`` lies unless the caller chooses: ``.OUTPUT-work`` beside it."""
    output = output.absolute()
    return output.parent / f".{output.name}-work"


def open_work_folder(output: Path, choice: Path | None = None) -> Path:
    """Make the work folder, or go on with the one that is there.

    What other versions of graphopt, NumPy or ml_dtypes left in it is thrown away.

    Args:
        output: the artifact that is worked on.
        choice: another place than the default.

    Raises:
        InputError: the place is taken by something else, or cannot be made.
    """
    folder = (choice or default_work_folder(output)).absolute()
    mark = folder / _MARK
    if mark.is_file() and mark.read_text(encoding="utf-8") != _VERSIONS:
        shutil.rmtree(folder)
    if mark.is_file():
        return folder
    try:
        # Shards may start at the same time: the folder appears with its mark in it, or not at all.
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        (draft / _MARK).write_text(_VERSIONS, encoding="utf-8")
        try:
            draft.rename(folder)
        except OSError:
            shutil.rmtree(draft)
    except OSError as error:
        raise InputError(f"the work folder cannot be made: {error.strerror}", file=folder) from error
    if not mark.is_file():
        raise InputError("this is not a work folder of graphopt", file=folder, remedy="choose an empty one for --work")
    return folder


def write_whole(file: Path, text: str) -> None:
    """Write a file of a work folder so that other processes see all of it or none of it."""
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(name, file)


@contextlib.contextmanager
def work_folder(output: Path, choice: Path | None = None) -> Iterator[Path]:
    """Give the work folder, and remove it when the block ends well.

    Where the model is refused or the disk is full, the default folder is removed too; a chosen one stays, as either
    does where the process is killed or interrupted, so that the next run goes on from it.

    Raises:
        InputError: as for :func:`open_work_folder`.
    """
    target = (choice or default_work_folder(output)).absolute()
    new_parents = [parent for parent in target.parents if not parent.exists()]
    folder = open_work_folder(output, choice)
    # What a run that was killed left of the artifact itself.
    shutil.rmtree(folder / _NEW, ignore_errors=True)
    try:
        yield folder
    except (InputError, VerificationError):
        if choice is None:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # others may have put something there
                for parent in new_parents:
                    parent.rmdir()
        raise
    shutil.rmtree(folder, ignore_errors=True)


def store_in(folder: Path) -> Store:
    """Return the store of a work folder."""
    return Store(folder / _WEIGHTS)


def statistics_in(folder: Path) -> Path:
    """Return where statistics lie in a work folder."""
    return folder / _STATISTICS


def new_in(folder: Path) -> Path:
    """Return an empty folder within a work folder; what an earlier run left there is gone."""
    shutil.rmtree(folder / _NEW, ignore_errors=True)
    (folder / _NEW).mkdir()
    return folder / _NEW
