"""Scales that are codes of 8 bits themselves, as those of bitsandbytes where they are quantized again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Expression, Origin, Region

if TYPE_CHECKING:
    from graphopt.graph.weights import Shape


@dataclasses.dataclass(frozen=True, eq=False)
class NestedScales(Origin):
    """float32 [count]: table[codes[i]] scales[i // block] + offsets[i // block], each operation rounded to float32.

    Double quantization (Dettmers et al. 2023, arXiv:2305.14314, section 3).

    Attributes:
        codes: uint8 [count].
        table: the value of each code, float32.
        scales: float32 [blocks].
        block: codes that share a scale.
        offsets: float32 [blocks], or [1] for all of them.
    """

    codes: Expression
    table: Expression
    scales: Expression
    block: int
    offsets: Expression

    @property
    def dtype(self) -> ir.DataType:
        """float32."""
        return ir.DataType.FLOAT

    @property
    def shape(self) -> Shape:
        """As the codes."""
        return self.codes.shape

    @property
    def whole(self) -> frozenset[int]:
        """None: any part can be read by itself."""
        return frozenset()

    def evaluate(self, region: Region) -> Array:
        """Decode the codes in the region."""
        numbers = self.table.numpy()[self.codes.evaluate(region)]
        blocks = np.arange(region[0].start, region[0].stop) // self.block
        offsets = self.offsets.numpy()
        return np.asarray(
            numbers * self.scales.numpy()[blocks] + (offsets if len(offsets) == 1 else offsets[blocks]), np.float32
        )
