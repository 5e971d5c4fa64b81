"""Williamson's construction of Hadamard matrices of order 4 n for odd n, found by a search.

Four symmetric circulants A, B, C, D of order n with entries +1 and -1 and A^2 + B^2 + C^2 + D^2 = 4 n I make
[[A, B, C, D], [-B, A, -D, C], [-C, D, A, -B], [-D, -C, B, A]] a Hadamard matrix (Williamson 1944).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations_with_replacement
from math import gcd

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

_MOST_ORBITS = 14  # 2^14 candidate rows: a second or two, and some 100 MB


@lru_cache(maxsize=8)
def williamson(n: int) -> npt.NDArray[np.int8]:
    """Return a Hadamard matrix of order 4 ``n``, int8 [4 n, 4 n], the same one every time.

    Raises:
        ValueError: the search finds none. It is complete for odd n up to 29, and above that looks only at rows with
            symmetries.
    """
    for orbits in _symmetries(n):
        rows = _search(n, orbits)
        if rows is not None:
            a, b, c, d = (np.stack([np.roll(row, shift) for shift in range(n)]) for row in rows.astype(np.int8))
            return np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])
    raise ValueError(f"the search finds no Williamson matrices of order {n}")


def _symmetries(n: int) -> list[list[list[int]]]:
    """Return ways to cut 1 .. n-1 into orbits on which rows shall be constant, the fewest orbits first.

    The orbits are those of multiplying by -1 (so that a circulant is symmetric) and by one more unit modulo n; with
    -1 itself as that unit, the rows are all symmetric ones.
    """
    symmetries = {}
    for unit in (unit for unit in range(2, n) if gcd(unit, n) == 1):
        orbits: list[list[int]] = []
        for start in range(1, n):
            if not any(start in orbit for orbit in orbits):
                orbit = [start]
                for member in orbit:  # grows while it is read
                    orbit += {-member % n, member * unit % n} - set(orbit)
                orbits.append(sorted(orbit))
        symmetries[tuple(map(tuple, orbits))] = orbits
    return sorted((orbits for orbits in symmetries.values() if len(orbits) <= _MOST_ORBITS), key=len)


def _search(n: int, orbits: list[list[int]]) -> Rows | None:
    """Return first rows of A, B, C and D, [4, n], constant on ``orbits`` and 1 on the diagonal, or None."""
    signs = np.arange(2 ** len(orbits))[:, None] >> np.arange(len(orbits)) & 1
    rows = np.ones((len(signs), n), np.int64)
    for index, orbit in enumerate(orbits):
        rows[:, orbit] = 2 * signs[:, index, None] - 1
    # The eigenvalues' squares add up to 4 n, so no single one is larger. Floats only thin out; what is left is exact.
    rows = rows[(np.abs(np.fft.rfft(rows)) ** 2 < 4 * n + 0.5).all(1)]
    correlations = np.stack([(rows * np.roll(rows, orbit[0], 1)).sum(1) for orbit in orbits], 1)
    # A linear hash: four rows whose correlations add up to 0 have hashes that add up to 0 modulo 2^64.
    hashes = correlations.astype(np.uint64) @ np.random.PCG64(0).random_raw(len(orbits))
    sums = rows.sum(1)
    groups = {int(value): np.flatnonzero(sums == value) for value in np.unique(sums)}
    for four in combinations_with_replacement(sorted(groups), 4):
        if sum(value * value for value in four) == 4 * n:
            # smallest with largest, so that the two lists of pairs are about equally long
            a, b, c, d = sorted((groups[value] for value in four), key=len)
            first_hashes, second_hashes = (
                np.add.outer(hashes[a], hashes[d]).ravel(),
                np.negative(np.add.outer(hashes[b], hashes[c]).ravel()),
            )
            _, first, second = np.intersect1d(first_hashes, second_hashes, return_indices=True)
            for ad, bc in zip(first, second, strict=True):
                quadruple = [a[ad // len(d)], d[ad % len(d)], b[bc // len(c)], c[bc % len(c)]]
                if not correlations[quadruple].sum(0).any():
                    return rows[quadruple]
    return None
