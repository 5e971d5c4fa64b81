"""What ``run`` does with a model of images or recordings: classes, boxes, shares of pixels, texts, cosines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphopt.cli.classes import print_table
from graphopt.cli.console import out, print_json
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphopt.inference.session import OpenModel
    from graphopt.inference.signals import SignalSession
    from graphopt.tasks.ports import Array

Rows = list[dict[str, Any]]

_CLASSES_PRINTED = 5
_LEAST_PROBABILITY = 0.5


def print_signals(model: OpenModel, files: Sequence[str], as_json: bool, save: Path | None = None) -> None:
    """Print what a model says of images or recordings.

    Args:
        model: the model.
        files: images or recordings.
        as_json: whether to print JSON.
        save: an ``.npz`` file for the outputs, of the first file ``0.logits`` and so on; ``None`` for none.

    Raises:
        InputError: there is no file, or ``save`` cannot be written; or see
            :meth:`graphopt.inference.signals.SignalSession.read_file`.
    """
    from graphopt.tasks.image_encoder import SignalEncoder
    from graphopt.tasks.speech_ctc import SpeechCTC

    session, outputs = _run(model, files)
    if save is not None:
        _save(outputs, save)
    if isinstance(session.task, SignalEncoder):
        return _print_cosines(files, outputs, as_json)
    rows_of, columns = _form(session)
    rows = [
        {"file": str(file), **row}
        for file, arrays in zip(files, outputs, strict=True)
        for row in rows_of(session, Path(file), arrays)
    ]
    if as_json:
        return print_json(rows)
    if isinstance(session.task, SpeechCTC) and len(rows) == 1:
        return out.print(rows[0]["text"], markup=False, highlight=False, soft_wrap=True)
    if not rows:
        return out.print(f"no thing with a probability of {_LEAST_PROBABILITY:.0%} or more")
    return print_table(rows, ("file", *columns))


def _save(outputs: Sequence[dict[str, Array]], target: Path) -> None:
    import numpy as np

    arrays = {f"{number}.{name}": array for number, by_name in enumerate(outputs) for name, array in by_name.items()}
    try:
        with target.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"the outputs cannot be written: {error}", file=target) from error


def _run(model: OpenModel, files: Sequence[str]) -> tuple[SignalSession, list[dict[str, Array]]]:
    from graphopt.inference.signals import signals_of

    session = signals_of(model)
    if not files:
        option = "--image FILE" if session.task.reads == "images" else "--audio FILE"
        raise InputError(f"{session.task.noun} reads {session.task.reads}, and there is none", remedy=f"give {option}")
    results = [session.run(session.read_file(Path(file))) for file in files]
    return session, [{name: array[0] for name, array in outputs.items()} for outputs in results]


def _form(
    session: SignalSession,
) -> tuple[Callable[[SignalSession, Path, dict[str, Array]], Rows], tuple[str, ...]]:
    """Return what makes the rows of a file, and which of their columns are printed."""
    from graphopt.tasks.image_segmenter import ImageSegmenter
    from graphopt.tasks.object_detector import ObjectDetector
    from graphopt.tasks.speech_ctc import SpeechCTC

    if isinstance(session.task, ObjectDetector):
        return _boxes, ("class", "probability", "left", "top", "right", "bottom")
    if isinstance(session.task, ImageSegmenter):
        return _shares, ("class", "share of pixels")
    if isinstance(session.task, SpeechCTC):
        return _text, ("text",)
    return _classes, ("class", "probability")


def _label(session: SignalSession, number: int) -> str:
    return session.labels[number] if number < len(session.labels) else str(number)


def _classes(session: SignalSession, _file: Path, outputs: dict[str, Array]) -> Rows:
    """Return the likeliest classes; where classes do not exclude one another, each has a probability of its own."""
    import numpy as np

    from graphopt.analysis.structure.ports import LOGITS
    from graphopt.inference.classes import probabilities_of

    logits = outputs[LOGITS].astype(np.float64)
    are_independent = session.model.manifest.model.are_labels_independent or logits.shape[-1] == 1
    shares = probabilities_of(logits, are_independent=are_independent)
    order = np.argsort(np.negative(shares), kind="stable")[:_CLASSES_PRINTED]
    return [
        {"class": _label(session, n), "probability": float(shares[n]), "logit": float(logits[n])}
        for n in map(int, order)
    ]


def _boxes(session: SignalSession, file: Path, outputs: dict[str, Array]) -> Rows:
    """Return the boxes of things, in pixels of the file, the likeliest first.

    Where the graph has one class more than the checkpoint names, the last is that of no thing and classes exclude one
    another; else each has a probability of its own.
    """
    import numpy as np

    from graphopt.analysis.structure.ports import LOGITS
    from graphopt.inference.classes import probabilities_of
    from graphopt.inference.signals import read_image
    from graphopt.tasks.object_detector import BOXES

    logits, boxes = outputs[LOGITS].astype(np.float64), outputs[BOXES].astype(np.float64)
    width, height = read_image(file).size
    has_no_thing = logits.shape[-1] != len(session.labels)
    shares = probabilities_of(logits, are_independent=not has_no_thing)
    shares = shares[:, :-1] if has_no_thing else shares
    best, probabilities = shares.argmax(-1), shares.max(-1)
    middles, sizes = boxes[:, :2], boxes[:, 2:]
    corners = np.concatenate([middles - sizes / 2, middles + sizes / 2], -1) * [width, height, width, height]
    names = ("left", "top", "right", "bottom")
    return [
        {
            "class": _label(session, int(best[row])),
            "probability": float(probabilities[row]),
            **{name: round(float(side), 1) for name, side in zip(names, corners[row], strict=True)},
        }
        for row in np.argsort(-probabilities, kind="stable")
        if probabilities[row] >= _LEAST_PROBABILITY
    ]


def _shares(session: SignalSession, _file: Path, outputs: dict[str, Array]) -> Rows:
    """Return the share of pixels of each class that has some, the largest first."""
    import numpy as np

    from graphopt.analysis.structure.ports import LOGITS

    classes = outputs[LOGITS].argmax(0)
    numbers, counts = np.unique(classes, return_counts=True)
    return [
        {"class": _label(session, int(numbers[n])), "share of pixels": float(counts[n] / classes.size)}
        for n in np.argsort(-counts, kind="stable")
    ]


def _text(session: SignalSession, _file: Path, outputs: dict[str, Array]) -> Rows:
    from graphopt.analysis.structure.ports import LOGITS

    return [{"text": session.transcribe(outputs[LOGITS])}]


def _print_cosines(files: Sequence[str], outputs: Sequence[dict[str, Array]], as_json: bool) -> None:
    """Print the cosines between embeddings: what the graph pools, else the mean of its states."""
    import numpy as np

    from graphopt.inference.embeddings.evaluate import cosine_matrix
    from graphopt.report.console_table import ConsoleTable, figure_columns

    name = list(outputs[0])[-1]  # the pooled output comes last
    embeddings = [arrays[name].astype(np.float64) for arrays in outputs]
    # States of patches are [patches, width], those of convolutions [width, height, width].
    means = [array.reshape(-1, array.shape[-1]).mean(0) if array.ndim == 2 else array for array in embeddings]
    vectors = np.stack([array.mean((1, 2)) if array.ndim == 3 else array for array in means]).astype(np.float32)
    cosines = cosine_matrix(vectors)
    if as_json:
        rows = zip(files, vectors.tolist(), cosines.tolist(), strict=True)
        return print_json([{"file": str(file), "embedding": vector, "cosines": row} for file, vector, row in rows])
    table = ConsoleTable(["", "file", *figure_columns(*map(str, range(1, len(files) + 1)))])
    for number, (file, row) in enumerate(zip(files, cosines, strict=True), start=1):
        table.add_row(str(number), str(file), *(f"{cosine:.4f}" for cosine in row))
    out.print(table)
    out.print(f"cosines of {vectors.shape[1]} numbers of {name}; --json prints them, --save FILE.npz keeps all outputs")
    return None
