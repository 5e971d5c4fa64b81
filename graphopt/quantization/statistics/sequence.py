"""Statistics one product after the other: each is seen with the inputs that it will have, behind rounded products.

    text --> [piece 0] --X--> [piece 1] --X--> ...    the original model
                 |                |
               round            round                 what reads X and Y, for H = Y^T Y and C = Y^T (X - Y)
                 |                |
    text --> [piece 0] --Y--> [piece 1] --Y--> ...    the same graph, with the matrices that were rounded so far

Every node runs twice for each text. Products that read the same value are rounded together; such a value ends a piece.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import InputError
from graphopt.graph.weights import weight_of
from graphopt.quantization.rounding.single_thread import one_thread
from graphopt.quantization.statistics.moments import Moments
from graphopt.quantization.statistics.part_runs import boundary_folder, open_part
from graphopt.quantization.statistics.partition import Piece, pieces_of
from graphopt.quantization.statistics.store import Index, InputStatistics, read_index, write_index, write_statistics
from graphopt.quantization.statistics.windows import load_values, pass_through, save_values
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.ort.runner import Runner
    from graphopt.ort.session import Array
    from graphopt.quantization.statistics.squares import Doubles
    from graphopt.tasks.ports import IntArray

    RoundProduct = Callable[[ir.Node, InputStatistics], ir.TensorProtocol | None]
    """Returns what a product will multiply by, given what its inputs look like; ``None`` where it stays as it is."""

# Tokens whose products are summed in float32 before they are added up in float64.
_TOKENS = 1024


@dataclass
class _Stream:
    """One of both models, run piece by piece."""

    model: ir.Model
    values: list[ir.Value]
    folder: Path
    pieces: list[Piece] = field(init=False)

    def __post_init__(self) -> None:
        # No room: a piece for each value, so that what a piece computes reads nothing but matrices that are rounded.
        self.pieces = pieces_of(self.model.graph, self.values, 0)


@dataclass
class _Sums:
    """Of the inputs Y of the rounded model, and of how they differ from X."""

    moments: Moments
    shift: Doubles

    def add(self, original_inputs: Array, inputs: Array, *, thread: Executor) -> None:
        """Add a text; a thread on its own takes one of the two sums, which are about as much work as one another."""
        moments_task = thread.submit(self.moments.add, inputs)
        rows = self.moments.rows
        x, y = (np.ascontiguousarray(array.reshape(-1, rows), np.float32) for array in (original_inputs, inputs))
        for start in range(0, len(y), _TOKENS):
            part = slice(start, start + _TOKENS)
            self.shift += y[part].T @ (x[part] - y[part])
        moments_task.result()


def collect_in_sequence(  # noqa: PLR0913, what a run of a model takes
    model: ir.Model,
    products: Sequence[ir.Node],
    folder: Path,
    runner: Runner,
    texts: Sequence[IntArray | Mapping[str, Array]],
    text_digest: str,
    feeds_of: Callable[[IntArray], Mapping[str, Array]],
    round_product: RoundProduct,
    on_stage: Progress = silent,
    *,
    keeps: bool = True,
) -> Index:
    """Collect what the inputs of products look like where the products before them are rounded.

    Args:
        model: the original model; it is not changed.
        products: those that are rounded.
        folder: where statistics go. What was cut off there goes on where it was.
        runner: runs the pieces.
        texts: the tokens of each text, or the inputs of each sample.
        text_digest: SHA-256 of them.
        feeds_of: returns the inputs of the graph for tokens [batch, length].
        round_product: rounds a product when its turn has come.
        on_stage: called for each piece.
        keeps: whether Hessians and shifts stay when the products that read them are rounded.

    Raises:
        InputError: the model cannot be run, or its numbers are not finite.
    """
    readers: dict[str, list[ir.Node]] = defaultdict(list)
    for product in products:
        value = product.inputs[0]
        assert value is not None
        readers[value.name or ""].append(product)
    rounded_model = model.clone()
    streams = [
        _Stream(stream_model, _values(stream_model.graph, readers), folder / name)
        for name, stream_model in (("original", model), ("rounded", rounded_model))
    ]
    statistics: dict[str, InputStatistics] = {}
    folder.mkdir(parents=True, exist_ok=True)
    feeds_of_texts = [feeds_of(text[None]) if isinstance(text, np.ndarray) else text for text in texts]
    count = len(streams[0].pieces)
    for number in range(count):
        on_stage("rounding one product after the other", number, count)
        file = folder / f"piece-{number}.json"
        piece_index = read_index(file)
        if piece_index is None:
            (tap,) = streams[0].pieces[number].taps
            sums = _run(streams, number, runner, feeds_of_texts)
            tap_statistics = write_statistics(tap, sums.moments, text_digest, folder, number, sums.shift)
            piece_index = Index(inputs={tap.name or "": tap_statistics})
            write_index(piece_index, file)
        for stream in streams:
            shutil.rmtree(boundary_folder(stream.folder, number - 1), ignore_errors=True)
        statistics |= piece_index.inputs
        for name, inputs in piece_index.inputs.items():
            for product in readers[name]:
                weight, tensor = weight_of(product, 1), round_product(product, inputs)
                if weight is not None and tensor is not None and number + 1 < count:
                    rounded_model.graph.initializers[weight.name or ""].const_value = tensor
        if not keeps:
            piece_index.drop_hessians(file)
    index = Index(inputs=statistics, has_hessians=keeps)
    write_index(index, folder / "index.json")
    for number in range(count):
        (folder / f"piece-{number}.json").unlink()
    for stream in streams:
        shutil.rmtree(stream.folder, ignore_errors=True)
    return index


def _values(graph: ir.Graph, names: Mapping[str, object]) -> list[ir.Value]:
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    return [value for value in values if value.name in names]


def _run(
    streams: Sequence[_Stream],
    number: int,
    runner: Runner,
    feeds_of_texts: Sequence[Mapping[str, Array]],
) -> _Sums:
    """Run a piece of both models on every text; what they hand on goes to the disk."""
    sums: _Sums | None = None
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        thread = stack.enter_context(ThreadPoolExecutor(1))
        sessions = []
        for stream in streams:
            stream.folder.mkdir(exist_ok=True)
            shutil.rmtree(boundary_folder(stream.folder, number), ignore_errors=True)
            part = stream.pieces[number].part(stream.model)
            sessions.append(stack.enter_context(open_part(runner, part, stream.folder / "part")))
        for row, feeds in enumerate(feeds_of_texts):
            taps = [
                _run_text(stream, number, session, feeds, str(row))
                for stream, session in zip(streams, sessions, strict=True)
            ]
            if taps[0].shape != taps[1].shape:
                raise InputError(
                    f"a product reads {list(taps[0].shape)} numbers, and {list(taps[1].shape)} where products before "
                    "it are rounded: which tokens it sees depends on them",
                    tensor=streams[0].pieces[number].taps[0].name,
                    remedy="--set quantize_weights.inputs=original",
                )
            if sums is None:
                rows = taps[0].shape[-1]
                sums = _Sums(Moments(rows), np.zeros((rows, rows)))
            sums.add(*taps, thread=thread)
    assert sums is not None
    return sums


def _run_text(stream: _Stream, number: int, session: Any, feeds: Mapping[str, Array], name: str) -> Array:
    """Run a piece on one text, hand on what later pieces read, and return what its products do."""
    piece, (before, after) = stream.pieces[number], (boundary_folder(stream.folder, n) for n in (number - 1, number))
    handed_on = load_values(before / name, [value.name or "" for value in piece.before])
    values = pass_through(session, f"text {int(name) + 1}", {**feeds, **handed_on})
    save_values(after / name, [value.name or "" for value in piece.boundary], values, before / name, list(handed_on))
    return values[piece.taps[0].name or ""]
