"""Collect statistics: run a graph in onnxruntime, piece by piece, and sum up what its products read."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.ports import POSITION_IDS
from graphopt.errors import InputError
from graphopt.graph.weights import expression_of
from graphopt.graph.weights.evaluator import DistantExecutor, run_tasks, stage_of
from graphopt.ort.session import run
from graphopt.quantization.rounding.single_thread import one_thread
from graphopt.quantization.statistics.moments import Moments
from graphopt.quantization.statistics.part_runs import boundary_folder, entries_of, part_file
from graphopt.quantization.statistics.partition import Piece, columns_of, pieces_of
from graphopt.quantization.statistics.ranges import Observer, RangeMethod, TensorRanges
from graphopt.quantization.statistics.sequence import collect_in_sequence
from graphopt.quantization.statistics.store import Index, InputStatistics, read_index, write_index, write_statistics
from graphopt.quantization.statistics.symmetric import packed_size
from graphopt.quantization.statistics.windows import (
    Part,
    Window,
    load_values,
    pass_through,
    run_window,
    save_values,
    take_sums,
)
from graphopt.tasks import task_of
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from graphopt.graph.weights.evaluator import OnTensor
    from graphopt.ort.runner import Runner
    from graphopt.ort.session import Array
    from graphopt.quantization.statistics.sequence import RoundProduct
    from graphopt.quantization.statistics.squares import Doubles
    from graphopt.tasks.ports import IntArray

PIECE_BYTES = 1 << 30
"""Bytes that the sums of one piece may take; its weights, and the inputs of its products for one text, come on top."""

# What would make other numbers of the same model and text.
_VERSION = 6

# Tokens of texts that are run at once; a longer text is run alone.
_BATCH_TOKENS = 1024

# Positions that texts are spread over, at most: few contexts are longer.
_POSITIONS = 16384

# Bytes of Hessians that may wait on the disk while other machines make something of them, and pieces.
_WAITING_BYTES, _WAITING_PIECES = 8 << 30, 64


class Consumer(Protocol):
    """What is made of Hessians as soon as they are there, so that they need not be kept."""

    def is_done(self, inputs: Mapping[ir.Node, InputStatistics]) -> bool:
        """Return whether all that is made of the statistics of some products is there."""

    def run(self, inputs: Mapping[ir.Node, InputStatistics], on_tensor: OnTensor | None = None) -> None:
        """Make what is not there yet of the statistics of some products; call back with how much is made."""


class Calibration:
    """Collects what the inputs of products look like on some texts, and keeps it by the content of model and texts.

    Of a graph that reads no text a "text" is what it is fed once: its inputs by name.

    Args:
        folder: where statistics are kept. A folder that lasts serves every recipe that asks for the same.
        texts: returns the tokens of each text, int64 [length], or the inputs of each sample; called when statistics
            are asked for.
        runner: runs the parts of the model; ``None`` where no model may be run.
        feeds: returns the inputs of a graph for tokens [batch, length]; by default its task says.
        limit: bytes that the sums of one piece may take.
        on_stage: called for each piece and text.
        executor: what runs texts; only one on other machines does. Any gives the same bytes.

    Attributes:
        statistics: all that was asked for so far, by the name of the value.
    """

    def __init__(
        self,
        folder: Path,
        texts: Callable[[], Sequence[IntArray] | Sequence[Mapping[str, Array]]],
        runner: Runner | None,
        *,
        feeds: Callable[[ir.Graph, IntArray], Mapping[str, Array]] | None = None,
        limit: int = PIECE_BYTES,
        on_stage: Progress = silent,
        executor: Executor | None = None,
    ) -> None:
        self._executor = executor
        self.folder, self._texts, self._runner = folder.absolute(), texts, runner
        self._limit, self._on_stage, self._feeds = limit, on_stage, feeds
        self._spare: list[Doubles] = []
        self.statistics: dict[str, InputStatistics] = {}
        self._ranges: dict[tuple[str, RangeMethod, float], dict[str, tuple[float, float]]] = {}

    @cached_property
    def texts(self) -> list[IntArray | Mapping[str, Array]]:
        """The tokens of each text, or the inputs of each sample."""
        return list(self._texts())

    @cached_property
    def batches(self) -> list[IntArray | Mapping[str, Array]]:
        """What is run at once: neighbouring texts of one length [batch, length], or the inputs of a sample.

        A product of few rows packs its weights for as long as it multiplies by them, so short texts share a run.
        """
        batches: list[list[IntArray]] = []
        samples: list[Mapping[str, Array]] = []
        for text in self.texts:
            if isinstance(text, Mapping):
                samples.append(text)
            elif batches and len(batches[-1][0]) == len(text) and (len(batches[-1]) + 1) * len(text) <= _BATCH_TOKENS:
                batches[-1].append(text)
            else:
                batches.append([text])
        return [*samples, *map(np.stack, batches)]

    @cached_property
    def text_digest(self) -> str:
        """SHA-256 of the tokens, or of the inputs."""
        digest = hashlib.sha256()
        for text in self.texts:
            if isinstance(text, Mapping):
                for name, array in text.items():
                    digest.update(f"{name} {array.dtype} {array.shape}:".encode() + array.tobytes())
                continue
            digest.update(f"{len(text)}:".encode() + np.ascontiguousarray(text, np.int64).tobytes())
        return digest.hexdigest()

    def model_folder(self, model: ir.Model) -> Path:
        """Return the folder for a model as it is now; reads the digests of its weights."""
        return self.folder / _content(model, self.text_digest)[:40]

    def inputs(
        self, model: ir.Model, nodes: Iterable[ir.Node], consumer: Consumer | None = None
    ) -> dict[ir.Node, InputStatistics]:
        """Return what the first input of each of some products looks like, collected where it is not kept yet.

        Args:
            model: the model as it is now.
            nodes: the products.
            consumer: makes something of the Hessians of each piece of the model when they are there, before the next
                piece is run; they are removed then. Without one they are kept.

        Raises:
            InputError: it is not kept and the model may not be run, or cannot be; or what it computes is not finite.
        """
        taps = {node: value for node in nodes if (value := node.inputs[0]) is not None}
        names = {node: value.name or "" for node, value in taps.items()}
        statistics = self._of_values(model, list(dict.fromkeys(taps.values())), names, consumer)
        return {node: statistics[value] for node, value in taps.items()}

    def values(self, model: ir.Model, values: Sequence[ir.Value]) -> dict[ir.Value, InputStatistics]:
        """Return what some values of floats look like, [..., rows] each; all of a model are asked for at once.

        Raises:
            InputError: as :meth:`inputs`.
        """
        return self._of_values(model, list(dict.fromkeys(values)), {}, None)

    def _of_values(
        self, model: ir.Model, values: list[ir.Value], names: Mapping[ir.Node, str], consumer: Consumer | None
    ) -> dict[ir.Value, InputStatistics]:
        folder = self.model_folder(model)
        _forget_unless_done(folder, names, None if consumer is None else consumer.is_done)
        index = read_index(folder / "index.json")
        if index is None or any(value.name not in index.inputs for value in values):
            index = self._collect(model, values, folder, names, consumer)
        statistics = {value: index.inputs[value.name or ""] for value in values}
        self.statistics |= {value.name or "": inputs for value, inputs in statistics.items()}
        return statistics

    def over_positions(self, model: ir.Model, positions: int | None) -> Calibration:
        """Return a calibration on the same texts, which stand all over the positions that a model has.

        Where only distances between tokens count, a short text at a late position is what a long one has there.

        Args:
            model: reads them.
            positions: that a sequence may have; ``None`` where that is unknown.
        """

        def samples() -> Sequence[Mapping[str, Array]]:
            feeds_of = self._feeds or task_of(model.graph).text_feeds
            last = min(positions or _POSITIONS, _POSITIONS) - max(len(text) for text in self.texts)
            firsts = np.linspace(0, max(0, last), len(self.texts)).astype(np.int64)
            samples, number = [], 0
            for batch in self.batches:
                if isinstance(batch, Mapping):
                    samples.append(batch)
                    continue
                feeds = dict(feeds_of(model.graph, batch))
                if POSITION_IDS in feeds:
                    feeds[POSITION_IDS] = feeds[POSITION_IDS] + firsts[number : number + len(batch), np.newaxis]
                samples.append(feeds)
                number += len(batch)
            return samples

        calibration = type(self)(
            self.folder,
            samples,
            self._runner,
            feeds=self._feeds,
            limit=self._limit,
            on_stage=self._on_stage,
            executor=self._executor,
        )
        calibration.statistics = self.statistics
        return calibration

    def ranges(
        self, model: ir.Model, values: Iterable[ir.Value], method: RangeMethod, percentile: float, *, is_random: bool
    ) -> TensorRanges:
        """Return how far some tensors reach on the texts or samples; this process remembers it, and no file does.

        Args:
            model: run as a whole, with the tensors as outputs.
            values: tensors of floats of its graph, inputs among them.
            method: see :mod:`graphopt.quantization.statistics.ranges`.
            percentile: of the method of that name.
            is_random: whether samples are random.

        Raises:
            InputError: the model may not be run, or cannot be; or a tensor is not finite.
        """
        if self._runner is None:
            raise InputError(
                "the recipe needs ranges of tensors of the model, and it may not be run",
                remedy="let the model run, or store weights alone: --set quantize_convolutions.activations=none",
            )
        names = [value.name or "" for value in values]
        known_ranges = self._ranges.setdefault((self.model_folder(model).name, method, percentile), {})
        observers = {name: Observer() for name in names if name not in known_ranges}
        if observers:
            self._observe(model, observers)
            known_ranges |= {name: observer.range(method, percentile) for name, observer in observers.items()}
        ranges = {name: known_ranges[name] for name in names}
        return TensorRanges(samples=len(self.texts), digest=self.text_digest, is_random=is_random, ranges=ranges)

    def _observe(self, model: ir.Model, observers: Mapping[str, Observer]) -> None:
        """Let observers see the tensors of their names in each run of a model."""
        assert self._runner is not None
        tapped_model = model.clone()
        graph, inputs = tapped_model.graph, {port.name for port in model.graph.inputs}
        outputs = [value for node in graph for value in node.outputs if value.name in observers]
        graph.outputs.extend(value for value in outputs if not value.is_graph_output())
        names = [value.name or "" for value in outputs]
        feeds_of_text = self._feeds or task_of(model.graph).text_feeds
        with self._runner.open_model(tapped_model) as session:
            for row, text in enumerate(self.texts):
                self._on_stage("measuring ranges", row, len(self.texts))
                feeds = text if isinstance(text, Mapping) else feeds_of_text(model.graph, text[None])
                try:
                    results = run(session, names, {name: array for name, array in feeds.items() if name in inputs})
                except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
                    raise InputError(f"onnxruntime cannot run the model on sample {row + 1}: {error}") from error
                arrays = {**feeds, **dict(zip(names, results, strict=True))}
                for name, observer in observers.items():
                    try:
                        observer.add(arrays[name])
                    except ValueError as error:
                        raise InputError(f"{error}, on sample {row + 1}", tensor=name) from error

    def inputs_in_sequence(
        self,
        model: ir.Model,
        nodes: Iterable[ir.Node],
        settings: str,
        round_product: RoundProduct,
        is_rounded: Callable[[Mapping[ir.Node, InputStatistics]], bool] | None = None,
    ) -> dict[ir.Node, InputStatistics]:
        """Return what the first input of each of some products looks like where those before it are rounded.

        Args:
            model: the model; it is not changed.
            nodes: the products, all that will be rounded.
            settings: all that rounding depends on besides the model and the text.
            round_product: see :mod:`graphopt.quantization.statistics.sequence`.
            is_rounded: whether some products are rounded already; with it, Hessians are removed when they are. ``None``
                keeps them.

        Raises:
            InputError: it is not kept and the model may not be run, or cannot be; or what it computes is not finite.
        """
        taps = {node: value.name or "" for node in nodes if (value := node.inputs[0]) is not None}
        folder = self.folder / _content(model, f"{self.text_digest} {settings}")[:40]
        _forget_unless_done(folder, taps, is_rounded)
        index = read_index(folder / "index.json")
        if index is None:
            runner = self._may_run()
            index = collect_in_sequence(
                model,
                list(taps),
                folder,
                runner,
                self.batches,
                self.text_digest,
                lambda ids: (self._feeds or task_of(model.graph).text_feeds)(model.graph, ids),
                round_product,
                self._on_stage,
                keeps=is_rounded is None,
            )
        statistics = {node: index.inputs[name] for node, name in taps.items()}
        self.statistics |= {inputs.value: inputs for inputs in statistics.values()}
        return statistics

    def _may_run(self) -> Runner:
        """Return the runner.

        Raises:
            InputError: no model may be run.
        """
        if self._runner is None:
            raise InputError(
                "the recipe needs statistics of the model as it is at this step, and they are not kept",
                file=self.folder,
                remedy="let the model run, or collect them first: `graphopt calibrate MODEL -r RECIPE -o FOLDER`, then "
                "give --statistics FOLDER; or take a recipe that needs none, such as int4-rtn for int4",
            )
        return self._runner

    def _collect(
        self,
        model: ir.Model,
        values: Sequence[ir.Value],
        folder: Path,
        names: Mapping[ir.Node, str],
        consumer: Consumer | None,
    ) -> Index:
        self._may_run()
        pieces = pieces_of(model.graph, values, self._limit)
        folder.mkdir(parents=True, exist_ok=True)
        statistics: dict[str, InputStatistics] = {}
        feeds_of_text = self._feeds or task_of(model.graph).text_feeds
        numbers = {value: number for number, value in enumerate(values)}
        is_apart = isinstance(self._executor, DistantExecutor)
        with _Consumption(consumer, names, is_apart=is_apart) as consumption:
            for number, piece in enumerate(pieces):
                file = folder / f"piece-{number}.json"
                piece_index = read_index(file)
                if piece_index is None or any(tap.name not in piece_index.inputs for tap in piece.taps):
                    moments = self._moments(
                        model, piece, number, len(pieces), folder, lambda ids: feeds_of_text(model.graph, ids)
                    )
                    piece_index = Index(inputs=self._write_sums(piece, moments, folder, numbers))
                    write_index(piece_index, file)
                shutil.rmtree(boundary_folder(folder, number - 1), ignore_errors=True)
                statistics |= piece_index.inputs
                if consumer is not None:
                    on_tensor = None
                    if not is_apart:
                        self._spare.clear()  # what is made of Hessians takes as much memory as they do
                        on_tensor = partial(
                            self._on_stage, f"rounding what was collected, part {number + 1} of {len(pieces)}"
                        )
                        on_tensor(0, len(piece.taps))
                    consumption.take(piece_index, file, on_tensor)
        self._spare.clear()
        index = Index(inputs=statistics, has_hessians=consumer is None)
        write_index(index, folder / "index.json")
        for number in range(len(pieces)):
            (folder / f"piece-{number}.json").unlink()
        return index

    def _moments(
        self,
        model: ir.Model,
        piece: Piece,
        number: int,
        count: int,
        folder: Path,
        feeds_of: Callable[[IntArray], Mapping[str, Array]],
    ) -> dict[ir.Value, Moments]:
        """Run a piece on every text, here or on other machines."""
        runner, model_of_part = self._runner, piece.part(model)
        assert runner is not None
        stage, entries = f"collecting statistics, part {number + 1} of {count}", entries_of(model_of_part)
        is_apart = isinstance(self._executor, DistantExecutor)
        if not is_apart:
            shutil.rmtree(boundary_folder(folder, number), ignore_errors=True)
        with part_file(model_of_part, folder / (f"part-{number}" if is_apart else "part")) as file:
            part = Part(
                file=str(file),
                entries={**runner.entries, **entries},
                native=runner.native,
                before=_names(piece.before),
                after=_names(piece.boundary),
                taps=_names(piece.taps),
            )
            windows = self._windows(part, number, folder, feeds_of)
            if isinstance(self._executor, DistantExecutor):
                size = sum(8 * columns_of(tap) ** 2 for tap in piece.taps) + _bytes_of(model_of_part)
                return self._run_apart(self._executor, piece, size, stage, windows)
            return self._run(runner.open(file, in_place=True, entries=entries), piece, stage, windows)

    def _write_sums(
        self, piece: Piece, moments: Mapping[ir.Value, Moments], folder: Path, numbers: Mapping[ir.Value, int]
    ) -> dict[str, InputStatistics]:
        """Write what a piece found, and take back the memory of its sums."""

        def write(tap: ir.Value) -> InputStatistics:
            statistics = write_statistics(tap, moments[tap], self.text_digest, folder, numbers[tap])
            moments[tap].squares.release()
            return statistics

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return {
                tap.name or "": statistics
                for tap, statistics in zip(piece.taps, threads.map(write, piece.taps), strict=True)
            }

    def _run(
        self,
        session: Any,
        piece: Piece,
        stage: str,
        windows: Iterable[Window],
    ) -> dict[ir.Value, Moments]:
        """Run a piece on every text; its boundary goes to the disk."""
        moments: dict[ir.Value, Moments] = {}
        with one_thread(), ThreadPoolExecutor(os.cpu_count()) as threads:
            for row, window in enumerate(windows):
                self._on_stage(stage, row, len(self.batches))
                feeds = {**window.feeds, **load_values(Path(window.before), window.part.before)}
                values = pass_through(session, window.extent, feeds)
                inputs = [values[tap.name or ""] for tap in piece.taps]
                sums = [
                    moments.setdefault(tap, Moments(array.shape[-1], spare=self._spare))
                    for tap, array in zip(piece.taps, inputs, strict=True)
                ]
                list(threads.map(Moments.add, sums, inputs))
                save_values(Path(window.after), window.part.after, values, Path(window.before), window.part.before)
        return moments

    def _run_apart(
        self, executor: DistantExecutor, piece: Piece, size: int, stage: str, windows: Iterable[Window]
    ) -> dict[ir.Value, Moments]:
        """As :meth:`_run`, each text by a process on its own; what they find is added up in the order of texts."""
        tasks, moments = list(windows), dict[ir.Value, Moments]()
        ready: set[int] = set()
        count = 0
        for number, _ in run_tasks(executor, run_window, tasks, [size] * len(tasks)):
            ready.add(number)
            while count in ready:
                self._on_stage(stage_of(stage, executor), count, len(tasks))
                for tap, terms in zip(piece.taps, take_sums(tasks[count]), strict=True):
                    sums = moments.setdefault(tap, Moments(len(terms[0].total), spare=self._spare))
                    for part in terms:
                        sums.add_terms(part)
                count += 1
        return moments

    def _windows(
        self, part: Part, number: int, folder: Path, feeds_of: Callable[[IntArray], Mapping[str, Array]]
    ) -> Iterator[Window]:
        """Yield each batch on its way through a piece."""
        before, after = boundary_folder(folder, number - 1), boundary_folder(folder, number)
        for row, batch in enumerate(self.batches):
            yield Window(
                part=part,
                extent=f"sample {row + 1}" if isinstance(batch, Mapping) else f"{batch.size} tokens",
                feeds=batch if isinstance(batch, Mapping) else feeds_of(batch),
                before=str(before / str(row)),
                after=str(after / str(row)),
                sums=str(folder / f"sums-{number}-{row}"),
            )


class _Consumption:
    """Lets a consumer run on what each piece gave, and removes its Hessians.

    Here the next piece waits for it, so the disk holds the Hessians of one piece at a time. Other machines would wait
    for the largest matrix of each piece: there pieces go on, as long as the Hessians of those that wait take 8 GiB.
    Use it as a context manager, which waits for all.

    Args:
        consumer: what runs; ``None`` leaves Hessians where they are.
        names: of the values that products read.
        is_apart: whether other machines do the work.
    """

    def __init__(self, consumer: Consumer | None, names: Mapping[ir.Node, str], *, is_apart: bool) -> None:
        self._consumer, self._names, self._room = consumer, names, _WAITING_BYTES if is_apart else 0
        self._waiting: list[tuple[int, Future[None]]] = []
        self._stack = ExitStack()

    def __enter__(self) -> _Consumption:
        self._threads = self._stack.enter_context(ThreadPoolExecutor(_WAITING_PIECES if self._room else 1))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._wait_for_room(None)
        finally:
            self._stack.close()

    def take(self, index: Index, file: Path, on_tensor: OnTensor | None = None) -> None:
        """Let the consumer run on the statistics of an index, which lies in ``file``."""
        size = sum(4 * packed_size(inputs.rows) for inputs in index.inputs.values())
        self._wait_for_room(size)
        if self._room:
            self._waiting.append((size, self._threads.submit(self._run, index, file)))
        else:
            self._run(index, file, on_tensor)

    def _run(self, index: Index, file: Path, on_tensor: OnTensor | None = None) -> None:
        if self._consumer is not None:
            if index.has_hessians:
                self._consumer.run(_by_node(index, self._names), on_tensor)
            index.drop_hessians(file)

    def _wait_for_room(self, size: int | None) -> None:
        """Wait until so many bytes may be added to those that wait; for ``None``, until none is left."""
        while self._waiting and (size is None or sum(waiting for waiting, _ in self._waiting) + size > self._room):
            _, future = self._waiting.pop(0)
            future.result()


def _by_node(index: Index, names: Mapping[ir.Node, str]) -> dict[ir.Node, InputStatistics]:
    return {node: index.inputs[name] for node, name in names.items() if name in index.inputs}


def _forget_unless_done(
    folder: Path,
    names: Mapping[ir.Node, str],
    is_done: Callable[[Mapping[ir.Node, InputStatistics]], bool] | None,
) -> None:
    """Remove what is kept where Hessians are gone and something that is made of them is not there.

    What the pieces before handed on is gone too, so all pieces run again; what is there is not made again.
    """
    for file in (folder / "index.json", *folder.glob("piece-*.json")):
        index = read_index(file)
        if index is not None and not index.has_hessians and not (is_done and is_done(_by_node(index, names))):
            shutil.rmtree(folder)
            return


def _names(values: Sequence[ir.Value]) -> tuple[str, ...]:
    return tuple(value.name or "" for value in values)


def _bytes_of(model: ir.Model) -> int:
    values = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in values if tensor is not None)


def _content(model: ir.Model, text: str) -> str:
    """Return a hash of what a model computes and of the texts: its nodes, the content of its weights, the tokens."""
    digest = hashlib.sha256(f"{_VERSION} {text} {dict(sorted(model.opset_imports.items()))}".encode())
    for node in model.graph:
        proto = ir.to_proto(node)
        del proto.metadata_props[:]
        digest.update(proto.SerializeToString(deterministic=True))
    for name, value in sorted(model.graph.initializers.items()):
        if value.const_value is not None:
            digest.update(f"{name} {expression_of(value.const_value).digest}".encode())
    return digest.hexdigest()
