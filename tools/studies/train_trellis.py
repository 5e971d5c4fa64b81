"""Train the tables of a trellis format on groups of normal weights, each with the best scale for it.

    python tools/studies/train_trellis.py 3 --rounds 60

A group is 64 rows of one column, 16 columns are a tile. Viterbi's algorithm gives codes, each group takes the scale of
least squared error, and the two tables are the least squares for all windows (Lloyd's algorithm), again and again.
Values are rounded to steps of 1/32 at the end. Prints the tables, and the relative squared error on other groups.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt
import typer

from graphopt.numerics.formats.trellis import TrellisFormat
from graphopt.quantization.rounding.nearest import round_to_nearest

Doubles = npt.NDArray[np.float64]
GROUP = 64
_LIMIT = 127 / 32


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
    gram, right = np.zeros((2 * size, 2 * size)), np.zeros(2 * size)
    for first, second in ((upper, lower + size), (lower + size, upper)):
        weight = np.bincount(first.ravel(), counts.ravel(), 2 * size)
        gram[np.arange(2 * size), np.arange(2 * size)] += weight
        right += np.bincount(first.ravel(), (counts * units).ravel(), 2 * size)
        pairs = first.astype(np.int64) * 2 * size + second
        gram += np.bincount(pairs.ravel(), counts.ravel(), 4 * size * size).reshape(2 * size, 2 * size)
    tables: Doubles = np.linalg.lstsq(gram, right, rcond=1e-9)[0].astype(np.float64)
    return make(format.bits, tables[:size], tables[size:])


def make(bits: int, head: Doubles, tail: Doubles) -> TrellisFormat:
    """Return a format; both tables get the same mean, which their sum does not notice."""
    shift = (head.mean() - tail.mean()) / 2
    return TrellisFormat(f"t{bits}", bits, tuple(map(float, head - shift)), tuple(map(float, tail + shift)))


def rounded(format: TrellisFormat) -> TrellisFormat:
    """Return the format with values in steps of 1/32."""
    tables = [tuple(float(v) for v in np.rint(np.array(t) * 32) / 32) for t in (format.head, format.tail)]
    return TrellisFormat(format.name, format.bits, *tables)


def error_of(format: TrellisFormat, draw: Doubles) -> float:
    """Return the relative squared error behind the search of scales that ``nearest`` does."""
    made = round_to_nearest(draw, format, GROUP, "least_squares").dequantize()
    return float(((made - draw) ** 2).mean() / (draw**2).mean())


def train(bits: int, field: int, rounds: int, columns: int, seed: int) -> TrellisFormat:
    """Return tables trained from a random start."""
    random = np.random.default_rng(seed)
    draw = random.standard_normal((GROUP, columns))
    span = 2.4 if bits > 2 else 1.8
    head = random.permutation(np.linspace(-span, span, 2**field))
    tail = random.permutation(np.linspace(-0.8, 0.8, 2**field))
    format, scales = make(bits, head, tail), np.ones((1, columns))
    for number in range(rounds):
        if number % 8 == 6:
            scales = round_to_nearest(draw, format, GROUP, "least_squares").scales.astype(np.float64)
        codes = format.encode(draw, scales)
        windows, values = format.windows(codes), format.decode(codes)
        if number > 6:
            scales = fit_scales(draw, values, scales[0])[None]
        format = fit_tables(format, draw / scales, windows, np.broadcast_to(scales**2, draw.shape))
    top = max(-float(format.values.min()), float(format.values.max()))
    # a product multiplies bytes: values are 127 steps of 1/32 at most
    factor = _LIMIT / top if top > _LIMIT else 1.0
    return rounded(make(bits, np.array(format.head) * factor, np.array(format.tail) * factor))


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bits", type=int)
    parser.add_argument("--field", type=int, default=4, help="bits of half a window")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--starts", type=int, default=3)
    arguments = parser.parse_args()
    test = np.random.default_rng(1000).standard_normal((GROUP, 256))
    best, least = None, np.inf
    for seed in range(arguments.starts):
        format = train(arguments.bits, arguments.field, arguments.rounds, arguments.columns, seed)
        error = error_of(format, test)
        typer.echo(f"start {seed}: relative squared error {error:.5f}")
        if error < least:
            best, least = format, error
    assert best is not None
    for table in (best.head, best.tail):
        typer.echo(str(tuple(int(value * 32) for value in table)))


if __name__ == "__main__":
    main()
