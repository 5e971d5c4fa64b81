"""Trellises: what a code means depends on the codes to its right, so few bits reach as many values as more would."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphopt.numerics.formats.format import Codes, Doubles, Format, Singles, Values

if TYPE_CHECKING:
    from collections.abc import Iterator

TILE = 16
"""Columns whose codes are one circle: the neighbour of the last is the first."""

# Tiles that are searched together: their costs of all windows stay in a core's cache.
_TILES = 512
_STEP = 32

WORST_COST = float(1 << 15)
"""How many squared steps more than the best a path may cost; any other costs that much."""

_REACH = 0.85

# Costs of paths are integers below 2^24, which float32 holds exactly beside the number of a code.
_EXACT_BITS = 24
# How many steps beyond the ends numbers are told apart.
_MARGIN = 48
# What an error counts at least, in units of costs.
_LEAST_COUNT = 1 / 16


@dataclass(frozen=True)
class TrellisFormat(Format):
    """A weight is ``head[upper half of its window] + tail[lower half]``.

    The window of a weight are the first ``window`` bits of its code, the next code to the right and so on, circular in
    a tile of 16 columns; the last tile of a row may have fewer. With 4 bits the two halves are the weight's own code
    and its right neighbour's. This is trellis-coded quantization (Marcellin and Fischer 1990) with tail biting, as in
    QTIP (Tseng et al. 2024), which has windows of 16 bits; windows of 8 bits take two tables of 16 entries.

    Attributes:
        head: a value for each upper half of a window.
        tail: a value for each lower half.

    Raises:
        ValueError: the tables do not fit one another, or a window is narrower than two codes or wider than four.
    """

    operator: ClassVar[str] = "DequantizeTrellis"

    head: tuple[float, ...]
    tail: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = len(self.head), len(self.tail)
        if sizes[0] != sizes[1] or sizes[0] != 2**self.field or not self.bits <= self.field <= 2 * self.bits:
            raise ValueError(f"{self.name} of {self.bits} bits has tables of {sizes[0]} and {sizes[1]} values")

    @cached_property
    def field(self) -> int:
        """Bits of half a window."""
        return (len(self.head) - 1).bit_length()

    @property
    def window(self) -> int:
        """Bits of a window."""
        return 2 * self.field

    @property
    def joint_columns(self) -> int:
        """See :class:`Format`."""
        return TILE

    @cached_property
    def values(self) -> Singles:
        """The value of each window, [2^window]."""
        head, tail = (np.array(table, np.float32) for table in (self.head, self.tail))
        return (head[:, None] + tail).reshape(-1)

    @cached_property
    def limit(self) -> float:
        """Short of the nearer end by 15%: the last windows are few, and the best scales do not reach for them."""
        return _REACH * float(min(self.values.max(), -self.values.min()))

    @cached_property
    def operands(self) -> dict[str, Singles]:
        """The tables as ``DequantizeTrellis`` reads them, [2, entries]."""
        return {"tables": np.array([self.head, self.tail], np.float32)}

    def windows(self, codes: Codes) -> npt.NDArray[np.uint16]:
        """Return the window of each weight, [..., columns], of codes [..., columns]."""
        windows = np.empty(codes.shape, np.uint16)
        whole = codes.shape[-1] // TILE * TILE
        for columns in (slice(0, whole), slice(whole, codes.shape[-1])):
            part = codes[..., columns]
            if part.size:
                tiles = part.reshape(-1, min(TILE, part.shape[-1]))
                windows[..., columns] = self._windows_of_tiles(tiles).reshape(part.shape)
        return windows

    def _windows_of_tiles(self, tiles: Codes) -> npt.NDArray[np.uint16]:
        """Return the window of each weight of tiles [tiles, width]."""
        width, code_count = tiles.shape[1], -(-self.window // self.bits)
        neighbours = np.concatenate([tiles] * (1 + -(-code_count // width)), 1, dtype=np.uint16)
        windows = np.zeros(tiles.shape, np.uint16)
        for number in range(code_count):
            spare = self.window - self.bits * (number + 1)
            part = neighbours[:, number : number + width]
            windows |= part << np.uint16(spare) if spare >= 0 else part >> np.uint16(-spare)
        return windows

    def decode(self, codes: Codes, scales: npt.ArrayLike | None = None, zero_points: Codes | None = None) -> Doubles:
        """See :class:`Format`; there are no zero points."""
        del zero_points
        if codes.max(initial=0) >> self.bits:
            raise IndexError(f"{self.name} has no code {codes.max()}")
        values = self.values.take(self.windows(codes)).astype(np.float64)
        if scales is not None:
            values *= np.asarray(scales)
        return values

    def encode(
        self,
        numbers: Values,
        scales: npt.ArrayLike = 1.0,
        zero_points: Codes | None = None,
        importance: npt.NDArray[Any] | None = None,
    ) -> Codes:
        """Return codes of nearly the least squared error; of paths that cost the same the one of lower codes.

        Viterbi's algorithm, in integers (:meth:`_search`), finds the best path through a tile that is cut in the middle
        and whose ends are free. Its state where the tile ends is what the best closed path begins and ends with, and
        the state of that one in the middle is what the path begins and ends with that is returned. To try each state
        would be exact, take 2^(window - bits) searches instead of three, and err 2 to 5% less for normal weights; a
        last tile of fewer columns is searched so.
        """
        del zero_points
        codes = np.empty(numbers.shape, np.uint8)
        weights = 1.0 if importance is None else importance
        for columns, units, counts in self._tiles(numbers, np.asarray(scales), weights):
            best = np.empty(units.shape, np.uint8)
            for begin in range(0, len(units), _TILES):
                part = slice(begin, begin + _TILES)
                best[part] = self._close(units[part], counts[part])
            codes[..., columns] = best.reshape(codes[..., columns].shape)
        return codes

    def approximate(self, units: Singles, scales: Singles) -> Singles:
        """Return what the best path with free ends means; it errs a little less than one that closes."""
        for columns, numbers, counts in self._tiles(units, np.asarray(scales), 1.0, in_units=True):
            half = numbers.shape[1] // 2
            values = np.empty_like(numbers)
            for begin in range(0, len(numbers), _TILES):
                part = slice(begin, begin + _TILES)
                codes, states = self._search(np.roll(numbers[part], -half, 1), np.roll(counts[part], -half, 1), None)
                windows = codes.astype(np.intp) << (self.window - self.bits) | states[:, 1:]
                values[part] = np.roll(self.values[windows], half, 1)
            units[..., columns] = values.reshape(units[..., columns].shape)
        return units

    def _tiles(
        self,
        numbers: Values,
        scales: npt.NDArray[Any],
        importance: npt.ArrayLike,
        *,
        in_units: bool = False,
    ) -> Iterator[tuple[slice, Singles, Singles]]:
        """Yield columns, and their tiles of one width: numbers in steps, and what their squared errors cost.

        Columns of whole tiles come first, then those of the last tile.
        """
        steps = np.broadcast_to(scales, numbers.shape)
        weights = np.broadcast_to(importance, numbers.shape)
        whole = numbers.shape[-1] // TILE * TILE
        for columns in (slice(0, whole), slice(whole, numbers.shape[-1])):
            width = min(TILE, columns.stop - columns.start)
            if not width or not numbers.size:
                continue
            factors = steps[..., columns].astype(np.float64)
            units = numbers[..., columns] if in_units else numbers[..., columns] / factors
            counts = (weights[..., columns] * factors * factors).reshape(-1, width)
            # only ratios within a tile matter, and float32 has no room for squares of the smallest scales
            largest = counts.max(1, keepdims=True)
            with np.errstate(divide="ignore", invalid="ignore"):
                counts = np.where(largest > 0, counts * (1 / largest), 1.0).astype(np.float32)
            limit = np.float32(self.farthest)
            numbers_in_steps = np.clip(units.astype(np.float32) * np.float32(self.steps_per_unit), -limit, limit)
            costs = np.maximum(counts * np.float32(self.costs_per_step), np.float32(_LEAST_COUNT))
            yield columns, numbers_in_steps.reshape(-1, width), costs

    def _close(self, units: Singles, counts: Singles) -> Codes:
        """Return codes of tiles [tiles, width] that close in a circle."""
        width, half = units.shape[1], units.shape[1] // 2
        if width < TILE:
            return self._close_exactly(units, counts)
        turned_units, turned_counts = (np.roll(array, -half, 1) for array in (units, counts))
        _, states = self._search(turned_units, turned_counts, None)
        _, states = self._search(units, counts, states[:, width - half])
        codes, _ = self._search(turned_units, turned_counts, states[:, half])
        return np.roll(codes, half, 1)

    def _close_exactly(self, units: Singles, counts: Singles) -> Codes:
        """Return the best codes of tiles that close in a circle, by a search for each state at their ends."""
        best, lowest = np.zeros(units.shape, np.uint8), np.full(len(units), np.inf)
        head, tail = self.tables_in_steps
        values = (head[:, None] + tail).reshape(-1)
        for state in range(2 ** (self.window - self.bits)):
            codes, _ = self._search(units, counts, np.full(len(units), state))
            squares = counts * (values[self.windows(codes)] - units) ** 2
            errors = np.zeros(len(units), np.float32)
            for column in range(units.shape[1]):  # in this order, as the library sums too
                errors += squares[:, column]
            is_better = errors < lowest
            best[is_better], lowest[is_better] = codes[is_better], errors[is_better]
        return best

    @cached_property
    def tables_in_steps(self) -> Singles:
        """The tables in steps of the search, [2, entries]: integers."""
        return np.rint(np.array([self.head, self.tail]) * self.steps_per_unit).astype(np.float32)

    @cached_property
    def steps_per_unit(self) -> float:
        """How many steps of the search a unit is: 32, or fewer, with which the largest value is 127 steps."""
        top = float(np.abs(self.values).max())
        return min(_STEP, 127 / top) if top else float(_STEP)

    @cached_property
    def farthest(self) -> float:
        """How many steps from 0 numbers are told apart."""
        return float(np.ceil(np.abs(self.values).max() * self.steps_per_unit)) + _MARGIN

    @cached_property
    def costs_per_step(self) -> float:
        """What a squared error of a step costs: the largest power of 2 for which costs are exact."""
        largest = (2 * self.farthest - _MARGIN + 4) ** 2 + WORST_COST
        return float(2.0 ** np.floor(_EXACT_BITS - self.bits - np.log2(largest)))

    def _search(
        self, units: Singles, counts: Singles, ends: npt.NDArray[np.intp] | None
    ) -> tuple[Codes, npt.NDArray[np.intp]]:
        """Return the codes of the best path, and its states before each column and behind the last.

        A state is the bits that two neighbouring windows share. With h and t of both tables, a number u costs

            c (u - h - t)^2  =  q^2 / 4c + q t + c t^2        q = 2c (h - u)

        of which q and the squares are rounded to integers, so that any order of sums gives the same. A path that costs
        2^15 squared steps more than the best is as bad as any other.

        Args:
            units: what is encoded, in steps, [tiles, width].
            counts: what the squared error of a step costs, [tiles, width].
            ends: the state that a path begins and ends with, [tiles]; ``None`` for any.
        """
        tiles, width = units.shape
        choices, state_count = 2**self.bits, 2 ** (self.window - self.bits)
        worst = np.float32(WORST_COST * self.costs_per_step)
        costs = np.zeros((tiles, state_count), np.float32)
        if ends is not None:
            costs[:] = worst
            costs[np.arange(tiles), ends] = 0
        best_codes = np.empty((width, tiles, state_count), np.uint8)
        # A window is a code and the state behind it, and also the state before it and what is new. A state before it
        # begins with the code, and the state behind it with the rest.
        states = np.arange(state_count)
        upper, lower = states >> (self.field - self.bits), states & (2**self.field - 1)
        numbers = (states >> (self.window - 2 * self.bits)).astype(np.float32)
        tail = self.tables_in_steps[1][lower].reshape(-1, choices)
        shape = (tiles, choices, state_count // choices, 1)
        paths = np.empty((tiles, choices, *tail.shape), np.float32)
        for column in range(width):
            slopes, offsets, squares = self._terms(units[:, column], counts[:, column])
            # as multiples of 2^bits, with the number of the code as the rest: the least has both
            start_costs = (costs + offsets[:, upper]) * np.float32(choices) + numbers
            np.multiply((slopes[:, upper] * np.float32(choices)).reshape(shape), tail, out=paths)
            paths += start_costs.reshape(shape)
            path_ends = paths.min(1).reshape(tiles, state_count).astype(np.int32)
            best_codes[column] = path_ends & (choices - 1)
            costs = (path_ends >> self.bits).astype(np.float32) + squares[:, lower]
            costs -= costs.min(1, keepdims=True)
            np.minimum(costs, worst, out=costs)
        codes, path = np.empty((tiles, width), np.uint8), np.empty((tiles, width + 1), np.intp)
        path[:, width] = costs.argmin(1) if ends is None else ends
        for column in reversed(range(width)):
            codes[:, column] = best_codes[column, np.arange(tiles), path[:, column + 1]]
            path[:, column] = (codes[:, column].astype(np.intp) * state_count + path[:, column + 1]) >> self.bits
        return codes, path

    def _terms(self, units: Singles, counts: Singles) -> tuple[Singles, Singles, Singles]:
        """Return what costs are made of, each [tiles, entries of a table]: q, its square over 4c, and c t^2."""
        head, tail = self.tables_in_steps
        doubles, inverse = (counts + counts)[:, None], np.float32(0.25) / counts[:, None]
        slopes = np.rint(head * doubles - units[:, None] * doubles)
        return slopes, np.rint(slopes * slopes * inverse), np.rint(tail * tail * counts[:, None])


def trellis(bits: int, head: tuple[int, ...], tail: tuple[int, ...]) -> TrellisFormat:
    """Return ``t<bits>`` with tables in steps of 1/16: the search of paths counts 32 steps for a unit."""
    return TrellisFormat(f"t{bits}", bits, *(tuple(value / 16 for value in table) for table in (head, tail)))


# What tools/studies/train_trellis.py ended with when values had more steps, made smaller, and then moved by single
# steps, as it does at its end now. In steps of 1/16.
T2 = trellis(
    2,
    (5, -17, 6, -15, -12, 3, 3, 0, 18, -1, -5, -2, 1, -7, 11, 13),
    (5, -7, -6, 6, 2, -12, -1, 9, 0, 11, 1, -8, 2, -6, 9, -7),
)
T3 = trellis(
    3,
    (-6, 0, 10, -7, 1, 15, -20, -3, 5, 6, -3, 9, -11, 3, 21, -14),
    (5, 1, -9, -8, -3, 1, -3, 8, 6, -6, 6, -1, 2, -5, 0, -1),
)
T4 = trellis(
    4,
    (-1, -18, -14, 25, 1, -25, -8, -3, -5, 8, -11, 5, 14, 18, 3, 11),
    (-7, 0, -6, 2, 3, -3, 7, -3, 1, 5, 4, -5, 7, -3, -1, 1),
)
T5 = trellis(
    5,
    (
        *(31, 33, -32, 5, 36, 26, -6, 29, -8, 7, 46, -46, 17, -1, -10, -14),
        *(-16, -12, 3, -25, -38, -29, 23, 1, -3, -23, -18, 12, -20, 14, 10, 20),
    ),
    (
        *(-6, -12, -13, 11, 11, 3, 2, 6, -1, -13, 6, 7, -5, 4, 7, -4),
        *(13, -16, 6, -6, -8, 1, -1, 17, -6, -2, 9, -3, -10, 1, -9, 9),
    ),
)
