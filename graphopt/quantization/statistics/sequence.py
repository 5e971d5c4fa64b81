"""Statistics one product after the other: each is seen with the inputs that it will have, behind rounded products.

    text --> [piece 0] --X--> [piece 1] --X--> ...    the original model
                 |                |
               round            round                 what reads X and Y, for H = Y^T Y and C = Y^T (X - Y)
                 |                |
    text --> [piece 0] --Y--> [piece 1] --Y--> ...    the same graph, with the matrices that were rounded so far

Every node runs twice for each text. Products that read the same value are rounded together; such a value ends a piece.
While sums are written and matrices rounded, the next piece of the original model runs, which does not depend on them.
Its inputs wait in memory for that, up to 512 MiB. What a piece hands on stays there, up to 1 GiB, and what is beyond
that goes to the disk; so does all that every 32nd piece hands on, and a run that was killed goes on behind the last of
these.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.graph.weights import weight_of
from graphopt.quantization.rounding.single_thread import one_thread
from graphopt.quantization.statistics.integers import Matrix, add_products, integers_of_columns, multiply
from graphopt.quantization.statistics.moments import Moments
from graphopt.quantization.statistics.part_runs import boundary_folder, open_part
from graphopt.quantization.statistics.partition import Piece, columns_of, pieces_of
from graphopt.quantization.statistics.store import Index, InputStatistics, read_index, write_index, write_statistics
from graphopt.quantization.statistics.windows import load_values, pass_through, save_values
from graphopt.util.processors import run_in_threads
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Self

    from graphopt.ort.runner import Runner
    from graphopt.ort.session import Array
    from graphopt.quantization.statistics.integers import Integers, Singles
    from graphopt.quantization.statistics.squares import Doubles
    from graphopt.tasks.ports import IntArray

    RoundProduct = Callable[[ir.Node, InputStatistics], ir.TensorProtocol | None]
    """Returns what a product will multiply by, given what its inputs look like; ``None`` where it stays as it is, or
    where no product is behind it."""

# Tokens whose integers have a scale of their own, and rows of a sum that a thread adds to.
_TOKENS, _ROWS = 1024, 256

# Bytes that each of both models may hand on in memory, and how often all of it goes to the disk, too: what a run that
# was killed computes again is little of a model of thirty layers, and files took a tenth of all time.
_IN_MEMORY, _CHECKPOINT = 512 << 20, 32


@dataclass
class _Stream:
    """One of both models, run piece by piece.

    Attributes:
        model: the model.
        values: that end pieces.
        folder: where files go.
        pieces: in order.
    """

    model: ir.Model
    values: list[ir.Value]
    folder: Path
    pieces: list[Piece] = field(init=False)
    _arrays: dict[str, dict[str, Array]] = field(default_factory=dict)
    _next_arrays: dict[str, dict[str, Array]] = field(default_factory=dict)
    _next_bytes: int = 0

    def __post_init__(self) -> None:
        # No room: a piece for each value, so that what a piece computes reads nothing but matrices that are rounded.
        self.pieces = pieces_of(self.model.graph, self.values, 0)

    def has_file(self, number: int, texts: int) -> bool:
        """Return whether the disk holds all that a piece hands on."""
        folder = boundary_folder(self.folder, number)
        return not self.pieces[number].boundary or all((folder / str(text)).is_dir() for text in range(texts))

    def products(self, number: int) -> list[ir.Node]:
        """Return the products that a piece begins with: those of float32 that read what the piece before ends with.

        They are computed outside of onnxruntime, see :mod:`graphopt.quantization.statistics.integers`.
        """
        if not number:
            return []
        return [
            use.node
            for use in self.pieces[number - 1].taps[0].uses()
            if use.idx == 0 and use.node.graph is self.model.graph and _is_float32(use.node)
        ]

    def take(self, number: int, text: str) -> dict[str, Array]:
        """Return what the piece before ``number`` hands on for a text, which memory forgets."""
        names = [value.name or "" for value in self.pieces[number].before]
        arrays = self._arrays.pop(text, None)
        return load_values(boundary_folder(self.folder, number - 1) / text, names) if arrays is None else arrays

    def hand_on(self, number: int, text: str, values: Mapping[str, Array]) -> None:
        """Keep what a piece hands on for a text."""
        names = [value.name or "" for value in self.pieces[number].boundary]
        arrays = {name: values[name] for name in names}
        size = sum(array.nbytes for array in arrays.values())
        has_room = self._next_bytes + size <= _IN_MEMORY
        if has_room:
            self._next_arrays[text] = arrays
            self._next_bytes += size
        if not has_room or _is_checkpoint(number):
            before = boundary_folder(self.folder, number - 1) / text
            before_names = [value.name or "" for value in self.pieces[number].before]
            save_values(boundary_folder(self.folder, number) / text, names, values, before, before_names)

    def end_piece(self, number: int) -> None:
        """Go on to the piece behind; files that nobody will read are removed."""
        self._arrays, self._next_arrays, self._next_bytes = self._next_arrays, {}, 0
        if not _is_checkpoint(number - 1):
            shutil.rmtree(boundary_folder(self.folder, number - 1), ignore_errors=True)
        if _is_checkpoint(number):
            shutil.rmtree(boundary_folder(self.folder, number - _CHECKPOINT), ignore_errors=True)


def _is_float32(node: ir.Node) -> bool:
    """Return whether a node is a product of float32 with a matrix, whose result nobody outside of the graph reads."""
    weight = weight_of(node, 1) if node.op_type == "MatMul" and not node.domain else None
    if weight is None or weight.dtype != ir.DataType.FLOAT or len(weight.shape or ()) != 2:
        return False
    output = node.outputs[0]
    return not output.is_graph_output() and all(use.node.graph is node.graph for use in output.uses())


def _is_checkpoint(number: int) -> bool:
    return number % _CHECKPOINT == _CHECKPOINT - 1


@dataclass
class _Sums:
    """Of the inputs Y of the rounded model, and of how they differ from X."""

    moments: Moments
    shift: Doubles

    def add(self, original_inputs: Array, inputs: Array) -> None:
        """Add the inputs [..., rows] of a text."""
        rows = self.moments.rows
        x, y = (np.ascontiguousarray(array.reshape(-1, rows), np.float32) for array in (original_inputs, inputs))
        for original_part, part in zip(_parts(x), _parts(y), strict=True):
            change = original_part - part
            part_integers, change_integers = integers_of_columns([part, change])
            self.moments.add_rounded(part, part_integers)
            if part_integers.has_noise or change_integers.has_noise:
                self.shift += part.T @ change
            else:
                self._add_shift(part_integers, change_integers)

    def _add_shift(self, integers: Integers, change_integers: Integers) -> None:
        def add_rows(rows: slice) -> None:
            add_products(integers[rows], change_integers, self.shift[rows])

        run_in_threads(add_rows, [slice(begin, begin + _ROWS) for begin in range(0, self.moments.rows, _ROWS)])


def _parts(x: Singles) -> list[Singles]:
    """Return the rows whose integers have scales of their own."""
    return [x[start : start + _TOKENS] for start in range(0, len(x), _TOKENS)]


def collect_in_sequence(  # noqa: PLR0913, what a run of a model takes
    model: ir.Model,
    products: Sequence[ir.Node],
    folder: Path,
    runner: Runner,
    batches: Sequence[IntArray | Mapping[str, Array]],
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
        batches: the tokens of texts that are run at once, [batch, length], or the inputs of each sample.
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
    feeds_of_batches = [feeds_of(batch) if isinstance(batch, np.ndarray) else batch for batch in batches]
    count = len(streams[0].pieces)
    files = [folder / f"piece-{number}.json" for number in range(count)]
    start = _start(streams, files, len(feeds_of_batches))
    with _Ahead(streams[0], runner, feeds_of_batches) as original:

        def run_piece(number: int, *, adds_up: bool) -> _Sums | None:
            with (
                original.taps(number) as original_taps,
                _taps(streams[1], number, runner, feeds_of_batches) as taps,
            ):
                return _add_up(streams[0].pieces[number].taps[0], original_taps, taps, adds_up=adds_up)

        for number, file in enumerate(files):
            on_stage("rounding one product after the other", number, count)
            piece_index = read_index(file)
            sums = run_piece(number, adds_up=piece_index is None) if number >= start else None
            streams[0].end_piece(number)
            if start <= number + 1 < count:
                original.begin(number + 1)
            if piece_index is None:
                assert sums is not None
                piece_index = _write_sums(streams[0].pieces[number].taps[0], sums, text_digest, folder, number)
                write_index(piece_index, file)
            sums = None  # rounding needs the memory
            streams[1].end_piece(number)
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
    for file in files:
        file.unlink()
    for stream in streams:
        shutil.rmtree(stream.folder, ignore_errors=True)
    return index


def _write_sums(tap: ir.Value, sums: _Sums, text_digest: str, folder: Path, number: int) -> Index:
    """Write what a piece has summed up."""
    statistics = write_statistics(tap, sums.moments, text_digest, folder, number, sums.shift)
    return Index(inputs={tap.name or "": statistics})


def _values(graph: ir.Graph, names: Mapping[str, object]) -> list[ir.Value]:
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    return [value for value in values if value.name in names]


def _start(streams: Sequence[_Stream], files: Sequence[Path], texts: int) -> int:
    """Return which piece is run first: that behind the last one whose files are there, or the first of all."""
    next_number = next((number for number, file in enumerate(files) if read_index(file) is None), None)
    if next_number is None:
        return len(files)
    candidates = range(next_number, 0, -1)
    return next((number for number in candidates if all(stream.has_file(number - 1, texts) for stream in streams)), 0)


@contextmanager
def _taps(
    stream: _Stream, number: int, runner: Runner, feeds_of_batches: Sequence[Mapping[str, Array]]
) -> Iterator[Iterator[Array]]:
    """Open a piece, and give what its products read, text after text; what later pieces read is handed on."""
    piece, products = stream.pieces[number], stream.products(number)
    names, matrices = [_name(product.outputs[0]) for product in products], [_matrix(product) for product in products]

    def run_texts() -> Iterator[Array]:
        for row, feeds in enumerate(feeds_of_batches):
            text = str(row)
            values = {**feeds, **stream.take(number, text)}
            if products:  # all of them read one value
                values |= zip(names, multiply(values[_name(products[0].inputs[0])], matrices), strict=True)
            values = pass_through(session, f"text {row + 1}", values)
            stream.hand_on(number, text, values)
            yield values[_name(piece.taps[0])]

    stream.folder.mkdir(exist_ok=True)
    part = piece.part(stream.model, [product.outputs[0] for product in products])
    with open_part(runner, part, stream.folder / "part") as session:
        yield run_texts()


def _name(value: ir.Value | None) -> str:
    return "" if value is None else value.name or ""


def _matrix(product: ir.Node) -> Matrix:
    weight = weight_of(product, 1)
    assert weight is not None and weight.const_value is not None
    return Matrix(weight.const_value.numpy())


class _Ahead:
    """Runs pieces of the original model while the matrices before them are rounded, where memory holds what they give.

    Args:
        stream: the original model.
        runner: runs it.
        feeds_of_batches: the inputs of the graph for each batch.
    """

    def __init__(self, stream: _Stream, runner: Runner, feeds_of_batches: Sequence[Mapping[str, Array]]) -> None:
        self._stream, self._runner, self._feeds_of_batches = stream, runner, feeds_of_batches
        self._thread = ThreadPoolExecutor(1)
        self._piece = ExitStack()
        self._taps: Future[list[Array]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._piece.close()

    def begin(self, number: int) -> None:
        """Let a piece run; its session is opened here, since a part is cut out of a graph by one thread alone."""
        columns = columns_of(self._stream.pieces[number].taps[0])
        tokens = sum(max((array.size for array in feeds.values()), default=0) for feeds in self._feeds_of_batches)
        if columns and tokens * columns * np.dtype(np.float32).itemsize <= _IN_MEMORY:
            taps = self._piece.enter_context(self._open(number))
            self._taps = self._thread.submit(list, taps)

    @contextmanager
    def taps(self, number: int) -> Iterator[Iterable[Array]]:
        """Give what the products of a piece read, text after text, whether it was begun or not."""
        if self._taps is None:
            with self._open(number) as taps:
                yield taps
        else:
            with self._piece:
                yield self._taps.result()
            self._taps = None

    def _open(self, number: int) -> AbstractContextManager[Iterator[Array]]:
        return _taps(self._stream, number, self._runner, self._feeds_of_batches)


def _add_up(tap: ir.Value, original_taps: Iterable[Array], taps: Iterable[Array], *, adds_up: bool) -> _Sums | None:
    """Run a piece of both models on every text, and return the sums of its inputs if they are asked for."""
    sums: _Sums | None = None
    with one_thread(), ThreadPoolExecutor(1) as thread:
        task: Future[None] | None = None
        for original_inputs, inputs in zip(original_taps, taps, strict=True):
            if original_inputs.shape != inputs.shape:
                raise InputError(
                    f"a product reads {list(original_inputs.shape)} numbers, and {list(inputs.shape)} where products "
                    "before it are rounded: which tokens it sees depends on them",
                    tensor=tap.name,
                    remedy="--set quantize_weights.inputs=original",
                )
            if not adds_up:
                continue
            if sums is None:
                rows = inputs.shape[-1]
                sums = _Sums(Moments(rows), np.zeros((rows, rows)))
            # Texts are added one after the other, while the next one runs.
            if task is not None:
                task.result()
            task = thread.submit(sums.add, original_inputs, inputs)
        if task is not None:
            task.result()
    return sums
