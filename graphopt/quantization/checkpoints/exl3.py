"""Checkpoints of ExLlamaV3: trellises of 1 to 8 bits behind rotations of both sides (QTIP, Tseng et al. 2024).

trellis  int16 [K / 16, N / 16, 16 bits]  tiles of 16 x 16 weights, each one circular stream of 256 codes
suh, svh float16 [K], [N]                 what inputs and outputs are multiplied by; su, sv: signs alone, 16 in an int16
mcg, mul1 an integer, where the generator is not the first one

A weight of a tile is a function of the last 16 bits up to its own code, as the stream has them. The matrix is
W = diag(suh) H Q H diag(svh), where H are Hadamard matrices of 128 over the square root of 128, side by side.

The trellises of graphopt have windows of 8 bits, so nothing here is kept as codes: it is decoded, in float16 as its
definition has it up to Q, and in float64 behind that.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Expression, Region
from graphopt.numerics.rotations import hadamard
from graphopt.quantization.checkpoints.importer import Importer, Layer

if TYPE_CHECKING:
    from graphopt.graph.weights import Shape

_TILE, _BLOCK, _WINDOW = 16, 128, 16

# Generators: what a window is multiplied by, and what is added. The first two make two float16 numbers of the product,
# which are added; the last adds up its bytes.
_GENERATORS = {"": (89226354, 64248484), "mcg": (0xCBAC1FED, 0), "mul1": (0x83DCD12D, 0)}
_AND, _XOR = np.uint32(0x8FFF8FFF), np.uint32(0x3B603B60)
_STEP, _BIAS = (float(np.uint16(bits).view(np.float16)) for bits in (0x1EEE, 0xC931))


@dataclasses.dataclass(frozen=True, eq=False)
class Exl3Matrix(Expression):
    """The matrix of a layer, float32 [N, K].

    Attributes:
        trellis: int16 [K / 16, N / 16, 16 bits].
        input_scales: numbers [K].
        output_scales: numbers [N].
        generator: ``""``, ``mcg`` or ``mul1``.
    """

    trellis: Expression
    input_scales: Expression
    output_scales: Expression
    generator: str

    @property
    def dtype(self) -> ir.DataType:
        """float32."""
        return ir.DataType.FLOAT

    @property
    def shape(self) -> Shape:
        """Outputs and inputs."""
        rows, columns, _ = self.trellis.shape
        return (columns * _TILE, rows * _TILE)

    @property
    def whole(self) -> frozenset[int]:
        """None: blocks of 128 x 128 numbers can be read by themselves."""
        return frozenset()

    @cached_property
    def values(self) -> Array:
        """The value of each window, float16 [65536]."""
        return generator_values(self.generator)

    def evaluate(self, region: Region) -> Array:
        """Decode the blocks that the region touches."""
        outputs, inputs = (slice(part.start // _BLOCK * _BLOCK, -(-part.stop // _BLOCK) * _BLOCK) for part in region)
        tiles = tuple(slice(part.start // _TILE, part.stop // _TILE) for part in (inputs, outputs))
        inner = self.values[_windows(self.trellis.evaluate((*tiles, slice(0, self.trellis.shape[2]))))]
        matrix = _rows_of_tiles(inner).astype(np.float64)
        rotation = hadamard(_BLOCK).astype(np.float64) / np.sqrt(_BLOCK)
        blocks = matrix.reshape(-1, _BLOCK, matrix.shape[1] // _BLOCK, _BLOCK).swapaxes(1, 2)
        blocks = rotation @ np.ascontiguousarray(blocks) @ rotation
        products = blocks.swapaxes(1, 2).reshape(matrix.shape)
        factors = (part.evaluate((side,)).astype(np.float64) for part, side in self._sides(inputs, outputs))
        of_inputs, of_outputs = factors
        weights = (of_inputs[:, None] * products * of_outputs).T.astype(np.float32)
        inside = (
            slice(part.start - block.start, part.stop - block.start)
            for part, block in zip(region, (outputs, inputs), strict=True)
        )
        return np.ascontiguousarray(weights[tuple(inside)])

    def _sides(self, inputs: slice, outputs: slice) -> tuple[tuple[Expression, slice], ...]:
        return (self.input_scales, inputs), (self.output_scales, outputs)


def generator_values(generator: str) -> Array:
    """Return what each window of 16 bits means, float16 [65536]."""
    factor, addend = _GENERATORS[generator]
    with np.errstate(over="ignore"):
        words = np.arange(1 << _WINDOW, dtype=np.uint32) * np.uint32(factor) + np.uint32(addend)
    if generator == "mul1":
        sums = words.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.int64)
        # exact in float64, so rounded once, as a fused multiplication and addition is
        return np.asarray((sums + 1024.0) * _STEP + _BIAS, np.float64).astype(np.float16)
    halves = ((words & _AND) ^ _XOR).view(np.float16).reshape(-1, 2)
    return np.asarray(halves[:, 0] + halves[:, 1])


def _windows(tiles: Array) -> Array:
    """Return the windows of streams int16 [..., 16 bits], uint16 [..., 256]."""
    words = np.ascontiguousarray(tiles).view("<u4")
    bits = words.shape[-1] * 32 // 256
    # the highest bit of a word comes first
    stream = np.unpackbits(words.astype(">u4").view(np.uint8), axis=-1)
    ends = (np.arange(256) + 1) * bits
    order = (ends[:, None] + np.arange(-_WINDOW, 0)) % stream.shape[-1]
    octets = np.packbits(stream[..., order], axis=-1)
    return np.asarray(octets[..., 0].astype(np.uint16) << np.uint16(8) | octets[..., 1])


def _rows_of_tiles(numbers: Array) -> Array:
    """Return tiles [K / 16, N / 16, 256], in the order of a tensor core's registers, as a matrix [K, N]."""
    position = np.arange(256)
    lane, number = position // 8, position % 8
    rows = lane % 4 * 2 + number % 2 + number // 2 % 2 * 8
    columns = lane // 4 + number // 4 * 8
    tiles = np.empty((*numbers.shape[:2], _TILE, _TILE), numbers.dtype)
    tiles[..., rows, columns] = numbers
    high, wide, *_ = tiles.shape
    return tiles.swapaxes(1, 2).reshape(high * _TILE, wide * _TILE)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedSigns(Expression):
    """Signs, 16 in an integer and the lowest bit first: -1 where a bit is set, else 1; float32."""

    source: Expression

    @property
    def dtype(self) -> ir.DataType:
        """float32."""
        return ir.DataType.FLOAT

    @property
    def shape(self) -> Shape:
        """As many as there are bits."""
        return (self.source.shape[0] * 16,)

    def evaluate(self, region: Region) -> Array:
        """Unpack all signs."""
        flags = np.unpackbits(np.ascontiguousarray(self.source.numpy()).view(np.uint8), bitorder="little")
        return np.asarray(1 - 2 * flags.astype(np.float32), np.float32)[region]


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit.
    """
    trellis = layer.part(".trellis")
    if trellis.dtype.bitwidth != 16 or len(trellis.shape) != 3:
        raise layer.refusal("these are no tiles of integers of 16 bits", ".trellis")
    rows, columns, words = trellis.shape
    if words % _TILE or not 1 <= words // _TILE <= 8:
        raise layer.refusal("codes of a tile should have 1 to 8 whole bits", ".trellis")
    if rows * _TILE % _BLOCK or columns * _TILE % _BLOCK:
        raise layer.refusal(f"both sides should be multiples of {_BLOCK}", ".trellis")
    generators = [name for name in ("mcg", "mul1") if layer.optional(f".{name}") is not None]
    for name in generators:
        factor = layer.part(f".{name}").numpy().astype(np.int64) & 0xFFFFFFFF
        if len(generators) > 1 or factor.size != 1 or factor.item() != _GENERATORS[name][0]:
            raise layer.refusal(f"it should be {_GENERATORS[name][0]:#x}, and the only generator", f".{name}")
    generator = generators[0] if generators else ""
    sides = (_factors(layer, "su", rows * _TILE), _factors(layer, "sv", columns * _TILE))
    return Exl3Matrix(trellis, *sides, generator)


def _factors(layer: Layer, name: str, size: int) -> Expression:
    """Return what one side is multiplied by: float16 numbers, or signs alone as older files have them."""
    if layer.optional(f".{name}h") is None and layer.optional(f".{name}") is not None:
        return PackedSigns(layer.of_shape(f".{name}", (size // 16,)))
    return layer.of_shape(f".{name}h", (size,))


EXL3 = Importer("exl3", (".trellis",), (".suh", ".svh", ".su", ".sv", ".mcg", ".mul1"), matrix_of)
