"""Train the tables of a trellis format on groups of normal weights, each with the best scale for it.

    python tools/studies/train_trellis.py 3 --starts 40 --rounds 80

A group is 64 rows of one column, 16 columns are a tile. In turns, Viterbi's algorithm gives codes, each group takes the
scale of least squared error, and the two tables are the least squares for all windows (Lloyd's algorithm). That ends in
one of many local minima, so there are short trainings from random starts, long ones of the best, and then short ones
from the best tables with some values moved, of which any that is better is kept. The last reduce the error as much as
all others. Values are in steps of 1/16, of a span so small that kernels can add products in 16 bits: see ``room``. At
the end values move by single steps as long as that reduces the error. Prints the tables, and the relative squared error
on other groups.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt
import typer

from graphopt.numerics.formats.trellis import TrellisFormat
from graphopt.quantization.rounding import native
from graphopt.quantization.rounding.nearest import round_to_nearest

Doubles = npt.NDArray[np.float64]
GROUP = 64
_STEP = 16
# How many steps values may span where a half of a window has 4 bits, those of tails alone, and where it has more.
_VALUES, _TAILS, _MORE_VALUES = 64, 32, 128
# The round after which scales are no longer 1.
_SEARCH = 7


def fit_scales(numbers: Doubles, values: Doubles, scales: Doubles) -> Doubles:
    """Return the best scale of each group [1, columns] for the values of its codes [rows, columns]."""
    best = (numbers * values).sum(0) / (values * values).sum(0)
    return np.where(best > 0, best, scales)


def fit_tables(
    format: TrellisFormat, units: Doubles, windows: npt.NDArray[np.uint16], counts: Doubles
) -> TrellisFormat:
    """Return the format with the tables of least squared error for numbers whose windows are known."""
    size = len(format.head)
    upper, lower = windows >> format.field, windows & (size - 1)
    gram, rhs = np.zeros((2 * size, 2 * size)), np.zeros(2 * size)
    for first, second in ((upper, lower + size), (lower + size, upper)):
        weight = np.bincount(first.ravel(), counts.ravel(), 2 * size)
        gram[np.arange(2 * size), np.arange(2 * size)] += weight
        rhs += np.bincount(first.ravel(), (counts * units).ravel(), 2 * size)
        pairs = first.astype(np.int64) * 2 * size + second
        gram += np.bincount(pairs.ravel(), counts.ravel(), 4 * size * size).reshape(2 * size, 2 * size)
    tables: Doubles = np.linalg.lstsq(gram, rhs, rcond=1e-9)[0].astype(np.float64)
    return make(format.bits, tables[:size], tables[size:])


def make(bits: int, head: Doubles, tail: Doubles) -> TrellisFormat:
    """Return a format; both tables get the same mean, which does not change their sum."""
    shift = (head.mean() - tail.mean()) / 2
    return TrellisFormat(f"t{bits}", bits, tuple(map(float, head - shift)), tuple(map(float, tail + shift)))


def spans(format: TrellisFormat) -> tuple[float, float]:
    """Return how many steps the values of each table span."""
    head, tail = (_STEP * (max(table) - min(table)) for table in (format.head, format.tail))
    return head, tail


def room(format: TrellisFormat) -> float:
    """Return by how much values may be multiplied.

    AVX2 adds the products of two lines of values and of four lines of tails in 16 bits, of one line where a half of a
    window has more than 4 bits.
    """
    head, tail = spans(format)
    return min(_VALUES / (head + tail), _TAILS / tail) if format.field == 4 else _MORE_VALUES / (head + tail)


def round_values(format: TrellisFormat) -> TrellisFormat:
    """Return the format with values in steps of 1/16."""
    tables = [tuple(float(v) for v in np.rint(np.array(t) * _STEP) / _STEP) for t in (format.head, format.tail)]
    return TrellisFormat(format.name, format.bits, *tables)


def shrunk(format: TrellisFormat) -> TrellisFormat:
    """Return the format in steps of 1/16, scaled to the span that kernels allow."""
    factor = room(format)
    while (
        room(small := round_values(make(format.bits, *(np.array(t) * factor for t in (format.head, format.tail))))) < 1
    ):
        factor *= 0.99
    return small


def move_steps(format: TrellisFormat, draw: Doubles) -> TrellisFormat:
    """Return tables in which no move of a value by one step reduces the error."""
    tables, least_error, number, rejections = [list(format.head), list(format.tail)], error_of(format, draw), 0, 0
    while rejections < 2 * len(tables[0]) * 2:
        table, entry, sign = number % 2, number // 4 % len(tables[0]), number // 2 % 2 * 2 - 1
        number, rejections = number + 1, rejections + 1
        tables[table][entry] += sign / _STEP
        candidate = TrellisFormat(format.name, format.bits, tuple(tables[0]), tuple(tables[1]))
        if room(candidate) >= 1 and (error := error_of(candidate, draw)) < least_error:
            format, least_error, rejections = candidate, error, 0
        else:
            tables[table][entry] -= sign / _STEP
    return format


def error_of(format: TrellisFormat, draw: Doubles) -> float:
    """Return the relative squared error with the scales that ``nearest`` searches."""
    values = round_to_nearest(draw, format, GROUP, "least_squares").dequantize()
    return float(((values - draw) ** 2).mean() / (draw**2).mean())


def random_start(bits: int, field: int, seed: int) -> TrellisFormat:
    """Return tables of evenly spaced values in random order."""
    random = np.random.default_rng(seed)
    span = 2.4 if bits > 2 else 1.8
    return make(bits, *(random.permutation(np.linspace(-top, top, 2**field)) for top in (span, 0.8)))


def move_values(format: TrellisFormat, random: np.random.Generator) -> TrellisFormat:
    """Return tables with some of their values moved."""
    tables = (np.array(format.head), np.array(format.tail))
    return make(format.bits, *(t + random.normal(0, 0.12, t.shape) * (random.random(t.shape) < 0.4) for t in tables))


def train(format: TrellisFormat, rounds: int, draw: Doubles) -> TrellisFormat:
    """Return tables after some rounds on groups [rows, columns], in steps of 1/16."""
    scales = np.ones((1, draw.shape[1]))
    for number in range(rounds):
        if number % 10 == _SEARCH:
            scales = round_to_nearest(draw, format, GROUP, "least_squares").scales.astype(np.float64)
        codes = native.encode(draw[None], format, scales)[0]
        windows, values = format.windows(codes), format.decode(codes)
        if number >= _SEARCH:
            scales = fit_scales(draw, values, scales[0])[None]
        format = fit_tables(format, draw / scales, windows, np.broadcast_to(scales**2, draw.shape))
    return shrunk(format)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bits", type=int)
    parser.add_argument("--field", type=int, default=4, help="bits of half a window")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--starts", type=int, default=16)
    parser.add_argument("--moves", type=int, default=40)
    arguments = parser.parse_args()
    draw, test = (np.random.default_rng(seed).standard_normal((GROUP, arguments.columns)) for seed in (0, 1000))
    short_draw = draw[:, : arguments.columns // 4]
    starts = [
        train(random_start(arguments.bits, arguments.field, seed), 30, short_draw) for seed in range(arguments.starts)
    ]
    long_runs = [
        train(format, arguments.rounds, draw) for format in sorted(starts, key=lambda f: error_of(f, test))[:5]
    ]
    best, random = min(long_runs, key=lambda format: error_of(format, test)), np.random.default_rng(77)
    least_error = error_of(best, test)
    typer.echo(f"relative squared error {least_error:.5f}")
    for number in range(arguments.moves):
        format = train(move_values(best, random), 16, draw[:, : arguments.columns // 2])
        error = error_of(format, test)
        if error < least_error:
            best, least_error = format, error
            typer.echo(f"move {number}: {error:.5f}")
    best = move_steps(best, draw)
    typer.echo(f"by single steps: {error_of(best, test):.5f}")
    for table in (best.head, best.tail):
        typer.echo(str(tuple(int(value * _STEP) for value in table)))


if __name__ == "__main__":
    main()
