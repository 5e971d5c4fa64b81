"""Random inputs of a graph: sizes for dimensions that vary, numbers by types, names and readers."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphopt.errors import InputError
from graphopt.tasks.graph.ranges import Range, range_of
from graphopt.tasks.ports import Port, port_of_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import onnx_ir as ir

    from graphopt.tasks.ports import Array

BATCHES, LENGTHS = (2, 1), (12, 32, 64, 128, 224, 256, 320, 512, 576, 640, 1024, 4096, 16000)
"""Sizes to try for the first axis of inputs, and for other dimensions that vary, until the graph runs."""

_IMAGE_LENGTHS = (64, 32, 224, 128, 256, 320, 512, 640, 1024, 48, 28, 12)
_BATCH_NAME = re.compile(r"batch|^bs$", re.IGNORECASE)
# Names that some give to a batch and others to a length.
_EITHER_NAME = re.compile(r"^[nb]$", re.IGNORECASE)
# In graphs with these, onnxruntime 1.31 ends the process (SIGFPE) where a signal is shorter than a frame.
_FATAL_IF_SHORT = frozenset(("STFT", "DFT"))
_MASK, _LENGTH, _POSITIONS = "mask", re.compile(r"len(gth)?s?(_|$)", re.IGNORECASE), "position"
# Dimensions without a name that may be a batch, at most; sizes that are tried before larger ones.
_MAX_UNNAMED, _SHORT = 3, 8
_IMAGE_RANK, _CHANNELS = 4, (1, 3, 4)

Sizes = dict[str, int]


@dataclass(frozen=True)
class RandomInputs:
    """How inputs of a graph are drawn.

    Attributes:
        ports: the inputs.
        ranges: of inputs that hold integers, which.
        longest_first: whether long lengths are tried before short ones, as onnxruntime may not survive those.
    """

    ports: tuple[Port, ...]
    ranges: Mapping[str, Range]
    longest_first: bool = False

    @classmethod
    def of_graph(cls, graph: ir.Graph) -> RandomInputs:
        """Read the inputs of ``graph``.

        Raises:
            InputError: an input is no tensor of numbers, or has no shape: names it.
        """
        values = list(graph.inputs)
        ports = tuple(port_of_value(value) for value in values)
        for value, port in zip(values, ports, strict=True):
            if port.dtype is None or port.dtype.kind not in "fiubV" or value.shape is None:
                raise InputError(
                    f"random numbers cannot be drawn for an input of the type {value.type or 'unknown'}"
                    + ("" if value.shape is not None else " and no stated shape"),
                    tensor=port.name,
                    remedy="give inputs: --inputs FILE.npz",
                )
        integers = (value for value, port in zip(values, ports, strict=True) if port.dtype.kind in "iu")  # type: ignore[union-attr]
        ranges = {value.name or "": range_of(value) for value in integers}
        return cls(ports, ranges, any(node.op_type in _FATAL_IF_SHORT for node in graph.all_nodes()))

    def sizes(self) -> Iterator[Sizes]:
        """Yield sizes of the dimensions that vary, by their keys, the likeliest first."""
        keys = {key: axis for port in self.ports for axis, key in _keys_of(port)}
        first = {key for port in self.ports for axis, key in _keys_of(port) if axis == 0}
        batches = [key for key in keys if key in first or _BATCH_NAME.search(key)]
        lengths = [key for key in keys if key not in batches]
        is_image = any(len(port.shape) == _IMAGE_RANK and port.shape[1] in _CHANNELS for port in self.ports)
        if not keys:
            yield {}
            return
        of_batches = BATCHES if batches else BATCHES[:1]
        of_lengths: tuple[int, ...] = (_IMAGE_LENGTHS if is_image else LENGTHS) if lengths else LENGTHS[:1]
        if self.longest_first:
            of_lengths = tuple(sorted(of_lengths, reverse=True))
        # A dimension without a name may be a batch wherever it stands, as it is in states of recurrences.
        free_keys = [key for key in lengths if ":" in key or _EITHER_NAME.search(key)][:_MAX_UNNAMED]
        for some_lengths in (of_lengths[:_SHORT], of_lengths[_SHORT:]):
            for flags in itertools.product((False, True), repeat=len(free_keys)):
                as_batch = [key for key, is_batch in zip(free_keys, flags, strict=True) if is_batch]
                for length, batch in itertools.product(some_lengths, of_batches):
                    yield dict.fromkeys(lengths, length) | dict.fromkeys([*batches, *as_batch], batch)

    def draw(self, sizes: Sizes, seed: int) -> dict[str, Array]:
        """Return inputs with the dimensions that vary in some sizes; the same ones for the same seed."""
        random = np.random.default_rng(seed)
        return {port.name: self._numbers(port, _shape_of(port, sizes), sizes, random) for port in self.ports}

    def _numbers(self, port: Port, shape: tuple[int, ...], sizes: Sizes, random: np.random.Generator) -> Array:
        assert port.dtype is not None
        name, kind = port.name.lower(), port.dtype.kind
        if _MASK in name and kind in "iubf":
            return np.ones(shape, port.dtype)
        if kind in "iu":
            return self._integers(port, shape, sizes, random).astype(port.dtype)
        if kind == "b":
            return random.random(shape) > 1 / 2
        # Numbers that stand alone are factors and thresholds; a zero or a sign of them would hide what they scale.
        numbers = random.standard_normal(shape) if np.prod(shape) > 1 else random.uniform(0.5, 1, shape)
        return numbers.astype(np.float32).astype(port.dtype)

    def _integers(self, port: Port, shape: tuple[int, ...], sizes: Sizes, random: np.random.Generator) -> Array:
        integers = self.ranges[port.name]
        if integers.choices and np.prod(shape) == 1:
            # One choice for all samples: a rate or a mode, by which the graph goes other ways.
            return np.full(shape, max(integers.choices))
        if _POSITIONS in port.name.lower() and shape:
            return np.broadcast_to(np.arange(shape[-1]) % (integers.limit or shape[-1]), shape)
        if integers.limit is None and _LENGTH.search(port.name) and len(shape) <= 1:
            return np.full(shape, max(sizes.values(), default=1))
        if port.dtype == np.uint8 and integers.limit is None:
            return random.integers(0, 256, shape)
        return random.integers(0, integers.upper_bound, shape)


def _keys_of(port: Port) -> Iterator[tuple[int, str]]:
    """Yield the axes of a port whose size varies, each with a key: its name, or its place."""
    for axis, size in enumerate(port.shape):
        if size is None or size < 0:
            yield from ((axis, key) for key in _names_of(port, axis))


def _names_of(port: Port, axis: int) -> list[str]:
    symbol = (port.symbols[axis] if axis < len(port.symbols) else None) or ""
    if re.fullmatch(r"[A-Za-z_][\w.]*", symbol):
        return [symbol]
    terms = [term.strip() for term in symbol.split("+")]
    if len(terms) > 1 and all(re.fullmatch(r"\w+", term) for term in terms):
        return [term for term in terms if not term.isdigit()]
    return [f"{port.name}:{axis}"]


def _shape_of(port: Port, sizes: Sizes) -> tuple[int, ...]:
    shape = []
    for axis, size in enumerate(port.shape):
        if size is not None and size >= 0:
            shape.append(size)
            continue
        symbol = (port.symbols[axis] if axis < len(port.symbols) else None) or ""
        constants = sum(int(term) for term in symbol.split("+") if term.strip().isdigit())
        shape.append(sum(sizes[key] for key in _names_of(port, axis)) + constants)
    return tuple(shape)
