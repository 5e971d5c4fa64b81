"""One text through one part of a model, on any machine: what it adds to the sums goes to a file in a shared folder.

Files are written whole or not at all, and their names say of which part and text they are: what is there already when
work was cut off is not done again.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.graph.weights.disk import writing
from graphopt.ort.session import open_session, run
from graphopt.quantization.rounding.single_thread import one_thread
from graphopt.quantization.statistics.moments import Terms, terms_of
from graphopt.util.processors import processors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Part:
    """A part of a model, in a file.

    Attributes:
        file: the model; its weights stay where they are.
        entries: session entries of onnxruntime.
        native: whether graphopt's own kernels run.
        before: the values that it reads of the part before.
        after: the values that parts behind it read.
        taps: the values that are summed up.
    """

    file: str
    entries: Mapping[str, str]
    native: bool
    before: tuple[str, ...]
    after: tuple[str, ...]
    taps: tuple[str, ...]


@dataclass(frozen=True)
class Window:
    """A text on its way through a part.

    Attributes:
        part: the part.
        extent: what the text is, for messages.
        feeds: inputs of the model.
        before: the folder of the values that the part before gave; it is there if there are any.
        after: the folder for the values that this part gives.
        sums: the file for what is summed up.
    """

    part: Part
    extent: str
    feeds: Mapping[str, Array]
    before: str
    after: str
    sums: str


def run_window(window: Window) -> None:
    """Run a text through a part, and write what comes of it.

    Raises:
        InputError: onnxruntime cannot run the part, or the disk is full.
    """
    part = window.part
    if Path(window.sums).is_file() and (not part.after or Path(window.after).is_dir()):
        return
    session = _session(part.file, tuple(part.entries.items()), part.native)
    values = pass_through(session, window.extent, {**window.feeds, **load_values(Path(window.before), part.before)})
    with one_thread():
        sums = [[terms.copy() for terms in terms_of(values[tap])] for tap in part.taps]
    save_values(Path(window.after), part.after, values, Path(window.before), part.before)
    file = Path(window.sums)
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    try:
        with writing(file.parent), os.fdopen(descriptor, "wb") as stream:
            pickle.dump(sums, stream, protocol=5)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def take_sums(window: Window) -> Iterator[list[Terms]]:
    """Yield what each tap adds, in the order of taps, and remove the file."""
    file = Path(window.sums)
    with file.open("rb") as stream:
        yield from pickle.load(stream)
    file.unlink()


def pass_through(session: Any, extent: str, values: Mapping[str, Array]) -> dict[str, Array]:
    """Return values, and the outputs of a session that read some of them.

    Raises:
        InputError: onnxruntime cannot run it.
    """
    outputs = [port.name for port in session.get_outputs()]
    feeds = {port.name: values[port.name] for port in session.get_inputs()}
    try:
        results = run(session, outputs, feeds)
    except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
        raise InputError(f"onnxruntime cannot run the model on {extent}: {error}") from error
    return {**values, **dict(zip(outputs, results, strict=True))}


def save_values(
    folder: Path,
    names: Sequence[str],
    values: Mapping[str, Array],
    before: Path | None = None,
    before_names: Sequence[str] = (),
) -> None:
    """Write some values to a folder, whole or not at all; one that is there holds them already.

    Args:
        folder: the folder.
        names: the values that are written.
        values: all values.
        before: a folder that holds some of them already: their files are linked where the disk can, not written again.
        before_names: the values that it holds.
    """
    if not names or folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    old_files = {} if before is None else {name: _value_file(before, index) for index, name in enumerate(before_names)}
    try:
        with writing(folder.parent):
            for number, name in enumerate(names):
                file = _value_file(draft, number)
                if name not in old_files or not _link(old_files[name], file):
                    np.save(file, values[name])
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft)
        if not folder.is_dir():  # another process has not been faster
            raise
    except BaseException:
        shutil.rmtree(draft)
        raise


def _value_file(folder: Path, number: int) -> Path:
    return folder / f"{number}.npy"


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name; return whether the disk could."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def load_values(folder: Path, names: Sequence[str]) -> dict[str, Array]:
    """Return the values that :func:`save_values` has written."""
    return {name: np.load(_value_file(folder, number)) for number, name in enumerate(names)}


@lru_cache(maxsize=1)
def _session(file: str, entries: tuple[tuple[str, str], ...], native: bool) -> Any:
    return open_session(Path(file), entries=dict(entries), threads=processors(), native=native, in_place=True)
