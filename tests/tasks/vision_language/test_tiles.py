"""Which features of tiles are those of an image; tests/models/test_patch_towers.py holds them to transformers."""

from __future__ import annotations

from graphopt.tasks.vision_language.tiles import NEWLINE, Tiling, arrange_all

TILING = Tiling([[2, 4], [4, 2]], tile=2, side=2, tile_limit=None)


def test_a_grid_of_tiles_is_read_row_by_row_with_newlines() -> None:
    rows, weights = TILING.arrange((2, 4))
    small, upper, lower = [0, 1, 2, 3], [4, 5, 8, 9, NEWLINE], [6, 7, 10, 11, NEWLINE]
    assert rows[:, 0].tolist() == [*small, *upper, *lower]
    assert (weights == 1).all()


def test_rows_of_padding_are_left_out() -> None:
    # 1 of 4 rows is an image: a margin of one row remains on neither side of the two rows in the middle.
    wide = Tiling([[4, 4]], tile=2, side=2, tile_limit=None)
    rows, _ = wide.arrange((1, 2))
    assert len(rows) == 4 + 2 * (4 + 1)


def test_images_stand_one_behind_the_other() -> None:
    rows, _, counts = arrange_all(TILING, [None, (4, 2), None])
    assert counts == [5, 4 + 4 * 3, 5]
    assert rows[:5, 0].tolist() == [0, 1, 2, 3, NEWLINE]
    assert rows[5, 0] == 4
    assert rows[-5:, 0].tolist() == [16, 17, 18, 19, NEWLINE]
