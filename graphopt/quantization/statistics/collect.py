"""Collect statistics: run a graph in onnxruntime, piece by piece, and sum up what its products read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.graph.weights import expression_of
from graphopt.graph.weights.data_file import save_model
from graphopt.graph.weights.disk import writing
from graphopt.ort.session import AS_IT_LIES, FEW_CALLS, Array, run
from graphopt.quantization.rounding.single_thread import one_thread
from graphopt.quantization.statistics.moments import Moments
from graphopt.quantization.statistics.partition import Piece, pieces_of
from graphopt.quantization.statistics.store import Index, InputStatistics, read_index, write_index, write_statistics
from graphopt.tasks import task_of
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from graphopt.ort.runner import Runner
    from graphopt.quantization.statistics.squares import Doubles
    from graphopt.tasks.ports import IntArray

PIECE_BYTES = 1 << 30
"""Bytes that the sums of one piece may take; its weights, and the inputs of its products for one text, come on top."""

# What would make other numbers of the same model and text.
_VERSION = 3

Feeds = dict[str, Array]


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
    ) -> None:
        self.folder, self._texts, self._runner = folder.absolute(), texts, runner
        self._limit, self._on_stage, self._feeds = limit, on_stage, feeds
        self._spare: list[Doubles] = []
        self.statistics: dict[str, InputStatistics] = {}

    @cached_property
    def texts(self) -> list[IntArray | Mapping[str, Array]]:
        """The tokens of each text, or the inputs of each sample."""
        return list(self._texts())

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

    def inputs(self, model: ir.Model, nodes: Iterable[ir.Node]) -> dict[ir.Node, InputStatistics]:
        """Return what the first input of each of some products looks like, collected where it is not kept yet.

        Raises:
            InputError: it is not kept and the model may not be run, or cannot be; or what it computes is not finite.
        """
        taps = {node: value for node in nodes if (value := node.inputs[0]) is not None}
        values = list(dict.fromkeys(taps.values()))
        folder = self.model_folder(model)
        index = read_index(folder / "index.json")
        if index is None or any(value.name not in index.inputs for value in values):
            index = self._collect(model, values, folder)
        statistics = {value: index.inputs[value.name or ""] for value in values}
        self.statistics |= {value.name or "": inputs for value, inputs in statistics.items()}
        return {node: statistics[value] for node, value in taps.items()}

    def _collect(self, model: ir.Model, values: Sequence[ir.Value], folder: Path) -> Index:
        if self._runner is None:
            raise InputError(
                "the recipe needs statistics of the model as it is at this step, and they are not kept",
                file=self.folder,
                remedy="let the model run, or collect them first: `graphopt calibrate MODEL -r RECIPE -o FOLDER`, then "
                "give --statistics FOLDER; or take a recipe that needs none, such as int4-rtn for int4",
            )
        pieces = pieces_of(model.graph, values, self._limit)
        folder.mkdir(parents=True, exist_ok=True)
        statistics: dict[str, InputStatistics] = {}
        feeds_of_text = self._feeds or task_of(model.graph).text_feeds
        numbers = {value: number for number, value in enumerate(values)}
        for number, piece in enumerate(pieces):
            piece_index = read_index(folder / f"piece-{number}.json")
            if piece_index is None or any(tap.name not in piece_index.inputs for tap in piece.taps):
                with _open_part(self._runner, piece.part(model), folder / "part") as session:
                    moments = self._run(
                        session, piece, number, len(pieces), folder, lambda ids: feeds_of_text(model.graph, ids)
                    )
                piece_index = Index(inputs=self._write_sums(piece, moments, folder, numbers))
                write_index(piece_index, folder / f"piece-{number}.json")
            shutil.rmtree(_boundary(folder, number - 1), ignore_errors=True)
            statistics |= piece_index.inputs
        self._spare.clear()
        index = Index(inputs=statistics)
        write_index(index, folder / "index.json")
        for number in range(len(pieces)):
            (folder / f"piece-{number}.json").unlink()
        return index

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
        number: int,
        count: int,
        folder: Path,
        feeds_of: Callable[[IntArray], Mapping[str, Array]],
    ) -> dict[ir.Value, Moments]:
        """Run a piece on every text; its boundary goes to the disk."""
        input_names = [port.name for port in session.get_inputs()]
        outputs = [port.name for port in session.get_outputs()]
        moments: dict[ir.Value, Moments] = {}
        before, after = _boundary(folder, number - 1), _boundary(folder, number)
        shutil.rmtree(after, ignore_errors=True)
        with one_thread(), ThreadPoolExecutor(os.cpu_count()) as threads:
            for row, ids in enumerate(self.texts):
                self._on_stage(f"collecting statistics, part {number + 1} of {count}", row, len(self.texts))
                feeds = ids if isinstance(ids, Mapping) else feeds_of(ids[None])
                values = {**feeds, **_load_boundary(before / str(row), piece.before)}
                try:
                    results = run(session, outputs, {name: values[name] for name in input_names})
                except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
                    extent = f"sample {row + 1}" if isinstance(ids, Mapping) else f"{len(ids)} tokens"
                    raise InputError(f"onnxruntime cannot run the model on {extent}: {error}") from error
                values |= dict(zip(outputs, results, strict=True))
                inputs = [values[tap.name or ""] for tap in piece.taps]
                sums = [
                    moments.setdefault(tap, Moments(array.shape[-1], spare=self._spare))
                    for tap, array in zip(piece.taps, inputs, strict=True)
                ]
                list(threads.map(Moments.add, sums, inputs))
                _save_boundary(after / str(row), piece.boundary, values)
        return moments


@contextlib.contextmanager
def _open_part(runner: Runner, part: ir.Model, folder: Path) -> Iterator[Any]:
    """Open a part of a model on weights that stay where they lie; ``folder`` holds the rest until the block ends."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(exist_ok=True)
    try:
        save_model(part, folder / "model.onnx", "model.data", in_place=True)
        of_floats = not any(node.domain or node.op_type == "DequantizeLinear" for node in part.graph)
        entries = {**FEW_CALLS, **(AS_IT_LIES if of_floats else {})}
        yield runner.open(folder / "model.onnx", in_place=True, entries=entries)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save_boundary(folder: Path, values: Sequence[ir.Value], arrays: Mapping[str, Array]) -> None:
    if values:
        folder.mkdir(parents=True)
        with writing(folder):
            for number, value in enumerate(values):
                np.save(folder / f"{number}.npy", arrays[value.name or ""])


def _load_boundary(folder: Path, values: Sequence[ir.Value]) -> Feeds:
    return {value.name or "": np.load(folder / f"{number}.npy") for number, value in enumerate(values)}


def _boundary(folder: Path, number: int) -> Path:
    return folder / f"boundary-{number}"


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
