"""What holds for formats of any kind, and that a family of formats is one file."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from graphopt.numerics.formats import FORMATS, Format
from tests.formats import PAIRS, SINGLES
from tests.registry_files import file_added

FILE = '''
"""Powers of two."""
from graphopt.numerics.formats.table import TableFormat

POWERS3 = TableFormat("powers3", 3, (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0))
POWERS2 = TableFormat("powers2", 2, (-2.0, -1.0, 1.0, 2.0))
'''
EACH_FORMAT = pytest.mark.parametrize("format", [*FORMATS.values(), PAIRS], ids=lambda format: format.name)


def test_a_family_of_formats_is_one_file(tmp_path: Path) -> None:
    names = set(FORMATS)
    with file_added(FORMATS, "graphopt.numerics.formats", tmp_path, FILE):
        assert set(FORMATS) - names == {"powers2", "powers3"}
    with (
        file_added(FORMATS, "graphopt.numerics.formats", tmp_path, FILE.replace("powers2", "int4")),
        pytest.raises(ValueError, match="two number formats are called int4"),
    ):
        len(FORMATS)


@EACH_FORMAT
def test_what_codes_stand_for_is_encoded_as_itself(format: Format) -> None:
    random = np.random.default_rng(0)
    count = len(format.levels.values) if format.levels else 2**format.bits
    codes = random.integers(0, count, (5, 40)).astype(np.uint8)
    scales = random.uniform(0.5, 2, (5, 40))
    points = random.integers(0, count, (5, 40)).astype(np.uint8) if format.zero_point else None
    numbers = format.decode(codes, scales, points)
    new_numbers = format.decode(format.encode(numbers, scales, points), scales, points)
    assert new_numbers == pytest.approx(numbers, abs=1e-12)  # codes may differ where sums of values are equal


@EACH_FORMAT
def test_blocks_of_columns_cover_all_and_split_no_code(format: Format) -> None:
    for columns, limit in ((40, 16), (7, 100), (33, 1)):
        blocks = list(format.blocks(columns, limit))
        assert [column for block in blocks for column in range(block.start, block.stop)] == list(range(columns))
        assert [block.start for block in map(format.code_columns, blocks)] == [block.start for block in blocks]
    assert len(list(PAIRS.blocks(40, 16))) == 1


def test_expected_errors() -> None:
    # Max 1960, table I: no 16 values err less than 0.009497 for normal numbers, no 4 less than 0.1175; table II: equal
    # steps, 0.01154. A draw of 16384 numbers is within 2% of that; int4 has one level on one side less to use.
    errors = {name: FORMATS[name].expected_error for name in ("nl4", "int4", "uint4")}
    assert errors == pytest.approx({"nl4": 0.0095, "int4": 0.0115, "uint4": 0.0115}, rel=0.02)
    assert SINGLES.expected_error == pytest.approx(0.1175, rel=0.05)  # tails count more with 4 values
    assert PAIRS.expected_error < 0.85 * SINGLES.expected_error


@EACH_FORMAT
def test_formats_travel_to_other_processes(format: Format) -> None:
    format.approximate(*np.ones((2, 3), np.float32))  # what is computed once may not keep it here
    assert pickle.loads(pickle.dumps(format)) == format
