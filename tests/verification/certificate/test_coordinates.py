from __future__ import annotations

import numpy as np
import pytest

from graphopt.numerics.rotations.claims import RotationClaim
from graphopt.verification.certificate.coordinates import Coordinates, canonical, in_blocks, same_coordinates
from graphopt.verification.certificate.rotations import Rotations, of_claim

ROTATIONS = Rotations()
TWO, FOUR = (ROTATIONS.number(of_claim(RotationClaim(kind="random", width=n, seed=n))) for n in (2, 4))


def labels(*triples: tuple[int, int, int]) -> Coordinates:
    """Labels of a vector, a triple (rotation, copy, index) for each coordinate."""
    tag = canonical(np.array(triples).T)
    assert tag is not None
    return tag


def test_copies_are_numbered_as_they_first_occur() -> None:
    tag = labels((0, 5, 5), (TWO, 9, 1), (TWO, 4, 0), (TWO, 9, 0), (TWO, 4, 1))
    assert tag.labels.tolist() == [[0, TWO, TWO, TWO, TWO], [0, 1, 2, 1, 2], [0, 1, 0, 0, 1]]
    assert same_coordinates(tag, labels((0, 0, 0), (TWO, 1, 1), (TWO, 7, 0), (TWO, 1, 0), (TWO, 7, 1)))
    assert not same_coordinates(tag, labels((0, 0, 0), (TWO, 1, 1), (TWO, 7, 0), (TWO, 7, 0), (TWO, 1, 1)))
    assert canonical(np.zeros((3, 4), np.int64)) is None
    assert not same_coordinates(tag, None)
    assert not same_coordinates(in_blocks(TWO, 2, 4), in_blocks(TWO, 2, 6))


@pytest.mark.parametrize(
    "broken",
    [
        [(TWO, 1, 0)],
        [(TWO, 1, 0), (TWO, 1, 0)],
        [(TWO, 1, 1), (TWO, 1, 2)],
        [(TWO, 1, 0), (TWO, 1, 1), (TWO, 1, 0)],
        [(TWO, 1, 0), (FOUR, 1, 1)],
        [(FOUR, 1, 0), (FOUR, 1, 1), (TWO, 1, 2), (TWO, 1, 3)],
        [(TWO, 1, 0), (TWO, 1, 1), (FOUR, 2, 0), (FOUR, 2, 1)],
        [(TWO, 1, 0), (TWO, 2, 1), (TWO, 1, 1)],
    ],
)
def test_a_copy_is_complete_with_each_index_once_and_one_rotation(broken: list[tuple[int, int, int]]) -> None:
    assert not labels(*broken).is_complete(ROTATIONS)


def test_complete_copies_may_lie_in_any_order_between_others() -> None:
    assert labels(
        (TWO, 1, 1), (FOUR, 2, 3), (0, 0, 0), (FOUR, 2, 0), (TWO, 1, 0), (FOUR, 2, 2), (FOUR, 2, 1)
    ).is_complete(ROTATIONS)


def test_coordinates_move_in_the_order_of_their_index() -> None:
    tag = labels((TWO, 1, 1), (0, 0, 0), (TWO, 1, 0))
    x = np.array([[5.0], [7.0], [3.0]])
    rotated_pair = ROTATIONS[TWO].apply(np.array([3.0, 5.0]))
    assert np.allclose(tag.apply(x, ROTATIONS).ravel(), [rotated_pair[1], 7, rotated_pair[0]])
    assert np.allclose(tag.apply(tag.apply(x, ROTATIONS), ROTATIONS, inverse=True), x)


def test_positions_look_alike_although_a_copy_lies_across_them() -> None:
    # Each slice along axis 0 has two different copies with indices 0 and 1; the copies change places.
    crossing = canonical(np.array([[[TWO, TWO], [TWO, TWO]], [[1, 2], [2, 1]], [[0, 1], [0, 1]]]))
    assert crossing is not None
    assert crossing.is_complete(ROTATIONS)
    assert crossing.spanned_axes() == {0, 1}
    assert crossing.reduce([0]) is None
    straight = in_blocks(TWO, 2, 4).move(lambda plane: plane.reshape(2, 2))
    assert straight is not None
    assert same_coordinates(straight.reduce([0]), canonical(in_blocks(TWO, 2, 2).labels[:, None]))
    assert straight.reduce([1]) is None
