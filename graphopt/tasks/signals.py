"""Models that read images or recordings, and no tokens: what their kinds have in common.

Inputs: ``pixel_values`` float [batch, channels, height, width] of an image, or ``input_values`` (samples, or a
spectrogram) or ``input_features`` float [batch, ...] of a recording, as the processor of the checkpoint makes them.
Masks of padding beside them are fed with ones: what differs in size runs one by one. Outputs have the names of
transformers, as in files of other exporters: each kind says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    INPUT_FEATURES,
    INPUT_VALUES,
    PIXEL_MASK,
    PIXEL_VALUES,
    is_cross_port,
)
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.ort.session import run
from graphopt.tasks.base import BATCH, Call, Floats, Probe, classes_of, upper
from graphopt.tasks.encoder import cosines
from graphopt.tasks.graph.samples import Samples
from graphopt.tasks.graph.task import GraphTask
from graphopt.tasks.ports import Array, Port, port_of_value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    import onnx_ir as ir
    import onnxruntime

IMAGES = Rule("signals.images", "{batch} random images")
RECORDINGS = Rule("signals.recordings", "{batch} random recordings")

IMAGE_INPUTS, RECORDING_INPUTS = (PIXEL_VALUES,), (INPUT_VALUES, INPUT_FEATURES)

DIMENSIONS = {
    PIXEL_VALUES: ("batch", "channels", "height", "width"),
    PIXEL_MASK: ("batch", "height", "width"),
    INPUT_VALUES: ("batch", "samples", "bands"),
    INPUT_FEATURES: ("batch", "frames", "bands"),
}
"""The names of the dimensions of inputs."""

_MASKS = (PIXEL_MASK, ATTENTION_MASK)
# Sizes of a probe where the graph leaves them open: height, width, samples, and rows of a spectrogram.
_SIZES = {"height": 96, "width": 128, "samples": 4000, "frames": 64}
# Waves of a random signal, and how often one turns along an axis: of a sound, and of an image or spectrogram.
_WAVES, _TURNS = 6, {1: 100, 2: 3}


class SignalProbe:
    """Random images or recordings.

    Outputs of the graph beside those that its kind names, as files of other exporters have them, are compared too: each
    in units in which its largest number in the first run is that of the outputs that are named.

    Args:
        feeds: all inputs; see :class:`graphopt.tasks.base.Probe`.
        outputs: the outputs that the kind names.
        classes: how many of the first numbers of a row are logits of classes.
        kind: what is fed, for reports.
        extra_names: all others of floats; one that has no row for each signal is left out.
    """

    def __init__(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str],
        classes: int,
        kind: Rule,
        extra_names: Sequence[str] = (),
    ) -> None:
        self.feeds, self.outputs, self.classes, self.kind = feeds, tuple(outputs), classes, kind
        self._extra_names, self._factors, self._width = tuple(extra_names), dict[str, float](), 0
        self._sizes: list[int] = []

    @property
    def tokens(self) -> Fact:
        """See :class:`graphopt.tasks.base.Probe`."""
        return self.kind(batch=len(self.real))

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """Which signals are compared, [batch]: all."""
        return np.ones(len(next(iter(self.feeds.values()))), bool)

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return the outputs, see :func:`rows_of`; with others beside them a row is a signal with all its places."""
        results = dict(zip(names := [*self.outputs, *self._extra_names], run(session, names, self.feeds), strict=True))
        rows, batch = rows_of([results[name] for name in self.outputs]), len(self.real)
        if not self._factors:
            for name in self._extra_names:
                array = results[name]
                if array.ndim and len(array) == batch:  # else no row is of a signal
                    largest = float(np.abs(array.astype(np.float64)).max(initial=0))
                    self._factors[name] = float(np.abs(rows).max(initial=0)) / largest if largest else 1.0
        if not self._factors:
            return rows
        self._width, parts = rows.shape[-1], [rows.reshape(batch, -1)]
        for name, factor in self._factors.items():
            parts.append(results[name].astype(np.float64).reshape(batch, -1) * factor)
        self._sizes = [part.shape[-1] for part in parts]
        return np.concatenate(parts, axis=-1)

    def matching_rows(self, before: Floats, after: Floats) -> Floats:
        """Return ``before``: everything stays where it is."""
        del after
        return before

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return cosines with the outputs before any pass, and the share of rows with the same likeliest class."""
        pairs = [(first, after)]
        if self._factors:
            bounds = np.cumsum(self._sizes)[:-1]
            pairs = list(zip(*(np.split(row, bounds, axis=-1) for row in (first, after)), strict=True))
        old, new = (rows.reshape(-1, self._width or rows.shape[-1]) for rows in pairs[0])
        similarities = cosines(old, new)
        of_others = {name: cosines(*pair) for name, pair in zip(self._factors, pairs[1:], strict=True)}
        figures = {
            "cosine_with_start_mean": float(similarities.mean()),
            "cosine_with_start_smallest": float(min(values.min() for values in (similarities, *of_others.values()))),
        }
        figures |= {f"cosine of {name}": float(values.mean()) for name, values in of_others.items()}
        if self.classes > 1:
            matches = old[:, : self.classes].argmax(-1) == new[:, : self.classes].argmax(-1)
            figures["same_class_share"] = float(matches.mean())
        return figures


def _is_signal(port: Port) -> bool:
    """Return whether an input is of floats, and has the axes of one image or recording: a video has more."""
    rank, names = len(port.shape), DIMENSIONS[port.name]
    is_float = port.dtype is not None and port.dtype.kind == "f"
    return is_float and (rank == len(names) if port.name == PIXEL_VALUES else 2 <= rank <= len(names))


def _is_float(port: Port) -> bool:
    return port.dtype is not None and port.dtype.kind == "f"


def rows_of(arrays: Sequence[Array]) -> Floats:
    """Return outputs side by side, float64 [rows, numbers].

    A row is a place that all outputs have (an image, a patch, a pixel, a box); one batch element where they have no
    place in common. Of four dimensions the second is that of channels, as images have it.
    """
    last = [np.moveaxis(array, 1, -1) if array.ndim == 4 else array for array in arrays]
    if any(array.shape[:-1] != last[0].shape[:-1] for array in last):
        last = [array.reshape(len(array), -1) for array in last]
    rows = np.concatenate(last, axis=-1)
    floats: Floats = rows.reshape(-1, rows.shape[-1]).astype(np.float64)
    return floats


def random_signals(shape: Sequence[int], random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return random images [batch, channels, height, width] or recordings [batch, ...], as processors normalize them.

    Neighbours are alike, as they are in images and sound: waves of random direction and length with noise upon them.
    Each has the mean 0 and the deviation 1.
    """
    axes = range(2, len(shape)) if len(shape) == 4 else range(1, len(shape))
    grids = np.meshgrid(*(np.linspace(0, 1, shape[axis]) for axis in axes), indexing="ij")
    signals = 0.2 * random.standard_normal(tuple(shape))
    rows = signals.reshape(-1, *grids[0].shape)
    for row in rows:
        for _ in range(_WAVES):
            turns = random.exponential(_TURNS[len(grids)], len(grids)) * random.choice([-1, 1], len(grids))
            phase = 2 * np.pi * (sum(turn * grid for turn, grid in zip(turns, grids, strict=True)) + random.random())
            row += random.random() * np.sin(phase)
    flat = signals.reshape(len(signals), -1)
    flat = (flat - flat.mean(-1, keepdims=True)) / np.maximum(flat.std(-1, keepdims=True), 1e-6)
    numbers: npt.NDArray[np.float32] = flat.reshape(tuple(shape)).astype(np.float32)
    return numbers


class SignalSamples(Samples):
    """What a model of images or recordings is fed: arrays that were given, or signals drawn as processors make them.

    Args:
        task: draws them.
        file: where arrays were given; ``None`` for random signals.
    """

    def __init__(self, task: Signals, file: Path | None) -> None:
        super().__init__(file)
        self._task = task

    @property
    def is_settled(self) -> bool:
        """See :class:`graphopt.tasks.graph.samples.Samples`; sizes of random signals are known."""
        return self.is_random or super().is_settled

    def feeds(self, graph: ir.Graph, count: int) -> list[dict[str, Array]]:
        """See :class:`graphopt.tasks.graph.samples.Samples`; one signal a sample."""
        if not self.is_random:
            return super().feeds(graph, count)
        ports = [port_of_value(value) for value in graph.inputs]
        return [self._task.random_feeds(ports, 1, np.random.default_rng(seed)) for seed in range(count)]


class Signals(GraphTask):
    """Base of the kinds that read images or recordings; an object of a derived class is a kind.

    Args:
        inputs: a file or folder of arrays to compare and calibrate on; ``None`` for random signals.

    Attributes:
        input_names: the inputs that hold what is read; a graph has one of them.
        extra_outputs: outputs that are kept and compared beside the first, where the graph has them.
        rank: dimensions of the output, where that tells this kind from others; else ``None``.
        mappings: the tables of transformers that list such models.
        has_classes: whether the output holds logits of classes.
    """

    is_fallback: ClassVar[bool] = False
    input_names: ClassVar[tuple[str, ...]] = IMAGE_INPUTS
    extra_outputs: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int | None] = None
    mappings: ClassVar[tuple[str, ...]] = ()
    has_classes: ClassVar[bool] = True
    reads: ClassVar[Literal["texts", "images", "recordings", "arrays"]] = "images"
    unrolls: ClassVar[bool] = False
    dimensions: ClassVar[Mapping[str, tuple[str, ...]]] = DIMENSIONS
    framework_names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, inputs: Path | None = None) -> None:
        super().__init__(inputs)
        self.samples = SignalSamples(self, inputs)

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        signals = [name for name in inputs if name in self.input_names]
        unknown_names = set(inputs) - {*signals, *_MASKS}
        output = self.first_output(outputs)
        if len(signals) != 1 or unknown_names or output is None or any(map(is_cross_port, outputs)):
            return False
        if isinstance(inputs, Mapping) and not _is_signal(inputs[signals[0]]):
            return False
        return self.rank is None or (isinstance(outputs, Mapping) and len(outputs[output].shape) == self.rank)

    def first_output(self, outputs: Collection[str]) -> str | None:
        """Return the output that is compared first, of those that a graph has; ``None`` where it lacks it."""
        return self.output if self.output in outputs else None

    def compared_outputs(self, outputs: Collection[str]) -> tuple[str, ...]:
        """Return which outputs of a graph are compared, and remain when a model is exported."""
        first = self.first_output(outputs)
        return tuple(name for name in (first, *self.extra_outputs) if name is not None and name in outputs)

    def remaining_outputs(self, outputs: Collection[str]) -> tuple[str, ...]:
        """See :class:`graphopt.tasks.base.Task`: none that is not compared would be read."""
        return self.compared_outputs(outputs)

    def check(self, graph: ir.Graph) -> None:
        """See :class:`graphopt.tasks.base.Task`."""
        self.signal_port(map(port_of_value, graph.inputs))

    def signal_port(self, ports: Iterable[Port]) -> Port:
        """Return the input that holds what is read.

        Raises:
            InputError: there is none, or an input is neither that nor a mask.
        """
        by_name = {port.name: port for port in ports}
        signals = [name for name in by_name if name in self.input_names]
        unknown = [name for name in by_name if name not in (*self.input_names, *_MASKS)]
        if unknown or len(signals) != 1:
            raise InputError(
                "the graph has an input that graphopt does not know how to feed"
                if unknown
                else f"the graph has none of the inputs {', '.join(self.input_names)}",
                tensor=unknown[0] if unknown else None,
                remedy=f"{self.noun} has one input of {', '.join(self.input_names)}, and perhaps {', '.join(_MASKS)}",
            )
        return by_name[signals[0]]

    def feeds_of(self, ports: Sequence[Port], signals: Array) -> dict[str, Array]:
        """Return what to feed: signals [batch, ...], and masks that hide nothing."""
        port = self.signal_port(ports)
        feeds: dict[str, Array] = {port.name: np.ascontiguousarray(signals, port.dtype or np.float32)}
        for mask in (mask for mask in ports if mask.name in _MASKS):
            shape = (signals.shape[0], *signals.shape[2:]) if mask.name == PIXEL_MASK else signals.shape[:2]
            feeds[mask.name] = np.ones(shape, mask.dtype or np.int64)
        return feeds

    def random_feeds(self, ports: Sequence[Port], batch: int, random: np.random.Generator) -> dict[str, Array]:
        """Return random inputs, see :func:`random_signals`; sizes that the graph leaves open are small."""
        port = self.signal_port(ports)
        names = DIMENSIONS[port.name]
        sizes = [_SIZES.get(names[axis], 3) if size is None else size for axis, size in enumerate(port.shape)]
        return self.feeds_of(ports, random_signals([port.shape[0] or batch, *sizes[1:]], random))

    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """See :class:`graphopt.tasks.base.Task`; there is no cache, so ``context`` counts for nothing."""
        if not self.samples.is_random:
            return super().probe(graph, context=context)
        outputs = {port.name: port for port in map(port_of_value, graph.outputs)}
        names = self.compared_outputs(outputs)
        feeds = self.random_feeds([port_of_value(value) for value in graph.inputs], BATCH, np.random.default_rng(0))
        kind = IMAGES if self.reads == "images" else RECORDINGS
        extra_names = [name for name, port in outputs.items() if name not in names and _is_float(port)]
        return SignalProbe(feeds, names, self.class_count(outputs[names[0]]) or 0, kind, extra_names)

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """Yield a call for each number of rows in ``sizes``; how many keys there are only the graph knows.

        So masks that hide nothing are understood, and no others.
        """
        ports, random = [port_of_value(value) for value in graph.inputs], np.random.default_rng(0)
        for batch in sorted({batch for batch, _, _ in sizes}):
            feeds = self.random_feeds(ports, batch, random)
            yield Call(feeds, 1, 0, np.ones((len(next(iter(feeds.values()))), 1), bool))

    def class_count(self, port: Port) -> int | None:
        """Return how many classes an output has logits of; ``None`` where the graph does not say, or has none."""
        if not self.has_classes or not port.shape:
            return None
        return port.shape[1] if len(port.shape) == 4 else port.shape[-1]

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take what ``architectures`` name, where the tables of transformers list it."""
        return bool(self._classes(config, transformers))

    def _classes(self, config: Any, transformers: Any) -> set[str]:
        names = set(getattr(config, "architectures", None) or ())
        auto = transformers.models.auto.modeling_auto
        return names.intersection(*[set().union(*(classes_of(type(config), getattr(auto, m)) for m in self.mappings))])

    def class_of(self, config: Any, transformers: Any) -> Any:
        """Return the class that the configuration names."""
        return getattr(transformers, min(self._classes(config, transformers)))

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return the model, and two signals of the size that its processor makes."""
        sample: dict[str, Any] = upper("graphopt.models.signal_samples:sample_of")(model, source)[0]
        return model, sample

    def varying_axes(self, model: Any, source: str) -> Mapping[str, Collection[int]]:
        """See :class:`graphopt.tasks.base.Task`: the batch, and sizes that differ from one signal to another."""
        axes: Mapping[str, Collection[int]] = upper("graphopt.models.signal_samples:sample_of")(model, source)[1]
        return axes

    def framework_output(self, output: Any) -> Array:
        """See :class:`graphopt.tasks.base.Task`."""
        names = [name for name in output if getattr(output[name], "ndim", 0)]
        rows = rows_of([output[name].numpy() for name in self.compared_outputs(names)])
        batch = len(output[self.compared_outputs(names)[0]])
        return rows.reshape(batch, -1, rows.shape[-1])

    def facts(self, folder: Path) -> Any:
        """See :class:`graphopt.tasks.base.Task`; the names of classes too."""
        return upper("graphopt.artifact.hf_config:facts_of_signals")(folder)

    def print_run(self, model: Any, inputs: list[str], as_json: bool) -> None:
        """Print what the model says of each file."""
        upper("graphopt.cli.signals:print_signals")(model, inputs, as_json)
