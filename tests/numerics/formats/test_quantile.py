from __future__ import annotations

import numpy as np

from graphopt.numerics.formats import FORMATS

# Dettmers et al. 2023, appendix E
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Dotzel et al. 2024, in the code beside the paper (cornell-zhang/llm-datatypes, SF4_5), to six decimals
SF4 = (
    -1.0, -0.627781, -0.454736, -0.334331, -0.237434, -0.152899, -0.074982, 0.0,
    0.065513, 0.132965, 0.204661, 0.283835, 0.375805, 0.491076, 0.656781, 1.0,
)  # fmt: skip


def test_nf4_is_the_published_table() -> None:
    assert FORMATS["nf4"].table == tuple(float(np.float32(value)) for value in NF4)


def test_sf4_is_the_published_table() -> None:
    assert np.abs(FORMATS["sf4"].values - SF4).max() <= 0.5e-6 + 2**-25
