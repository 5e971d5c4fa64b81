"""What all number formats have in common: rows of weights become codes, and codes become weights again."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import onnx_ir as ir

Codes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

# Rows, columns and scales of the draw that an expected error is measured on.
_DRAW, _SCALES, _SCALES_KEPT = (64, 256), np.linspace(0.2, 1.0, 33), 5


@dataclass(frozen=True)
class Levels:
    """The values of a format that rounds each weight by itself, as a kernel that searches them wants them.

    Attributes:
        values: the different values in order, float64 [levels].
        codes: the lowest code of each, uint8 [levels].
    """

    values: Doubles
    codes: Codes

    @cached_property
    def is_counting(self) -> bool:
        """Whether the values are consecutive integers, every second code even, the lowest one too."""
        return bool((np.diff(self.values) == 1).all() and (self.codes % 2 == np.arange(len(self.codes)) % 2).all())

    @cached_property
    def halfway(self) -> Doubles:
        """Where the nearest value changes: halfway between neighbours, [levels - 1]."""
        return (self.values[1:] + self.values[:-1]) / 2

    @cached_property
    def ties(self) -> Doubles:
        """For each value, the number halfway to the next one if it is rounded up, else NaN."""
        goes_up = (self.codes[:-1] % 2 == 1) & (self.codes[1:] % 2 == 0)
        return np.append(np.where(goes_up, self.halfway, np.nan), np.nan)

    def encode(self, numbers: Values) -> Codes:
        """Return the code of the value nearest to each of ``numbers``.

        Beyond the ends it is the end. A tie goes to the neighbour whose code is even, as in IEEE 754 and as usual for
        integers; where both codes are even, or both odd, to the lower value.
        """
        if self.is_counting:
            counts = np.rint(numbers - self.values[0])
            return np.asarray(self.codes[np.clip(counts, 0, len(self.values) - 1).astype(np.uint8)])
        levels = np.searchsorted(self.halfway, numbers)
        return np.asarray(self.codes[levels + (self.ties[levels] == numbers)])


@dataclass(frozen=True)
class Format(abc.ABC):
    """A number format: what codes mean, and which codes stand best for a row of weights.

    A weight is (what its code means - what the zero point of its group means) x the scale of its group. What a code
    means may depend on its neighbours in the row: a row holds the weights of one input, for all outputs. So rows are
    encoded as a whole, and a rounding method such as GPTQ, which goes from one input to the next, meets no difference.

    A new kind of format implements :meth:`encode`, :meth:`decode`, :attr:`limit` and :attr:`operands`, and overrides
    what differs from the defaults here.

    Attributes:
        name: what recipes and reports call it.
        bits: bits of one stored code, 1 to 8.
        operator: the operator that turns codes, scales, :attr:`operands` and zero points into a matrix; ``lower`` packs
            what it reads.
    """

    operator: ClassVar[str] = "Dequantize"

    name: str
    bits: int

    @property
    def onnx_type(self) -> ir.DataType | None:
        """The standard ONNX type that holds the codes, ``None`` where there is none that a runtime loads."""
        return None

    @property
    def zero_point(self) -> bool:
        """Whether groups carry a zero point, a code that means 0."""
        return False

    @property
    def joint_columns(self) -> int | None:
        """How many neighbours in a row are encoded together: 1 for none, ``None`` for the whole row."""
        return 1

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes per weight, scales aside."""
        return self.bits

    @property
    @abc.abstractmethod
    def limit(self) -> float:
        """What the largest magnitude of a group is mapped to where a scale is chosen by extremes.

        Of a format with zero points, the value of the highest code less that of the lowest.
        """

    @property
    def levels(self) -> Levels | None:
        """The values, where the nearest of them to a weight is its best code; ``None`` where neighbours matter."""
        return None

    @property
    @abc.abstractmethod
    def operands(self) -> Mapping[str, npt.NDArray[Any]]:
        """What :attr:`operator` reads besides codes, scales and zero points, by the names of its ports."""

    @abc.abstractmethod
    def encode(
        self,
        numbers: Values,
        scales: npt.ArrayLike = 1.0,
        zero_points: Codes | None = None,
        importance: npt.NDArray[Any] | None = None,
    ) -> Codes:
        """Return the codes of least squared error for rows of weights.

        Args:
            numbers: weights [..., columns]; each row along the last axis is encoded by itself.
            scales: what codes are multiplied by, broadcast to ``numbers``.
            zero_points: codes, broadcast to ``numbers``; ``None`` for none.
            importance: what a squared error counts, broadcast to ``numbers``; ``None`` for 1. It makes no difference
                where neighbours do not matter.

        Returns:
            uint8 [..., codes of a row], see :meth:`code_columns`.
        """

    @abc.abstractmethod
    def decode(self, codes: Codes, scales: npt.ArrayLike | None = None, zero_points: Codes | None = None) -> Doubles:
        """Return what codes [..., codes of a row] stand for, [..., columns]; scales default to 1.

        Raises:
            IndexError: a code has no meaning.
        """

    def approximate(self, units: Singles, scales: Singles) -> Singles:
        """Return about what the best codes for ``units`` times ``scales`` mean, in units; may write to ``units``."""
        return self.decode(self.encode(units * scales, scales)).astype(np.float32)

    def pool_errors(self, errors: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the errors of all columns that are encoded together, at each of them, [groups, columns].

        Scales of such columns are chosen together: codes of one column change with the scales of its neighbours.
        """
        if self.joint_columns == 1:
            return errors
        runs = list(self.blocks(errors.shape[1], 1))
        sums = np.add.reduceat(errors, [run.start for run in runs], axis=1)
        return np.repeat(sums, [run.stop - run.start for run in runs], axis=1)

    def zero_points(self, lows: Doubles, scales: Doubles) -> Codes:
        """Return the zero points of groups whose least number is ``-lows``; zeros where the format has none."""
        return self.encode(lows, scales) if self.zero_point else np.zeros(scales.shape, np.uint8)

    def code_columns(self, columns: slice) -> slice:
        """Return where in a row of codes the codes of some columns of weights lie, whole joint runs of them."""
        return columns

    def blocks(self, columns: int, size: int) -> Iterator[slice]:
        """Yield slices of columns that cover all, about ``size`` of them in each; no code reaches out of its slice."""
        joint = columns if self.joint_columns is None else self.joint_columns
        width = max(1, size // max(1, joint)) * joint
        for begin in range(0, columns, max(1, width)):
            yield slice(begin, min(begin + width, columns))

    def to_onnx(self, codes: Codes) -> npt.NDArray[Any]:
        """Return the codes as an array of :attr:`onnx_type`.

        Raises:
            ValueError: there is no such type.
        """
        raise ValueError(f"ONNX has no type for {self.name}, not even for {codes.size} codes")

    @cached_property
    def expected_error(self) -> float:
        """The mean squared error of normal weights of variance 1 at the best scale for all of them.

        What a rounding method or a search of formats may expect before it looks at any weight. Measured on a fixed draw
        of 16384 numbers, so to about 2%.
        """
        draw = np.random.default_rng(0).standard_normal(_DRAW)
        largest = float(np.abs(draw).max())

        def error_at(share: float, rows: int) -> float:
            scale = largest * share * (2 if self.zero_point else 1) / self.limit
            points = (
                self.zero_points(np.full((1, 1), largest * share), np.full((1, 1), scale)) if self.zero_point else None
            )
            numbers = draw[:rows]
            return float(((self.decode(self.encode(numbers, scale, points), scale, points) - numbers) ** 2).mean())

        # an eighth of the draw tells which scales are near the best
        shares = sorted(_SCALES.tolist(), key=lambda share: error_at(share, _DRAW[0] // 8))
        return min(error_at(share, _DRAW[0]) for share in shares[:_SCALES_KEPT])
